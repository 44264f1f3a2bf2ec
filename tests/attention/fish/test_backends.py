"""FiSH, GFiSH and MiSH on every backend against independent float64 sums, with the draw fixed."""

from __future__ import annotations

import itertools

import pytest
import torch

from lit_probattn.attention import FiSHAttention
from lit_probattn.attention.engines.native import native_refusal
from lit_probattn.randomness import RandomKey
from tests.attention.fish.oracle import fish_oracle
from tests.attention.test_parity import check_beside_eager
from tests.support.helpers import (
    assert_blocks_of_any_size_agree,
    assert_dropout_draws_the_pairs_of,
    assert_equals_the_sums,
    cpu_backends,
)
from tests.support.slow import FEWER, every_nth, some_of, taking_turns

EMBED, HEAD = 11, 5
SHAPES = [(13, 13), (5, 17), (17, 7), (1, 3)]
MASKS = ["none", "key", "key+pairs+bias"]
COMBINATIONS = list(itertools.product(SHAPES, MASKS, (False, True)))
SIZES = {"num_heads": 7, "num_global_heads": 3}
BEFORE = {"scale_position": "before"}

VARIANTS = {
    "fish": {},
    "fish, simplex": {"mixing": "simplex", **BEFORE},
    "mish": {"mixer": "shared"},
    "gfish": {"mixer": "mlp", "mixing_bias": "all"},
    "gfish, scale before": {"mixer": "mlp", **BEFORE},
    "gfish, noise on scaled": {"mixer": "mlp", **BEFORE, "noise_position": "scaled"},
    "gfish, three layers": {"mixer": "mlp", "mixer_ratios": [2, 1.5], "mixing_bias": "none"},
    "gfish as written": {"mixer": "relu_sum"},
}
NOISES = ["none", "global", "local", "local_global"]
CASES = [
    pytest.param(options, noise, backend, id=f"{name}-{noise}-{backend}")
    for name, options in VARIANTS.items()
    for noise in NOISES
    for backend in cpu_backends(FiSHAttention(4, 2, noise="none"))
    if backend != "sdpa"
    or (noise == "none" and options.get("mixer", "linear") in ("linear", "shared"))
    if backend != "native"  # draws noise in float32 alone, and takes layers alone
    or (noise == "none" and name not in ("gfish, three layers", "gfish as written"))
]


def make_layer(options, **extra):
    options = {**SIZES, **options, **extra}
    if options["noise"] != "none":
        options["noise_scale"] = 0.3
        if options.get("mixer") == "shared":
            options["sigma_shape"] = "scalar"
    layer = FiSHAttention(EMBED, head_dim=HEAD, **options).double()
    with torch.no_grad():
        for name, value in layer.named_parameters():
            if name.startswith("core.mixing.weights"):
                value.normal_()
            elif name.startswith("core.noise_scale"):
                value.uniform_(0.4, 0.9)
    return layer


@pytest.mark.usefixtures("nan_filled_empties")
@pytest.mark.parametrize("share", FEWER)
@pytest.mark.parametrize(("options", "noise", "backend"), CASES)
def test_backend_equals_the_sums(options, noise, backend, share):
    layer = make_layer(options, noise=noise)
    rng = RandomKey(3, step=5, sample_ids=torch.tensor([41, 7])).fold(2)
    for case in some_of(COMBINATIONS, share, options, noise, backend):
        grads = assert_equals_the_sums(layer, fish_oracle, [backend], case, rng=rng)
        if noise != "none" and case[0] != (1, 3):
            assert grads["core.noise_scale.theta"].abs().min() > 0


@pytest.mark.skipif(native_refusal("cpu") is not None, reason="no C library here")
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("noise", NOISES[1:])
@pytest.mark.parametrize("name", ["fish", "fish, simplex", "mish", "gfish", "gfish, scale before"])
def test_tiles_draw_the_noise_of_the_equation(name, noise, p):
    """In float32, the only precision that they draw it in."""
    layer = make_layer(VARIANTS[name], noise=noise, dropout=p).float()
    x = torch.randn(2, 37, EMBED)
    results = {}
    for backend in ("reference", "native"):
        layer.backend = backend
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        out = layer(leaf, is_causal=True, rng=RandomKey(3, 5, torch.tensor([41, 7])))
        out.square().sum().backward()
        grads = {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}
        results[backend] = {"out": out.detach(), "x": leaf.grad, **grads}
    for part, expected in results["reference"].items():
        size = expected.abs().max().clamp(min=1.0)
        found = results["native"][part]
        torch.testing.assert_close(found / size, expected / size, rtol=0, atol=2e-5)


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
@pytest.mark.parametrize("name", ["fish", "mish", "gfish", "gfish as written"])
def test_dropout_and_noise_draw_the_same_pairs(name, backend):
    layer = make_layer(VARIANTS[name], noise="global", dropout=0.3)
    assert_dropout_draws_the_pairs_of(fish_oracle, layer, backend)


@pytest.mark.parametrize(
    ("name", "noise"), taking_turns(["mish", "gfish", "gfish as written"], NOISES)
)
def test_blocks_of_any_size_agree(name, noise):
    assert_blocks_of_any_size_agree(make_layer(VARIANTS[name], noise=noise))


@pytest.mark.parametrize("backend", ["reference", "sdpa", "blockwise"])
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (2, 2), (7, 7), (7, 1)])
def test_extreme_head_counts_and_value_sizes(sizes, backend):
    """Two heads too: they are the fewest that must not take each other's map."""
    heads, num_global = sizes
    ways = [("linear", "key"), ("shared", "key+pairs+bias"), ("mlp", "key"), ("relu_sum", "key")]
    for value_dim, (mixer, masks) in itertools.product((3, 13), ways):
        if backend == "sdpa" and mixer in ("mlp", "relu_sum"):
            continue
        options = {"num_heads": heads, "num_global_heads": num_global, "mixer": mixer}
        layer = make_layer({**options, "value_head_dim": value_dim}, noise="none")
        assert_equals_the_sums(layer, fish_oracle, [backend], ((11, 11), masks, True))


FAST = every_nth(8, [p for p in CASES if p.values[-1] != "reference" and "three" not in p.id])


@pytest.mark.parametrize(("options", "noise", "backend"), FAST)
def test_single_precision_error_is_within_twice_eager(options, noise, backend):
    """A noise scale has one number per draw, and a few with large gradients decide its error."""
    draws = [[(length, RandomKey(seed)) for length in range(17, 37, 2)] for seed in range(3, 11)]
    check_beside_eager(lambda: make_layer(options, noise=noise), backend, draws)
