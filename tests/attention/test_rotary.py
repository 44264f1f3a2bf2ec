"""Rotary positions: what is relative, what is one product, and what centring must not do."""

from __future__ import annotations

import pytest
import torch

from lit_probattn.attention import HeadCall, MGKAttention, SoftmaxAttention
from lit_probattn.attention.masks import Masks
from lit_probattn.attention.mgk.functions import mgk_scores
from lit_probattn.attention.rotary import Rotary
from lit_probattn.measure.counters import torch_macs
from tests.support.helpers import double

B, N, C, E, H = 2, 13, 11, 6, 3


def rotate(x, first, size, base=10000.0):
    """Rotation written as complex numbers."""
    out = x.clone()
    for m in range(size // 2):
        pair = torch.view_as_complex(x[..., 2 * m : 2 * m + 2].contiguous())
        angle = torch.arange(first, first + x.shape[-2], dtype=torch.float64)
        angle = angle * base ** (-2 * m / size)
        out[..., 2 * m : 2 * m + 2] = torch.view_as_real(pair * torch.exp(1j * angle))
    return out


def scores_at(layer, query, key, first):
    """Component-reduced scores when positions start at `first`."""
    whole = torch.nn.functional.pad(key, (0, 0, first, 0))
    rotated = layer.core.components(layer.rotary(whole, 0))[..., first:, :]
    query, masks = layer.rotary(query, first), Masks(query.shape[-2], key.shape[-2])
    return mgk_scores(query, rotated, layer.core.variant(HeadCall(query, rotated, key, masks)))


def lower_part(layer, query, key, first):
    """Normal form of a part of the keys that starts at `first`."""
    call = HeadCall(query, key, key, Masks(N, first + N), first_key=first)
    return layer.core.variant(call).lower(call)


@pytest.mark.parametrize("size", [2, 4, 6])
def test_rotation_equals_complex_products(size):
    x = double(B, H, N, E)
    found = Rotary(size, E)(x, 5)
    torch.testing.assert_close(found, rotate(x, 5, size), atol=1e-14, rtol=0)
    assert torch.equal(found[..., size:], x[..., size:])
    torch.testing.assert_close(found.norm(dim=-1), x.norm(dim=-1))


def test_far_positions_keep_their_angles_in_single_precision():
    x = torch.randn(1, 1, 4, E)
    rotary = Rotary(E, E)
    difference = rotary(x, 1_000_000).double() - rotary(x.double(), 1_000_000)
    assert difference.abs().max() < 1e-6


@pytest.mark.parametrize(("num_queries", "num_keys"), [(5, N), (N, 5)])
def test_queries_of_cross_attention_stand_at_the_last_keys(num_queries, num_keys):
    layer = SoftmaxAttention(C, H, head_dim=E, rotary_dim=4, value_head_dim=7).double()
    x, memory = double(B, num_queries, C), double(B, num_keys, C)
    q, k, v = (
        proj(given).unflatten(-1, (H, -1)).transpose(1, 2)
        for proj, given in (
            (layer.query_proj, x),
            (layer.key_proj, memory),
            (layer.value_proj, memory),
        )
    )
    scores = rotate(q, num_keys - num_queries, 4) @ rotate(k, 0, 4).mT / E**0.5
    expected = layer.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, memory), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("backend", ["reference", "sdpa", "blockwise"])
