"""What a side of the benchmark runs: heads or a layer, forward, backward or one query."""

from __future__ import annotations

import pytest
import torch

from lit_probattn.measure.counters import torch_flops
from profiling.kernels.config import KernelsConfig, Side
from profiling.kernels.sides import side_function
from tests.support.slow import taking_turns

SIDES = {
    "torch": {"torch_sdpa": {"num_heads": 2}},
    "softmax": ("SoftmaxAttention", {"num_heads": 2}),
    "mgk": ("MGKAttention", {"num_heads": 2}),
    "smgk": ("MGKAttention", {"num_heads": 2, "shifted_keys": True}),
    "fish": ("FiSHAttention", {"num_heads": 2, "num_global_heads": 1}),
    "linear": ("LinearAttention", {"num_heads": 2}),
}


def side(name, backend="auto"):
    given = SIDES[name]
    if isinstance(given, tuple):
        class_path, init_args = f"lit_probattn.attention.{given[0]}", given[1]
        attention = {"class_path": class_path, "init_args": init_args}
        given = {"attention": attention, "backend": backend}
    return Side.model_validate(given)


def point(**changes):
    given = {"batch_size": 3, "seq_len": 12, "head_dim": 4, "sides": {}}
    return KernelsConfig.model_validate({**given, "comparisons": [], **changes})


WAYS = [("attention", "train"), ("layer", "train"), ("layer", "eval")]
WAYS += [("attention", "eval"), ("attention", "decode"), ("layer", "decode")]


@pytest.mark.parametrize(("name", "way"), taking_turns(SIDES, WAYS))
def test_every_side_runs_in_every_mode(name, way):
    scope, mode = way
    run = side_function(side(name), point(scope=scope, mode=mode, is_causal=True))
    out, *gradients = run()
    rows = 1 if mode == "decode" else 12
    assert out.shape == ((3, rows, 32) if scope == "layer" else (3, 2, rows, 4))
    assert bool(gradients) == (mode == "train")
    assert all(gradient.isfinite().all() for gradient in gradients)
    if (name, scope, mode) != ("linear", "layer", "decode"):  # a state adds every token
        assert torch.equal(run()[0], out)


@pytest.mark.parametrize("name", ["softmax", "mgk", "smgk", "fish"])
def test_a_step_over_the_cache_is_that_of_the_equation(name):
    config = point(scope="layer", mode="decode")
    outs = []
    for backend in ("auto", "reference"):
        torch.manual_seed(0)  # of the projections
        outs.append(side_function(side(name, backend), config)()[0])
    torch.testing.assert_close(*outs)


def test_projections_are_inside_a_layer_alone():
    heads = side_function(side("torch"), point())()
    layer = side_function(side("torch"), point(scope="layer"))()
    assert [x.shape for x in heads[1:]] == [(3, 2, 12, 4)] * 3
    assert [tuple(x.shape) for x in layer[1:]] == [(3, 12, 32), (24, 32), (24,), (32, 8), (32,)]


def test_a_layer_has_the_backend_of_its_side(monkeypatch):
    monkeypatch.setitem(SIDES, "hard", ("MGKAttention", {"num_heads": 2, "e_step": "hard"}))
    with pytest.raises(NotImplementedError, match="backend 'sdpa'"):
        side_function(side("hard", "sdpa"), point(scope="layer"))


def test_pytorchs_layer_is_a_layer_and_causal_where_asked():
    given = Side.model_validate({"torch_layer": {"num_heads": 4}})
    assert not given.runs_at(point())
    assert given.runs_at(point(scope="layer"))
    out, *gradients = side_function(given, point(scope="layer", is_causal=True))()
    assert out.shape == (3, 12, 32)
    assert [tuple(x.shape) for x in gradients[1:]] == [(96, 32), (96,), (32, 32), (32,)]
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("is_causal", [False, True])
def test_products_alone_are_those_of_linear_attention(is_causal):
    """As many multiply-adds as the kernel of the layer needs, forward and backward."""
    given = Side.model_validate({"torch_products": {"num_heads": 2}})
    place = point(is_causal=is_causal, seq_len=64)
    assert given.runs_at(place)
    assert not given.runs_at(point(scope="layer"))
    heads, size, chunk = 3 * 2, 4, 32
    products = 6 * 64 * size * size
    if is_causal:  # states: their sums, reads, gradients of both; pairs: forward 2, backward 4
        products = 64 * (6 * size * size + 6 * chunk * size)
    run = side_function(given, place)
    assert torch_flops(run) == 2 * heads * products
    sizes = {x.numel() for x in run()}
    assert sizes == {heads * 64 * size * (4 if is_causal else 1)}


@pytest.mark.parametrize("mode", ["train", "eval", "decode"])
def test_flops_of_a_layer_can_be_counted_in_every_mode(mode):
    run = side_function(side("torch"), point(scope="layer", mode=mode))
    assert torch_flops(run) > 0
