"""What every FiSH layer promises while it draws noise: causality, padding, empty rows, copies."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lit_probattn.attention import FiSHAttention, LinearFiSHAttention
from lit_probattn.randomness import RandomKey

B, N, C, E = 2, 13, 11, 5
SIZES = {"num_heads": 7, "num_global_heads": 3, "noise_scale": 0.3}
LAYERS = {
    "fish": lambda **o: FiSHAttention(C, head_dim=E, **SIZES, **o),
    "fish-local": lambda **o: FiSHAttention(C, head_dim=E, **SIZES, noise="local", **o),
    "gfish": lambda **o: FiSHAttention(C, head_dim=E, **SIZES, mixer="mlp", mixing_bias="all", **o),
    "gfish-written": lambda **o: FiSHAttention(C, head_dim=E, **SIZES, mixer="relu_sum", **o),
    "mish": lambda **o: FiSHAttention(
        C, head_dim=E, **SIZES, mixer="shared", noise="local_global", **o
    ),
    "lfish": lambda **o: LinearFiSHAttention(C, head_dim=E, **SIZES, **o),
    "lfish-keys": lambda **o: LinearFiSHAttention(
        C, head_dim=E, **SIZES, lfish_mode="key_global", **o
    ),
    "lfish-scores": lambda **o: LinearFiSHAttention(
        C, head_dim=E, **SIZES, lfish_mode="score_global", **o
    ),
    "glfish": lambda **o: LinearFiSHAttention(C, head_dim=E, **SIZES, mixer="mlp", **o),
}
EVERY = pytest.mark.parametrize("name", LAYERS)
BACKENDS = pytest.mark.parametrize("backend", ["reference", "blockwise"])
KEY = RandomKey(5, step=3, sample_ids=torch.tensor([19, 4]))
CLOSE = {"rtol": 0.0, "atol": 1e-12}


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@EVERY
@BACKENDS
def test_future_tokens_change_nothing_when_causal(name, backend):
    layer, x = LAYERS[name](backend=backend).double(), double(B, N, C)
    y = torch.cat([x[:, :7], double(B, N - 7, C)], 1)
    a, b = (layer(z, is_causal=True, rng=KEY) for z in (x, y))
    torch.testing.assert_close(a[:, :7], b[:, :7], **CLOSE)
    assert (a[:, 7:] - b[:, 7:]).abs().min() > 0


@EVERY
@BACKENDS
def test_padding_and_batch_change_nothing(name, backend):
    layer, x = LAYERS[name](backend=backend).double(), double(B, N, C)
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[1, 9:] = False
    alone = RandomKey(5, step=3, sample_ids=torch.tensor([4]))
    short = layer(x[1:, :9], rng=alone)
    torch.testing.assert_close(layer(x, key_mask=mask, rng=KEY)[1:, :9], short, **CLOSE)


@EVERY
@BACKENDS
def test_rows_that_see_nothing_give_zeros_and_no_gradients(name, backend):
    layer, x = LAYERS[name](backend=backend, bias=False).double(), double(B, N, C)
    x.requires_grad_()
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[1] = False
    out = layer(x, key_mask=mask, rng=KEY)
    assert not out[1].any()
    out.square().sum().backward()
    assert not x.grad[1].any()
    assert x.grad[0].any()
    assert all(bool(p.grad.isfinite().all()) for p in layer.parameters())


@EVERY
@BACKENDS
def test_cross_attention_of_other_lengths(name, backend):
    layer = LAYERS[name](backend=backend, key_embed_dim=17, value_head_dim=3).double()
    memory = double(B, 19, 17)
    mask = torch.ones(B, 19, dtype=torch.bool)
    mask[0, 11:] = False
    out = layer(double(B, N, C), memory, key_mask=mask, rng=KEY)
    assert out.shape == (B, N, C)
    assert out.isfinite().all()


@EVERY
def test_checkpointing_draws_the_noise_again(name):
    layer, x = LAYERS[name]().double(), double(B, N, C).requires_grad_()

    def call(z):
        return layer(z, is_causal=True, rng=KEY)

    expected = torch.autograd.grad(call(x).square().sum(), x)[0]
    again = checkpoint(call, x, use_reentrant=False)
    found = torch.autograd.grad(again.square().sum(), x)[0]
    torch.testing.assert_close(found, expected, **CLOSE)


@EVERY
def test_state_dict_restores_the_layer(name):
    layer, x = LAYERS[name]().double(), double(B, N, C)
    torch.manual_seed(7)
    other = LAYERS[name]().double()
    assert not torch.equal(other(x, rng=KEY), layer(x, rng=KEY))
    other.load_state_dict(copy.deepcopy(layer.state_dict()))
    assert torch.equal(other(x, rng=KEY), layer(x, rng=KEY))


@EVERY
def test_models_can_be_built_and_counted_without_memory(name):
    with torch.device("meta"):
        layer = LAYERS[name]()
        out = layer(torch.empty(B, N, C), rng=RandomKey(0))
        without_key = layer(torch.empty(B, N, C))
    assert out.shape == without_key.shape == (B, N, C)
    assert out.device.type == "meta"
