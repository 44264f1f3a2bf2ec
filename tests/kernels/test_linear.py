"""Kernels of linear attention, its mixtures and linear FiSH against float64 sums over all pairs."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch

from lit_probattn.attention import HeadCall, LinearAttention, ReleasedLinearAttention
from lit_probattn.attention.masks import make_masks
from lit_probattn.kernels.linear import selftest
from lit_probattn.kernels.linear.operators import (
    LinearArguments,
    linear_attention,
    state_columns,
)
from lit_probattn.kernels.linear.selftest import Kind
from lit_probattn.kernels.runtime import Launch, forced, recording
from profiling.kernels.parity import run_heads
from tests.support.slow import mostly_slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = {
    "linear": Kind(),
    "relu, normed": Kind(features="relu", normed=True),
    "features": Kind(features="none"),
    "no division": Kind(divides=False),
    "mixed, masked": Kind(components=2, masked=True),
    "mixed, prior per position, normed": Kind(components=2, prior_rows=True, normed=True),
    "mixed before, prior per position": Kind(components=2, mix_before=True, prior_rows=True),
    "shifted": Kind(components=3, shifted=True, masked=True),
    "shifted, prior per position": Kind(components=2, shifted=True, prior_rows=True),
    "shifted, mixed before": Kind(components=2, shifted=True, mix_before=True),
    "weighted": Kind(weighted=True, masked=True),
    "weighted, no division": Kind(weighted=True, divides=False),
}


def check_kind(name, is_causal, tiles, head_dims, sizes):
    """Compare one sample with two heads, which mix two sources or share one."""
    sizes_of_calls = {"_HEADS": 2, "_SOURCES": 2 if KINDS[name].weighted else 1}
    with forced(Launch(*tiles)), mock.patch.multiple(selftest, **sizes_of_calls):
        given = is_causal, DEVICE, torch.float32, head_dims, sizes
        pairs = selftest.compare(KINDS[name], *given, batch=1)
    for found, exact in pairs:
        torch.testing.assert_close(found.double(), exact, atol=3e-5, rtol=3e-5)


@pytest.mark.usefixtures("nan_filled_empties")
@pytest.mark.parametrize(
    ("name", "is_causal", "tiles", "sizes"),
    mostly_slow(
        itertools.product(
            *(KINDS, [False, True], [(16, 16), (16, 48), (64, 64)], [(21, 40), (40, 21), (1, 5)])
        ),
        [
            ("shifted", True, (16, 48), (1, 5)),
            ("mixed, prior per position, normed", True, (16, 48), (1, 5)),
            ("shifted, prior per position", False, (16, 48), (1, 5)),
            ("weighted", True, (16, 48), (21, 40)),  # states carried within a segment
            ("weighted, no division", False, (64, 64), (1, 5)),
            ("relu, normed", False, (64, 64), (40, 21)),
        ],
    ),
)
def test_chunks_and_segments_of_any_length_agree(name, is_causal, tiles, sizes):
    check_kind(name, is_causal, tiles, (11, 7), sizes)


@pytest.mark.usefixtures("nan_filled_empties")
@pytest.mark.parametrize(
    ("name", "is_causal"),
    mostly_slow(
        itertools.product(["linear", "no division", "weighted"], [False, True]),
        [("no division", False)],
    ),
)
def test_states_wider_than_a_program_holds_are_read_by_columns(name, is_causal):
    """Values of 40 entries, padded to 64, are two blocks of columns; the second ends early."""
    assert state_columns(64, mixes=name == "weighted") == 32
    check_kind(name, is_causal, (16, 16), (5, 40), (13, 25))


def assert_equals_the_reference(layer):
    """Compare outputs and gradients of one sample with two heads of 9 tokens."""
    layer, found = layer.to(DEVICE).eval(), []
    given = [torch.randn(1, 2, 9, 5, device=DEVICE).requires_grad_() for _ in range(3)]
    for backend in ("triton", "reference"):
        out = run_heads(layer, backend, HeadCall(*given, make_masks(1, 2, 9, 9)))
        found.append([out, *torch.autograd.grad(out.square().sum(), given)])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, atol=3e-5, rtol=3e-5)


@pytest.mark.usefixtures("nan_filled_empties")
def test_weights_of_denominators_without_a_division_have_zero_gradients():
    query, key, value = (torch.randn(1, heads, 9, 5, device=DEVICE) for heads in (2, 3, 3))
    weights = [torch.randn(2, 3, device=DEVICE).requires_grad_() for _ in range(2)]
    named = {"weight": weights[0], "norm_weight": weights[1], "divides": False}
    out, _ = linear_attention(query, key, value, **named)
    grads = torch.autograd.grad(out.square().sum(), weights)
    assert grads[0].abs().amin() > 0
    assert not grads[1].any()


def test_features_that_kernels_do_not_make_are_made_outside():
    for options in ({"feature_map": "favor", "num_features": 13}, {"feature_map": "dpfp"}):
        torch.manual_seed(0)
        assert_equals_the_reference(LinearAttention(12, 2, head_dim=5, **options))


def test_factors_of_the_released_codes_are_those_of_the_reference():
    normed = {"feature_norm": "sum", "eps": 1e-5, "output_scale": "inv_sqrt_head_dim"}
    for options in (normed, {"denominator": "sqrt_len"}):
        assert_equals_the_reference(ReleasedLinearAttention(12, 2, head_dim=5, **options))


def test_divisions_without_denominators_are_refused():
    x = torch.ones(1, 1, 3, 4, device=DEVICE)
    with pytest.raises(ValueError, match="has_totals=False"):
        linear_attention(x, x, x, has_totals=False)
    with pytest.raises(ValueError, match="norm_weight=None"):
        linear_attention(x, x, x, weight=torch.ones(1, 1, device=DEVICE))


def test_integers_as_factors_do_not_compile_kernels_again():
    x = torch.ones(1, 1, 3, 4, device=DEVICE)
    with recording() as launches:
        linear_attention(x, x, x, eps=0, factor=1)
    calls = [launch.args[0] for launch in launches if isinstance(launch.args[0], LinearArguments)]
    assert {type(number) for call in calls for number in (call.eps, call.factor)} == {float}
