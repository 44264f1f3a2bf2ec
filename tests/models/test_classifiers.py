"""Whole models: parameter counts of the specification, pooling, checkpointing."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._subclasses import FakeTensorMode

from lit_probattn.attention import MGKAttention, SoftmaxAttention
from lit_probattn.models.classifiers import Classifier
from lit_probattn.models.embeddings import TokenEmbedding
from lit_probattn.models.heads import pool
from lit_probattn.randomness import RandomKey

SIZES = {"embed_dim": 64, "head_dim": 32, "num_layers": 2, "mlp_dim": 128}
LISTOPS = {"vocab_size": 32, "num_classes": 10, "max_seq_len": 2048}
TEXT = {"vocab_size": 512, "num_classes": 2, "max_seq_len": 4096}


def count(attention, data) -> int:
    with torch.device("meta"):
        model = Classifier(attention, **data, **SIZES)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("data", "heads", "expected"),
    [
        *((LISTOPS, h, n) for h, n in ((1, 193226), (2, 209802), (4, 242954), (8, 309258))),
        *((TEXT, h, n) for h, n in ((1, 353986), (2, 370562), (4, 403714), (8, 470018))),
    ],
)
def test_softmax_parameters_of_the_long_range_arena(data, heads, expected):
    assert count(partial(SoftmaxAttention, num_heads=heads), data) == expected


def test_padding_and_bucketing_change_nothing():
    """`mean` divides by max_seq_len, so a batch padded further gives the same logits."""
    model = Classifier(
        partial(SoftmaxAttention, num_heads=3),
        **{"vocab_size": 19, "num_classes": 5, "max_seq_len": 31, "embed_dim": 11},
        **{"head_dim": 7, "num_layers": 2, "mlp_dim": 13},
    )
    model = model.double().eval()
    inputs, mask = torch.randint(1, 19, (2, 17)), torch.ones(2, 17, dtype=torch.bool)
    mask[1, 9:] = False
    longer = torch.nn.functional.pad(inputs, (0, 14)), torch.nn.functional.pad(mask, (0, 14))
    short = model(inputs, key_mask=mask)
    torch.testing.assert_close(model(longer[0], key_mask=longer[1]), short, atol=1e-13, rtol=0)


def test_pooling_divisors():
    x, mask = torch.ones(1, 4, 2), torch.tensor([[True, True, True, False]])
    assert pool(x, mask, "mean", 8).tolist() == [[0.375, 0.375]]
    assert pool(x, mask, "mean_valid", 8).tolist() == [[1.0, 1.0]]
    assert pool(x, None, "mean_valid", 8).tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("attention", [SoftmaxAttention, MGKAttention])
def test_activation_checkpointing_changes_no_gradient(attention):
    """Recomputation draws the same attention dropout, and torch's generator the same masks."""
    grads = []
    for checkpointing in (False, True):
        torch.manual_seed(3)
        model = Classifier(
            partial(attention, num_heads=2, dropout=0.2, backend="blockwise"),
            **{"vocab_size": 19, "num_classes": 5, "max_seq_len": 17, "embed_dim": 11},
            **{"head_dim": 7, "num_layers": 2, "mlp_dim": 13},
            activation_checkpointing=checkpointing,
        )
        torch.manual_seed(5)
        inputs = torch.randint(1, 19, (2, 17))
        model(inputs, rng=RandomKey(1, 2, torch.tensor([4, 9]))).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_too_long_a_sequence_is_refused():
    model = Classifier(partial(SoftmaxAttention, num_heads=1), **LISTOPS, **SIZES)
    with pytest.raises(ValueError, match="length 2049: max_seq_len is 2048"):
        model(torch.ones(1, 2049, dtype=torch.int64))


def test_positions_are_made_where_the_tokens_are():
    """On a device that this machine may lack, as of tensors without data."""
    sizes = {"vocab_size": 13, "max_seq_len": 7, "embed_dim": 6, "dropout": 0.0}
    with FakeTensorMode(), torch.device("cuda"):
        for options in ({}, {"class_token": True}):
            embedding = TokenEmbedding(**sizes, **options)
            found = embedding(torch.zeros(2, 5, dtype=torch.int64))
            with torch.device("cpu"):
                again = embedding(torch.zeros(2, 5, dtype=torch.int64, device="cuda"))
            assert found.device.type == again.device.type == "cuda"
            assert found.shape == again.shape == (2, 5 + len(options), 6)
