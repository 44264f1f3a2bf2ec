"""The FiSH layer: noise switches and statistics, starts, presets, and refused input."""

from __future__ import annotations

import math

import pytest
import torch

from lit_probattn.attention import FiSHAttention, HeadCall
from lit_probattn.attention.masks import Masks
from lit_probattn.randomness import RandomKey

EMBED, HEAD = 11, 5


def fish(num_heads=7, num_global_heads=3, **options):
    return FiSHAttention(
        EMBED, head_dim=HEAD, num_heads=num_heads, num_global_heads=num_global_heads, **options
    )


# ---------------------------------------------------------------------------------- noise
def test_noise_is_off_at_evaluation_unless_asked_and_then_repeats():
    x = torch.randn(3, 13, EMBED)
    ids = torch.tensor([5, 8, 2])
    quiet = fish(noise_scale=0.5).eval()
    assert torch.equal(quiet(x, rng=RandomKey(1)), quiet(x, rng=RandomKey(2)))
    noisy = fish(noise_scale=0.5, noise_at_eval=True)
    noisy.load_state_dict(quiet.state_dict())
    noisy.eval()
    first = noisy(x, rng=RandomKey(1, step=10, sample_ids=ids))
    assert (first - quiet(x)).abs().max() > 1e-4
    # Another step, order and batch: the same draw for the same sample.
    again = noisy(x[[2, 1]], rng=RandomKey(1, step=99, sample_ids=ids[[2, 1]]))
    torch.testing.assert_close(again, first[[2, 1]], rtol=0, atol=1e-6)
    other = noisy(x, rng=RandomKey(2, step=10, sample_ids=ids))
    assert (other - first).abs().max() > 1e-4
    assert torch.equal(noisy(x), noisy(x))


def test_training_noise_follows_the_step_and_torch_without_a_key():
    x = torch.randn(2, 13, EMBED)
    layer = fish(noise_scale=0.5)
    same = [layer(x, rng=RandomKey(1, step=4)) for _ in range(2)]
    assert torch.equal(*same)
    assert not torch.equal(same[0], layer(x, rng=RandomKey(1, step=5)))
    assert not torch.equal(same[0], layer(x, rng=RandomKey(1, step=4).fold(1)))
    torch.manual_seed(3)
    drawn = layer(x)
    assert not torch.equal(drawn, layer(x))
    torch.manual_seed(3)
    assert torch.equal(drawn, layer(x))


def scores_of(layer, count):
    """Return the noise part of the local scores times √E, (H, count · 64)."""
    zeros = torch.zeros(1, layer.num_global_heads, 64, HEAD, dtype=torch.float64)
    parts = []
    for step in range(count):
        call = HeadCall(zeros, zeros, zeros, Masks(64, 64), rng=RandomKey(3, step=step))
        scores = layer.core.variant(call).scores(call)
        parts.append(scores[0].flatten(1) * HEAD**0.5)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("noise", ["global", "local", "local_global"])
def test_covariance_of_the_local_noise(noise):
    layer = fish(5, 3, noise=noise).double()
    with torch.no_grad():
        layer.core.mixing.weights[0].normal_()
        layer.core.noise_scale.theta.uniform_(0.5, 1.5)
    drawn = scores_of(layer, 25).detach()
    p, s = layer.core.mixing.weights[0].detach(), layer.core.noise_scale().detach()
    expected = torch.einsum("jk,lk,k->jl", p, p, s**2)
    if noise == "local":
        expected = torch.diag((p @ s) ** 2)
    elif noise == "local_global":
        expected = torch.diag(expected.diagonal())
    spread = expected.diagonal().sqrt()
    error = (torch.cov(drawn) - expected) / (spread[:, None] * spread[None, :])
    assert error.abs().max() < 5 * math.sqrt(2 / drawn.shape[1])


@pytest.mark.parametrize("shape", ["per_global", "scalar"])
def test_noise_starts_at_one_scale_whose_root_is_the_parameter(shape):
    layer = fish(sigma_shape=shape)
    torch.testing.assert_close(layer.core.noise_scale(), torch.full((3,), 0.01))
    assert layer.core.noise_scale.theta.numel() == (3 if shape == "per_global" else 1)
    torch.testing.assert_close(layer.core.noise_scale.theta[0].item(), 0.1)


