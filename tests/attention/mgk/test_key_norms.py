"""The weight of the keys' norms: 1 is the dot product, 0 the Gaussian, and every backend knows."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from lit_probattn.attention import MGKAttention
from lit_probattn.attention.own.contract import backends_for
from tests.support.helpers import largest_difference, run_with_gradients

B, H, N, E, K, C = 2, 3, 11, 5, 2, 17
EXACT = 1e-12

FORMS = [
    {},
    {"shifted_keys": True},
    {"num_components": 3, "num_kv_heads": 1},
    {"shifted_keys": True, "num_heads": 4, "num_kv_heads": 2},
    {"shifted_keys": True, "rotary_dim": 4},
    {"e_step": "hard"},
]


def make(weight, seed=3, **options):
    """Return a layer in float64 whose weights depend on the options other than the weight."""
    torch.manual_seed(seed)
    options = {"num_heads": H, "num_components": K, **options}
    layer = MGKAttention(C, head_dim=E, key_norm_weight=weight, **options).double()
    with torch.no_grad():
        layer.key_proj.weight.mul_(3.0)
    return layer


def supported(layer):
    return backends_for(layer, inputs()[0])


def inputs():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(B, N, C, generator=generator, dtype=torch.float64) + 0.7
    real = torch.arange(N) < torch.tensor([[N], [N - 3]])
    return [x, real]


def call_of(layer, is_causal):
    return lambda given: layer(given[0], key_mask=given[1], is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("options", FORMS, ids=str)
def test_with_weight_1_it_is_the_dot_product_and_with_0_the_gaussian(options, is_causal):
    """In output and in all gradients, by every backend; shifts then cancel, as they should."""
    for weight, other in ((1.0, {"score": "dot"}), (0.0, {})):
        layer = make(weight, **options)
        with (
            pytest.warns(match="the shift cancels")
            if _collapses({**options, **other})
            else nullcontext()
        ):
            plain = make(None, **options, **other)
        plain.backend = "reference"
        expected = run_with_gradients(plain, inputs(), call_of(plain, is_causal))
        for name in ("auto", *supported(layer)):
            layer.backend = name
            found = run_with_gradients(layer, inputs(), call_of(layer, is_causal))
            assert max(largest_difference(found, expected)) < EXACT, (weight, name)


@pytest.mark.parametrize("options", [*FORMS, {"variance": "paper_main"}], ids=str)
@pytest.mark.parametrize("log_det", [False, True])
def test_between_it_is_the_formula(options, log_det):
    """log π + λ‖k‖²/2σ² − ‖q − k‖²/2σ², written out pair by pair."""
    layer = make(0.25, include_log_det=log_det, **options)
    x, real = inputs()
    call = layer.call(x, key_mask=real)
    key = layer.core.components(call.key)
    heads = call.query.shape[1]
    key = key.repeat_interleave(heads // key.shape[1], 1)
    variance, prior = layer.core.variance(), layer.core.prior
    variance = variance.repeat_interleave(heads // len(variance), 0)
    scores = torch.zeros(B, heads, key.shape[2], N, N, dtype=torch.float64)
    for i in range(N):
        for j in range(N):
            difference = (call.query[:, :, None, i] - key[..., j, :]).square().sum(-1)
            scores[..., i, j] = (0.25 * key[..., j, :].square().sum(-1) - difference) / 2 / variance
    if prior is not None:
        own = prior(N)
        scores += own.repeat_interleave(heads // len(own), 0)[None, ..., None, :]
    if log_det:
        scores -= E / 2 * variance.log()[None, :, :, None, None]
    joint = scores.amax(2) if options.get("e_step") == "hard" else scores.logsumexp(2)
    weights = joint.masked_fill(~real[:, None, None], float("-inf")).softmax(-1)
    torch.testing.assert_close(layer.weights(x, key_mask=real), weights, rtol=0, atol=EXACT)
    posterior, _ = layer.core.posterior(call)
    torch.testing.assert_close(posterior, weights, rtol=0, atol=EXACT)
    outputs = {}
    for name in supported(layer):
        layer.backend = name
        outputs[name] = run_with_gradients(layer, inputs(), call_of(layer, False))
    for name, found in outputs.items():
        assert max(largest_difference(found, outputs["reference"])) < EXACT, name


@pytest.mark.parametrize("options", FORMS[:2], ids=str)
def test_decoding_knows_the_weight(options):
    layer = make(0.5, **options).eval()
    x, _ = inputs()
    whole = layer(x, is_causal=True)
    cache = layer.new_cache(N)
    steps = [layer(x[:, i : i + 1], is_causal=True, cache=cache) for i in range(N)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0, atol=EXACT)


def test_weights_that_were_annealed_are_those_of_a_plain_layer():
    layer, plain = make(1.0), make(None, seed=9)
    with pytest.raises(ValueError, match="key_norm_weight is 1, so these weights are not of a"):
        plain.load_state_dict(layer.state_dict())
    layer.core.set_norm_weight(0.0)
    plain.load_state_dict(layer.state_dict())
    x, real = inputs()
    torch.testing.assert_close(plain(x, key_mask=real), layer(x, key_mask=real), rtol=0, atol=EXACT)
    assert "core.key_norm_weight" not in plain.state_dict()


def test_studies_of_densities_need_the_end_of_the_annealing():
    layer = make(0.5)
    call = layer.call(inputs()[0])
    with pytest.raises(ValueError, match="not densities of Gaussians"):
        layer.core.gaussians(call)
    layer.core.set_norm_weight(0.0)
    assert layer.core.gaussians(call).key.shape == (B, H, K, N, E)


def _collapses(options):
    return bool(options.get("shifted_keys")) and options.get("score") == "dot"
