"""The pair task: parameters as published, one encoder for both texts, draws that differ."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from lit_probattn.attention import MGKAttention
from lit_probattn.models.classifiers import PairClassifier as PairModel
from lit_probattn.randomness import RandomKey
from lit_probattn.tasks import PairClassifier
from tests.tasks.tiny import soft_mgk, softmax

SIZES = {"vocab_size": 13, "num_classes": 2, "max_seq_len": 24}
SMALL = {"embed_dim": 12, "head_dim": 6, "num_layers": 2, "mlp_dim": 20}


def pair_model(attention=softmax, **options) -> PairModel:
    torch.manual_seed(0)
    return PairModel(attention, **{**SIZES, **SMALL, "dropout": 0.0, **options})


def batch(rows: int = 5, length: int = 17) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, length + 1, (rows, 2, 1), generator=generator)
    mask = torch.arange(length) < lengths
    inputs = torch.randint(1, 13, (rows, 2, length), generator=generator) * mask
    return {
        "inputs": inputs,
        "key_mask": mask,
        "target": torch.arange(rows) % 2,
        "sample_ids": torch.arange(rows) + 3,
    }


def published_count(attention) -> int:
    task = PairClassifier(attention, vocab_size=512, num_classes=2, max_seq_len=4096)
    return sum(parameter.numel() for parameter in task.parameters())


@pytest.mark.parametrize(
    ("num_heads", "count"), [(1, 378562), (2, 395138), (4, 428290), (8, 494594), (12, 560898)]
)
def test_softmax_has_the_published_parameters(num_heads: int, count: int) -> None:
    assert published_count(partial(softmax, num_heads=num_heads)) == count


@pytest.mark.parametrize(
    ("num_heads", "shifted", "count"),
    [
        (1, False, 382726),
        (2, False, 403462),
        (4, False, 444934),
        (6, False, 486406),
        (1, True, 378694),
        (2, True, 395398),
        (4, True, 428806),
        (6, True, 462214),
    ],
)
def test_mixtures_have_the_published_parameters(num_heads: int, shifted: bool, count: int) -> None:
    """One pair of priors per layer; priors per head add K (H - 1) in each of 2 layers."""
    own = partial(MGKAttention, num_heads=num_heads, shifted_keys=shifted)
    assert published_count(partial(own, prior_share="layer")) == count
    assert published_count(own) == count + 2 * 2 * (num_heads - 1)


def test_logits_are_the_formula_on_two_encodings() -> None:
    """Each text encoded alone, unpadded; then [X0, X1, X0 X1, X0 - X1] -> hidden -> ReLU -> 2."""
    model = pair_model().double().eval()
    data = batch()
    logits = model(data["inputs"], key_mask=data["key_mask"])
    assert logits.shape == (5, 2)
    for row in range(5):
        pooled = []
        for side in (0, 1):
            text = data["inputs"][row, side][data["key_mask"][row, side]]
            pooled.append(model.encoder(model.embedding(text[None]))[0].sum(0) / 24)
        x0, x1 = pooled
        feature = torch.cat([x0, x1, x0 * x1, x0 - x1])
        hidden = (model.head.fc1.weight @ feature + model.head.fc1.bias).relu()
        expected = model.head.fc2.weight @ hidden + model.head.fc2.bias
        torch.testing.assert_close(logits[row], expected, rtol=1e-10, atol=1e-12)


def test_texts_are_not_interchangeable_and_pairs_are_apart() -> None:
    model, data = pair_model().eval(), batch()
    logits = model(data["inputs"], key_mask=data["key_mask"])
    swapped = model(data["inputs"].flip(1), key_mask=data["key_mask"].flip(1))
    assert not torch.allclose(logits, swapped, atol=1e-4)
    order = torch.tensor([3, 0, 4, 1, 2])
    again = model(data["inputs"][order], key_mask=data["key_mask"][order])
    torch.testing.assert_close(again, logits[order])


def test_the_two_texts_of_a_pair_drop_different_weights() -> None:
    """With equal texts, X0 - X1 vanishes unless their draws differ."""
    model = pair_model(partial(softmax, dropout=0.5))
    data = batch()
    data["inputs"][:, 1], data["key_mask"][:, 1] = data["inputs"][:, 0], data["key_mask"][:, 0]
    flat, mask = data["inputs"].flatten(0, 1), data["key_mask"].flatten(0, 1)
    seen: list[torch.Tensor | None] = []

    def keep(module, args, kwargs):
        seen.append(kwargs["rng"].sample_ids)

    handle = model.encoder.register_forward_pre_hook(keep, with_kwargs=True)
    key = RandomKey(0, 7, data["sample_ids"])
    logits = model(data["inputs"], key_mask=data["key_mask"], rng=key)
    handle.remove()
    assert seen[0].tolist() == [6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
    encoded = model.encoder(
        model.embedding(flat), key_mask=mask, rng=replace(key, sample_ids=seen[0])
    )
    first, second = encoded.unflatten(0, (-1, 2)).unbind(1)
    assert (first - second).abs().amax((1, 2)).min() > 1e-3
    # A pair draws the same wherever it stands in the batch, and another draw in another step.
    order = torch.tensor([4, 2, 0, 1, 3])
    moved = model(
        data["inputs"][order],
        key_mask=data["key_mask"][order],
        rng=RandomKey(0, 7, data["sample_ids"][order]),
    )
    torch.testing.assert_close(moved, logits[order])
    later = model(data["inputs"], key_mask=data["key_mask"], rng=replace(key, step=8))
    assert not torch.allclose(later, logits)


def test_m_step_statistics_are_those_of_both_texts() -> None:
    """Setting B: one call over 2 B texts accumulates what two calls over B texts do."""
    data = batch()
    together = pair_model(soft_mgk).train()
    apart = pair_model(soft_mgk).train()
    together(data["inputs"], key_mask=data["key_mask"])
    for side in (0, 1):
        x = apart.embedding(data["inputs"][:, side])
        apart.encoder(x, key_mask=data["key_mask"][:, side])
    for one, two in zip(together.encoder.blocks, apart.encoder.blocks, strict=True):
        statistics = one.attention.core.prior_statistics()
        assert statistics is not None
        torch.testing.assert_close(statistics, two.attention.core.prior_statistics())


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected pairs \(B, 2, N\), received inputs \(5, 17\)"):
        pair_model()(batch()["inputs"][:, 0])


def test_gradients_reach_every_parameter() -> None:
    task = PairClassifier(softmax, **SIZES, **SMALL)
    task.model.eval()
    data = batch()
    logits = task.model(data["inputs"], key_mask=data["key_mask"])
    torch.nn.functional.cross_entropy(logits, data["target"]).backward()
    for name, parameter in task.named_parameters():
        assert parameter.grad is not None, name
        size = float(parameter.grad.abs().max())
        if name.endswith("key_proj.bias"):  # moves all scores of a query alike
            assert size < 1e-6, name
        else:
            assert size > 1e-6, name