def test_gradient_of_the_noise_scale():
    layer = fish(noise="global", noise_scale=0.3).double()
    x = torch.randn(2, 13, EMBED, dtype=torch.float64)
    key = RandomKey(3, sample_ids=torch.tensor([3, 4]))
    layer(x, rng=key).square().sum().backward()
    found = layer.core.noise_scale.theta.grad.clone()
    for k in range(3):
        values = []
        for shift in (1e-5, -1e-5):
            with torch.no_grad():
                layer.core.noise_scale.theta[k] += shift
                values.append(layer(x, rng=key).square().sum().item())
                layer.core.noise_scale.theta[k] -= shift
        assert abs((values[0] - values[1]) / 2e-5 - found[k].item()) < 1e-6


# ---------------------------------------------------------------------------------- start
@pytest.mark.parametrize("mixer", ["linear", "shared", "mlp", "relu_sum"])
def test_starting_distributions(mixer):
    sizes = {"num_heads": 211, "num_global_heads": 101, "mixer": mixer, "mixing_bias": "all"}
    for init, std in (("normal_0.02", 0.02), ("trunc_normal_0.02", 0.02), ("torch_linear", None)):
        mixing = FiSHAttention(3, head_dim=2, **sizes, mixing_init=init).core.mixing
        for weight in mixing.weights:
            bound = weight.shape[1] ** -0.5
            expected = bound / 3**0.5 if std is None else std
            error = 5 * expected / math.sqrt(2 * weight.numel())
            assert abs(weight.std().item() - expected) < error
        if std is not None:
            assert mixing.last_bias.abs().max() == 0
    simplex = fish(mixing="simplex")
    torch.testing.assert_close(
        simplex.core.mixing.values(None).weights[0], torch.full((7, 3), 1 / 3)
    )


def test_learned_tables_are_the_mixing_weights_and_the_noise_scale_if_there_is_noise():
    layer = fish(mixing="simplex")
    with torch.no_grad():
        layer.core.mixing.weights[0].normal_()
        layer.core.noise_scale.theta.uniform_(0.2, 0.4)
    tables = layer.core.learned()
    assert tables.keys() == {"mixing", "noise_scale"}
    weights, theta = layer.core.mixing.weights[0], layer.core.noise_scale.theta
    torch.testing.assert_close(tables["mixing"].values, weights.softmax(-1))
    torch.testing.assert_close(tables["noise_scale"].values, theta[None] ** 2)
    assert fish(noise="none").core.learned().keys() == {"mixing"}


def test_heads_follow_the_ratio():
    assert FiSHAttention(EMBED, head_dim=HEAD, num_heads=7).num_global_heads == 4
    layer = FiSHAttention(
        EMBED, head_dim=HEAD, num_heads=12, head_ratio=4, mixer="mlp", mixer_ratios=[5]
    )
    assert layer.core.mixing.widths == [3, 3, 12]


# ---------------------------------------------------------------------------------- bad input
@pytest.mark.filterwarnings("ignore:.* has no effect with ")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_global_heads": None, "head_ratio": 0.5}, "head_ratio must be at least 1"),
        ({"mixer": "mlp", "mixing_init": "copy", "num_global_heads": 4},
         r"twice as wide as num_global_heads=4, received widths \[7\]"),
        ({"mixer": "shared", "mixing_init": "copy"}, "mixers linear and mlp, received shared"),
        ({"mixer": "mlp", "mixing": "simplex"}, "always relaxed"),
        ({"mixing": "simplex", "mixing_init": "copy"}, "cannot start as a copy"),
        ({"mixer_ratios": [2]}, "mixer_ratios is for mixer=mlp, received mixer=linear"),
        ({"mixer": "mlp", "mixer_ratios": [0]}, "positive"),
        ({"noise_scale": 0.0}, "must be positive, received 0.0.*noise=none"),
    ],
)  # fmt: skip
def test_bad_choices_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        fish(**{"num_heads": 7, "num_global_heads": 3, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"cannot add noise to the scores \(noise=global\); .* blockwise"),
        ({"noise": "local"}, r"noise=local"),
        ({"mixer": "mlp", "noise": "none"}, r"mixer=mlp"),
        ({"noise": "none", "dropout": 0.1}, "dropout"),
    ],
)
def test_sdpa_names_what_it_does_not_support(options, message):
    layer = fish(backend="sdpa", **options)
    with pytest.raises(NotImplementedError, match=message):
        layer(torch.randn(2, 3, EMBED))


def test_sdpa_supports_a_noisy_model_at_evaluation():
    layer = fish(backend="sdpa", dropout=0.1).eval()
    x = torch.randn(2, 13, EMBED)
    expected = layer(x)
    layer.backend = "reference"
    torch.testing.assert_close(layer(x), expected)
    layer.backend, layer.core.noise_at_eval = "sdpa", True
    with pytest.raises(NotImplementedError, match="cannot add noise"):
        layer(x)