@pytest.mark.parametrize("shifted", [False, True])
def test_layer_equals_densities_of_rotated_vectors(backend, shifted):
    layer = MGKAttention(
        *(C, H),
        head_dim=E,
        rotary_dim=4,
        variance="paper_main",
        shifted_keys=shifted,
        backend=backend,
    ).double()
    with torch.no_grad():
        layer.core.prior.value.copy_(torch.rand(H, 2))
    x = double(B, N, C)
    q = rotate(layer.query_proj(x).unflatten(-1, (H, E)).transpose(1, 2), 0, 4)
    if shifted:
        keys = layer.key_proj(x).unflatten(-1, (H, E)).transpose(1, 2)
        components = [keys + layer.core.key_shift[:, r, None] for r in range(2)]
    else:
        keys = layer.key_proj(x).unflatten(-1, (H, 2, E))
        components = [keys[:, :, :, r].transpose(1, 2) for r in range(2)]
    density = torch.zeros(B, H, N, N, dtype=torch.float64)
    for r, k in enumerate(components):
        distance = (q[:, :, :, None] - rotate(k, 0, 4)[:, :, None]).square().sum(-1)
        sigma2 = (1.0, 3.0)[r] * E**0.5
        density = density + layer.core.prior.value[:, r, None, None] * torch.exp(
            -distance / (2 * sigma2)
        )
    v = layer.value_proj(x).unflatten(-1, (H, E)).transpose(1, 2)
    heads = density / density.sum(-1, keepdim=True) @ v
    expected = layer.out_proj(heads.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("options", "is_relative"),
    [
        ({}, True),
        ({"shifted_keys": True, "rotary_shift": "before"}, True),
        ({"shifted_keys": True, "rotary_shift": "unrotated"}, True),
        ({"shifted_keys": True, "rotary_shift": "after"}, False),
    ],
    ids=str,
)
def test_scores_see_relative_positions_only(options, is_relative):
    layer = MGKAttention(C, H, head_dim=E, rotary_dim=4, variance="paper_main", **options).double()
    query = double(B, H, N, E)
    key = double(B, H, N, E) if layer.shifted_keys else double(B, H, 2, N, E)
    change = scores_at(layer, query, key, 37) - scores_at(layer, query, key, 0)
    if is_relative:
        assert change.abs().max() < 1e-13
    else:
        assert change.abs().max() > 0.1


def test_unrotated_shifts_cost_one_product():
    """query · R_j k_j + query · b_r reproduces the scores of the shifted, rotated keys."""
    layer = MGKAttention(
        C,
        H,
        head_dim=E,
        rotary_dim=4,
        shifted_keys=True,
        rotary_shift="unrotated",
        variance="code_lm",
    ).double()
    assert layer.core.key_shift.shape == (H, 2, E - 4)
    query, key = double(B, H, N, E), double(B, H, N, E)
    q, k = layer.rotary(query, 0), layer.rotary(key, 0)
    lowered = lower_part(layer, q, k, 0)
    assert lowered.key.shape[2] == 1
    change = lowered.reduced() - scores_at(layer, query, key, 0)  # constant in a row
    torch.testing.assert_close(change, change[..., :1].expand_as(change), atol=1e-13, rtol=0)


def test_operations_of_shifts_before_rotation_are_counted_without_gradients():
    options = {"shifted_keys": True, "rotary_dim": 4, "rotary_shift": "before"}
    layer = MGKAttention(C, H, head_dim=E, backend="reference", **options)
    assert torch_macs(layer, torch.randn(1, N, C)).products == layer.cost(N).macs


def test_key_norms_do_not_change():
    for shift in ("before", "unrotated"):
        options = {"shifted_keys": True, "rotary_shift": shift}
        layer = MGKAttention(C, H, head_dim=E, rotary_dim=4, **options).double()
        key = double(B, H, N, E)
        there, here = (lower_part(layer, key, layer.rotary(key, i), i).col for i in (50, 0))
        torch.testing.assert_close(there, here, atol=1e-13, rtol=0)


@pytest.mark.parametrize("backend", ["reference", "sdpa", "blockwise"])
def test_centring_comes_after_rotation(backend):
    """A large common vector turns with the position, so only rotated vectors may be centred."""
    layer = MGKAttention(C, H, head_dim=E, rotary_dim=4, variance="paper_main").double()
    with torch.no_grad():
        layer.query_proj.bias += 30.0
        layer.key_proj.bias += 30.0
    layer.backend = "reference"
    x = double(B, N, C)
    exact = layer(x)
    layer.backend = backend
    low = layer.float()(x.float())
    # Distances up to (2 · 30)² · 4 in float32: their rounding, 1e-3, divided by 2σ² = 5.
    assert (low.double() - exact).abs().max() < 1e-3
    assert (exact - layer.double().out_proj.bias).abs().max() > 0.01


def test_cache_holds_rotated_keys_at_their_places():
    layer = SoftmaxAttention(C, H, head_dim=E, rotary_dim=E).double().eval()
    x = double(B, N, C)
    cache = layer.new_cache()
    for part in x.split(3, 1):
        layer(part, is_causal=True, cache=cache)
    keys = layer.key_proj(x).unflatten(-1, (H, E)).transpose(1, 2)
    torch.testing.assert_close(cache.part(range(N))[0], rotate(keys, 0, E), atol=1e-14, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rotary_dim": 4, "rotary_shift": "inside"}, "before, after, unrotated"),
        ({"rotary_dim": E, "rotary_shift": "unrotated"}, "rotary_dim=6 leaves no dimension"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MGKAttention(C, H, head_dim=E, shifted_keys=True, **options)
