"""A model that trains through the kernels follows the one that trains through the reference."""

from __future__ import annotations

import pytest
import torch

from lit_probattn.attention import MGKAttention, SoftmaxAttention
from lit_probattn.models.classifiers import Classifier
from lit_probattn.randomness import RandomKey
from profiling.cost.count import attention_layers

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEPS, BATCH, LENGTH = 5, 4, 21
VARIANTS = {
    "softmax": lambda c, head_dim: SoftmaxAttention(c, 2, head_dim=head_dim, dropout=0.1),
    "mgk": lambda c, head_dim: MGKAttention(c, 2, head_dim=head_dim, dropout=0.1),
    "smgk": lambda c, head_dim: MGKAttention(
        c, 2, head_dim=head_dim, shifted_keys=True, dropout=0.1
    ),
}


def losses(factory, backend):
    """Return the losses of a few steps with dropout, padding and a large learning rate."""
    torch.manual_seed(0)
    model = Classifier(
        factory, vocab_size=11, num_classes=3, max_seq_len=LENGTH, embed_dim=16, head_dim=8,
        num_layers=1, mlp_dim=16, dropout=0.0,
    ).to(DEVICE)  # fmt: skip
    for layer in attention_layers(model):
        layer.backend = backend
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    found = []
    for step in range(STEPS):
        tokens = torch.randint(1, 11, (BATCH, LENGTH), generator=generator).to(DEVICE)
        mask = (torch.rand(BATCH, LENGTH, generator=generator) < 0.9).to(DEVICE)
        target = torch.randint(3, (BATCH,), generator=generator).to(DEVICE)
        rng = RandomKey(0, step=step, sample_ids=torch.arange(BATCH, device=DEVICE) + step * BATCH)
        loss = torch.nn.functional.cross_entropy(model(tokens, key_mask=mask, rng=rng), target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        found.append(loss.item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_losses_follow_the_reference(name):
    expected = losses(VARIANTS[name], "reference")
    assert max(expected) - min(expected) > 0.02  # something was learned, so steps differ
    assert losses(VARIANTS[name], "triton") == pytest.approx(expected, abs=2e-5)
