"""The linear FiSH layer: costs, presets, and refused input."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lit_probattn.attention import FiSHAttention, LinearFiSHAttention
from tests.attention.fish.test_linear import EMBED, GENERAL, HEAD, VARIANTS, make_layer


@pytest.mark.parametrize("noise", ["none", "global"])
@pytest.mark.parametrize("name", VARIANTS)
def test_macs_equal_the_counter(name, noise):
    layer = make_layer(VARIANTS[name], noise=noise, backend="blockwise").float()
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(1, 13, EMBED))
    assert layer.cost(13).macs == counter.get_total_flops() // 2


def test_cost_and_parameters_of_the_specification():
    n, c, e, h, g = 29, 128, 16, 8, 2
    sizes = {"num_heads": h, "num_global_heads": g, "bias": False}
    plain = LinearFiSHAttention(c, head_dim=e, **sizes)
    mixing = h * g * e * e
    macs = n * c * (h * e + g * e + g * e + h * e) + n * g * e * e + mixing
    macs += n * h * e * e + n * h * e + h * g * e
    assert plain.cost(n).macs == macs
    parameters = 2 * (h * e * c + g * e * c) + h * g
    assert plain.cost(n).num_parameters == parameters + g
    general = LinearFiSHAttention(c, head_dim=e, **sizes, **GENERAL, noise="none")
    assert general.cost(n).macs == macs + h * h * e * e
    assert general.cost(n).num_parameters == parameters + h * h + 2 * h + h * g
    flops = n * (2 * c - 1) * 2 * (h + g) * e + g * e * e * (2 * n - 1) + h * e * e * (2 * g - 1)
    flops += g * e * e + n * h * e * (2 * e - 1)  # noise, reading; W_O: C = H·E
    flops += g * e * (n - 1) + h * e * (2 * g - 1) + n * h * (2 * e - 1) + n * h * e
    assert plain.cost(n).paper_flops == flops
    per_entry = h * (2 * h - 1) + h + 2 * h  # another layer, a ReLU, and two biases
    assert general.cost(n).paper_flops == flops - g * e * e + per_entry * e * e  # without noise


def test_normaliser_of_states_mixed_by_an_mlp_starts_as_the_mean_of_the_global_heads():
    layer = LinearFiSHAttention(EMBED, 7, head_dim=HEAD, num_global_heads=3, **GENERAL)
    assert layer.core.state_dict()["normalizer.weight"].shape == (7, 3)
    found = layer.core.normalizer(layer.core.mixing.weights[0])
    torch.testing.assert_close(found, torch.full((7, 3), 1 / 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_global_heads": 8}, "at most num_heads=7"),
        ({**GENERAL, "mixing_init": "copy", "num_global_heads": 4}, "twice as wide"),
        ({"noise": "local"}, "noise must be one of none, global, received 'local'"),
        ({"mixer": "shared"}, "mixer must be one of linear, mlp"),
        ({"noise_scale": 0.0}, "must be positive"),
        ({"eps": -1.0}, r"eps must be in \[0, 1\)"),
    ],
)
def test_bad_choices_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make_layer(options)


def test_calls_without_pairs_are_refused():
    layer = make_layer({})
    x = torch.randn(2, 3, EMBED, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="cannot apply attn_mask"):
        layer(x, attn_mask=torch.ones(3, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="no scores before a softmax"):
        layer(x, bias=torch.zeros(3, 3))
    with pytest.raises(ValueError, match="LinearFiSHState, received KVCache"):
        layer(x, cache=FiSHAttention(EMBED, head_dim=HEAD, num_heads=2).new_cache())
    with pytest.raises(NotImplementedError, match="no attention maps"):
        layer.weights(x)
    with pytest.raises(NotImplementedError, match="use one of: auto, reference, blockwise"):
        make_layer({}, backend="sdpa")(x)
    state = layer.new_cache()
    layer(x, cache=state)
    with pytest.raises(ValueError, match="contains a batch of 2, received 1"):
        layer(x[:1], cache=state)
