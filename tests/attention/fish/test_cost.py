"""The cost of FiSH: appendix D symbol by symbol, parameter counts, break-even, and a counter."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch.utils.flop_counter import FlopCounterMode

from lit_probattn.attention import FiSHAttention, SoftmaxAttention
from lit_probattn.attention.cost.fish import (
    Mixing,
    break_even_head_dim,
    mixing_flops,
    score_flops,
)

EMBED, HEAD = 11, 5
AS_CODED = {"mixer": "mlp", "mixing_bias": "all"}


def fish(num_heads=7, num_global_heads=3, **options):
    return FiSHAttention(
        EMBED, head_dim=HEAD, num_heads=num_heads, num_global_heads=num_global_heads, **options
    )


N, D, DX, HEADS, M = sympy.symbols("N D D_x H M", positive=True)


@pytest.mark.parametrize(
    ("noise", "options", "pairs", "once"),
    [
        ("none", {}, 2 * M * D + 2 * M * HEADS - HEADS - M, 0),
        ("global", {}, 2 * M * D + 2 * M * HEADS - HEADS, 0),
        ("local", {}, 2 * M * D + 2 * M * HEADS + HEADS - M, HEADS * (2 * M - 1)),
        # A deviation per head: M products, M squares, M - 1 sums and a root.
        ("local_global", {}, 2 * M * D + 2 * M * HEADS + HEADS - M, HEADS * 3 * M),
        ("local_global", {"mixer": "shared"}, 2 * M * D + M - 1 + 2 * HEADS, 3 * M),
        ("none", {"mixer": "mlp", "mixing_bias": "none"},
         2 * M * D + 2 * M * HEADS + 2 * HEADS**2 - HEADS - M, 0),
        ("none", AS_CODED, 2 * M * D + 2 * M * HEADS + 2 * HEADS**2 + HEADS - M, 0),
        ("global", AS_CODED, 2 * M * D + 2 * M * HEADS + 2 * HEADS**2 + HEADS, 0),
        ("none", {"mixer": "shared"}, 2 * M * D + M - 1, 0),
    ],
)  # fmt: skip
def test_closed_forms_of_the_scores(noise, options, pairs, once):
    layer = fish(noise=noise, **options)
    mixer, widths = layer.core.mixing.mixer, layer.core.mixing.widths
    bias = options.get("mixing_bias", "none")
    found = score_flops(17, EMBED, HEAD, 3, *mixing_flops(Mixing(widths, mixer, bias, noise), 7))
    total = pairs * N**2 + 2 * N * M * D * (2 * DX - 1) + once
    values = {N: 17, D: HEAD, DX: EMBED, HEADS: 7, M: 3}
    assert found == total.subs(values)


def test_appendix_d_identities():
    plain = N**2 * HEADS * (2 * D - 1) + 2 * N * HEADS * D * (2 * DX - 1)
    mixed = (2 * (D + HEADS) * M - HEADS) * N**2 + 2 * N * M * D * (2 * DX - 1)
    saving = (2 * (HEADS - M) * D - 2 * M * HEADS) * N**2
    saving += 2 * (HEADS - M) * D * (2 * DX - 1) * N
    assert sympy.expand(plain - mixed - saving) == 0
    values = {N: 19, D: 16, DX: 128, HEADS: 8, M: 2}
    assert score_flops(19, 128, 16, 8, 0) == plain.subs(values)
    linear = Mixing([2, 8], "linear", noise="global")
    assert score_flops(19, 128, 16, 2, *mixing_flops(linear, 8)) == mixed.subs(values)
    cross = score_flops(19, 128, 16, 8, 0, num_keys=7)
    assert cross == 19 * 7 * 8 * 31 + 26 * 8 * 16 * 255


def test_whole_layer_totals():
    n, c = 29, 128
    for heads, m in ((8, 2), (8, 4), (8, 6)):
        sizes = {"num_heads": heads, "num_global_heads": m, "bias": False}
        d = 16
        linear = 4 * (heads + m) * d * c - 2 * (heads + m) * d - c
        pairs = 2 * heads * d + 2 * m * d + 2 * m * heads - heads
        found = FiSHAttention(c, head_dim=d, **sizes).cost(n)
        assert found.paper_flops == n * n * pairs + n * linear
        pairs += 2 * heads * heads + 2 * heads - m
        found = FiSHAttention(c, head_dim=d, **sizes, **AS_CODED, noise="none").cost(n)
        assert found.paper_flops == n * n * pairs + n * linear


@pytest.mark.parametrize(
    ("heads", "m", "plain", "generalized"),
    [
        (8, 2, 2.67, 14.5),
        (8, 4, 8, 25.5),
        (8, 6, 24, 58.5),
        (4, 2, 4, 13.5),
        (16, 8, 16, 49.5),
        (16, 4, 5.33, 27.8),
        (12, 6, 12, 37.5),
        (24, 12, 24, 73.5),
    ],
)
def test_break_even_head_sizes(heads, m, plain, generalized):
    assert abs(break_even_head_dim(heads, m) - plain) < 0.005
    assert abs(break_even_head_dim(heads, m, "mlp", noise="none") - generalized) < 0.051
    hard = break_even_head_dim(heads, m, noise="none")
    assert hard == pytest.approx(m * (2 * heads - 1) / (2 * (heads - m)))


@pytest.mark.parametrize(
    ("m", "noise", "mixing", "expected"),
    [
        (2, "none", {}, 9_087_232),
        (2, "global", {}, 9_087_264),
        (2, "none", AS_CODED, 9_088_512),
        (2, "global", AS_CODED, 9_088_544),
        (4, "none", {}, 9_218_560),
        (4, "global", {}, 9_218_624),
        (4, "none", AS_CODED, 9_219_840),
        (4, "global", AS_CODED, 9_219_904),
        (6, "none", {}, 9_349_888),
        (6, "global", {}, 9_349_984),
        (6, "none", AS_CODED, 9_351_168),
        (6, "global", AS_CODED, 9_351_264),
    ],
)
def test_parameters_of_the_language_model(m, noise, mixing, expected):
    """Of its 16 layers; with softmax they have 9,480,192 (tests/models/test_language_model.py)."""
    baseline = SoftmaxAttention(128, head_dim=16, num_heads=8, bias=False)
    layer = FiSHAttention(
        128, head_dim=16, num_heads=8, num_global_heads=m, bias=False, noise=noise, **mixing
    )
    saved = sum(p.numel() for p in baseline.parameters()) - layer.cost(1).num_parameters
    assert 9_480_192 - 16 * saved == expected


@pytest.mark.parametrize("noise", ["none", "global", "local", "local_global"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mixer": "shared"},
        AS_CODED,
        {"mixer": "mlp", "mixer_ratios": [2, 3]},
        {"mixer": "relu_sum"},
    ],
)
@pytest.mark.parametrize("mode", ["train", "eval", "noise at eval"])
def test_macs_equal_the_counter(options, noise, mode):
    """The form that is written out has other products without noise, also at evaluation."""
    drawn = {"noise_at_eval": True} if mode == "noise at eval" and noise != "none" else {}
    layer = fish(noise=noise, value_head_dim=3, backend="reference", **options, **drawn)
    layer.train(mode == "train")
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(1, 13, EMBED))
    assert layer.cost(13).macs == counter.get_total_flops() // 2


@pytest.mark.parametrize("options", [{}, {"mixer": "shared"}, AS_CODED])
def test_the_blockwise_form_runs_the_same_products(options):
    counts = []
    for backend in ("reference", "blockwise"):
        layer = fish(noise="global", backend=backend, **options)
        with FlopCounterMode(display=False) as counter:
            layer(torch.randn(1, 13, EMBED))
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]
