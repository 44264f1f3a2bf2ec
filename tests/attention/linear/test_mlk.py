"""MLK and sMLK: identities with linear attention, options, cost, prior gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lit_probattn.attention import (
    LinearAttention,
    MLKAttention,
    ReleasedLinearAttention,
    ReleasedMLKAttention,
)

B, N, C, E, H, K = 2, 13, 11, 5, 3, 2


def draw_priors(layer):
    with torch.no_grad():
        layer.core.prior.value.copy_(0.1 + 0.8 * torch.rand_like(layer.core.prior.value))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shifted", [False, True])
def test_t5_mixing_before_the_map_is_linear_attention_with_mixed_weights(shifted, is_causal):
    """T5: φ(Σ_r π_r k_r) is the baseline with W_K = Σ_r π_r W_r (shifts: an affine change)."""
    mixed = ReleasedMLKAttention(
        C, H, head_dim=E, mix="before", shifted_keys=shifted, denominator="sqrt_len", padded_len=17
    ).double()
    draw_priors(mixed)
    plain = ReleasedLinearAttention(
        C, H, head_dim=E, denominator="sqrt_len", padded_len=17
    ).double()
    prior = mixed.core.prior.value  # (H, K)
    with torch.no_grad():
        for name in ("query_proj", "value_proj", "out_proj"):
            getattr(plain, name).load_state_dict(getattr(mixed, name).state_dict())
        weight, bias = mixed.key_proj.weight, mixed.key_proj.bias
        if shifted:
            weight = weight.view(H, E, C) * prior.sum(1)[:, None, None]
            bias = bias.view(H, E) * prior.sum(1)[:, None]
            bias = bias + (prior[..., None] * mixed.core.key_shift).sum(1)
        else:
            weight = (prior[:, :, None, None] * weight.view(H, K, E, C)).sum(1)
            bias = (prior[..., None] * bias.view(H, K, E)).sum(1)
        plain.key_proj.weight.copy_(weight.reshape(H * E, C))
        plain.key_proj.bias.copy_(bias.reshape(-1))
    x = torch.randn(B, N, C, dtype=torch.float64)
    expected = plain(x, is_causal=is_causal)
    torch.testing.assert_close(mixed(x, is_causal=is_causal), expected, atol=1e-12, rtol=0)
    # After the map it is something else.
    mixed.core.form = ReleasedMLKAttention(
        C, H, head_dim=E, mix="after", denominator="sqrt_len", padded_len=17
    ).core.form
    assert (mixed(x, is_causal=is_causal) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("flat", [False, True])
def test_responsibilities_are_shares_of_the_components_in_the_kernel(flat):
    """By direct sums; keys of all components beside each other are those of a further dimension."""
    layer = MLKAttention(C, H, head_dim=E).double()
    draw_priors(layer)
    call = layer.call(torch.randn(B, N, C, dtype=torch.float64), is_causal=True)
    keys, prior = call.key, layer.core.prior.probabilities(N)  # (B, H, K, N, E)
    assert keys.shape == (B, H, K, N, E)
    features = [torch.nn.functional.elu(x) + 1 for x in (call.query[:, :, None], keys)]
    kernel = prior[..., None] * (features[0] @ features[1].mT)
    visible = kernel.sum(2).tril()
    if flat:
        call = replace(call, key=keys.flatten(1, 2))
    weights, shares = layer.core.posterior(call)
    torch.testing.assert_close(weights, visible / visible.sum(-1, keepdim=True))
    torch.testing.assert_close(shares, kernel / kernel.sum(2, keepdim=True))


@pytest.mark.parametrize(("mix", "whole"), [("after", True), ("before", False)])
def test_one_component_may_have_a_dimension_if_components_are_separate(mix, whole):
    layer = ReleasedMLKAttention(C, H, head_dim=E, num_components=1, mix=mix)
    call = layer.call(torch.randn(B, N, C))
    stacked = replace(call, key=call.key.reshape(B, H, 1, N, E))
    if whole:
        torch.testing.assert_close(layer.core(stacked), layer.core(call))
    else:
        with pytest.raises(ValueError, match=f"key has {H} x 1 heads, expected {H}"):
            layer.core(stacked)


def test_one_component_is_the_baseline():
    mixed = MLKAttention(C, H, head_dim=E, num_components=1).double()
    plain = LinearAttention(C, H, head_dim=E).double()
    plain.load_state_dict({k: v for k, v in mixed.state_dict().items() if "prior" not in k})
    x = torch.randn(B, N, C, dtype=torch.float64)
    torch.testing.assert_close(mixed(x), plain(x), atol=1e-14, rtol=0)


def test_common_factor_of_the_priors_cancels_and_their_gradient_is_orthogonal():
    layer = MLKAttention(C, H, head_dim=E).double()
    draw_priors(layer)
    x = torch.randn(B, N, C, dtype=torch.float64)
    out = layer(x)
    (out**2).sum().backward()
    prior = layer.core.prior.value
    assert prior.grad.abs().min() > 1e-6
    assert (prior.grad * prior).sum(1).abs().max() < 1e-12
    with torch.no_grad():
        prior *= 0.25
    torch.testing.assert_close(layer(x), out, atol=1e-13, rtol=0)


def test_costs_of_the_specification():
    assert MLKAttention(64, 4, head_dim=32).cost(4096).paper_flops == 403_419_008
    assert MLKAttention(64, 4, head_dim=32, shifted_keys=True).cost(4096).paper_flops == 337_883_008


def test_macs_equal_the_counter_on_the_fast_form():
    from torch.utils.flop_counter import FlopCounterMode

    favor = {"feature_map": "favor", "num_features": 9}
    for options in (
        *({}, {"shifted_keys": True}, {"num_kv_heads": 1}, {"denominator": "sqrt_len"}),
        *(favor, {**favor, "shifted_keys": True}, {**favor, "mix": "before", "num_kv_heads": 1}),
    ):
        sizes = {"head_dim": E, "value_head_dim": 7}
        layer = ReleasedMLKAttention(C, H, backend="blockwise", **sizes, **options)
        with FlopCounterMode(display=False) as counter:
            layer(torch.randn(1, N, C))
        assert counter.get_total_flops() == 2 * layer.cost(N).macs, options


def test_parameters():
    """Per layer: K key maps, or one with K shifts; K priors per head."""
    plain = sum(p.numel() for p in LinearAttention(C, H, head_dim=E).parameters())
    key_map = H * E * (C + 1)
    assert MLKAttention(C, H, head_dim=E).cost(N).num_parameters == plain + key_map + H * K
    shifted = MLKAttention(C, H, head_dim=E, shifted_keys=True)
    assert shifted.cost(N).num_parameters == plain + H * K * E + H * K
    assert MLKAttention(C, H, head_dim=E, prior_share="layer").core.prior.value.shape == (K,)


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="num_components must be at least 1, received 0"):
        MLKAttention(C, H, head_dim=E, num_components=0)
    layer = MLKAttention(C, H, head_dim=E, prior_share="head_position", max_positions=7)
    with pytest.raises(ValueError, match="13 keys, but priors exist for max_positions=7 only"):
        layer(torch.randn(B, N, C))


def test_floor_of_clamped_priors_is_zero():
    """A prior below zero switches its component off exactly, unlike the floor of log space."""
    layer = MLKAttention(C, H, head_dim=E).double()
    x = torch.randn(B, N, C, dtype=torch.float64)
    with torch.no_grad():
        layer.core.prior.value[:, 1] = -0.1
        out = layer(x)
        layer.key_proj.weight.view(H, K, E, C)[:, 1] += 3.0
    torch.testing.assert_close(layer(x), out, atol=0, rtol=0)
