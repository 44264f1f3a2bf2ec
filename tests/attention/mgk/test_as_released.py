"""Presets of the released code: M-steps, starts, decoding and refusals.

What they compute is compared with the released modules in tests/convert/test_layer_names.py.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lit_probattn.attention import LinearAttention, MLKAttention
from lit_probattn.attention.released.mgk import ReleasedArguments, ReleasedOptions
from lit_probattn.base.config_files import run_stem
from lit_probattn.configs import class_of, read_yaml
from tests.support.paths import shipped

FILES = {run_stem(path): path for path in shipped("attention") if "as_released" in path.parts}
B, N, C, E, H = 2, 13, 11, 5, 3
TOLERANCE = {"atol": 1e-12, "rtol": 0}


def load(name):
    config = read_yaml(FILES[name])
    assert list(config) == ["model"]
    assert list(config["model"]["init_args"]) == ["attention"]  # sets the variant, nothing else
    attention = config["model"]["init_args"]["attention"]
    options = {**attention["init_args"], "num_heads": H, "dropout": 0.0}
    return class_of(attention["class_path"]), options


def make(name, **options):
    """Build a config's layer on small sizes, with priors inside, at and outside [0, 1]."""
    cls, arguments = load(name)
    layer = cls(C, head_dim=E, **{**arguments, **options}).double()
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            if key == "core.prior.value":
                parameter.copy_(torch.rand_like(parameter) * 1.5 - 0.1)
                parameter.view(-1)[0], parameter.view(-1)[1] = 0.4, 1.3  # 1.3 counts as 1
            else:
                parameter += 0.2 * torch.randn_like(parameter)
    return layer


def heads(proj, x, count=1):
    """Project and split: one (B, H, N, E) per component."""
    split = proj(x).unflatten(-1, (H, count, E)).permute(3, 0, 2, 1, 4)
    return list(split) if count > 1 else split[0]


def keys(layer, x):
    """Return both keys of every position; shifts are k + b with b = −μ."""
    if not layer.shifted_keys:
        return heads(layer.key_proj, x, 2)
    k = heads(layer.key_proj, x)
    return [k + layer.core.key_shift[:, r, None] for r in range(2)]


def squared(q, k):
    return (q[:, :, :, None] - k[:, :, None]).square().sum(-1)


def draw():
    x = torch.randn(B, N, C, dtype=torch.float64)
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[1, 9:] = False  # padding at the end, as in Long Range Arena
    return x, mask


def finish(layer, out):
    return layer.out_proj(out.transpose(1, 2).flatten(2))


def test_code_lra_clamped_prior_is_zero_to_rounding():
    """No floor: a raw prior below zero removes its component (e^{-69} of it is left)."""
    layer, (x, _) = make("code_lra_mgk"), draw()
    with torch.no_grad():
        layer.core.prior.value.copy_(torch.tensor([0.4, -0.2], dtype=torch.float64))
    q, k = heads(layer.query_proj, x), keys(layer, x)[0]
    density = torch.exp(-squared(q, k) / (2 * E**0.5))
    out = density / density.sum(-1, keepdim=True) @ heads(layer.value_proj, x)
    torch.testing.assert_close(layer(x), finish(layer, out), **TOLERANCE)


@pytest.mark.parametrize("name", ["mgk", "smgk"])
def test_code_lra_soft_updates_priors_at_every_forward(name):
    """h-07: π_j1 = Σ_i γ_ij / (Σ_i 1 + 1e-6), γ with 1e-6 beside the density, real pairs only."""
    layer = make(f"code_lra_{name}_soft_e", max_positions=17).train()
    pi = torch.full((H, N), 0.5, dtype=torch.float64)
    for _ in range(3):
        x, mask = draw()
        x, mask[:, 4] = 3 * x, False  # far queries: the 1e-6 matters; a key that no query counts
        q, (k1, k2) = heads(layer.query_proj, x), keys(layer, x)
        real = mask[:, None, None, :].double()
        d1, d2 = (torch.exp(-squared(q, k) / (2 * E**0.5)) * real for k in (k1, k2))
        density = pi[:, None] * d1 + (1 - pi[:, None]) * d2
        out = density / density.sum(-1, keepdim=True) @ heads(layer.value_proj, x)
        # This call uses the old priors, the next one the new priors.
        torch.testing.assert_close(layer(x, key_mask=mask), finish(layer, out), **TOLERANCE)
        gamma = pi[:, None] * d1 / (density + 1e-6)
        numerator = torch.einsum("bi,bhij->hj", mask.double(), gamma)
        count = torch.einsum("bi,bj->j", mask.double(), mask.double())
        pi = torch.where(count > 0, numerator / (count + 1e-6), pi).detach()
        stored = layer.core.prior.value
        torch.testing.assert_close(stored[:, 0, :N], pi, **TOLERANCE)
        torch.testing.assert_close(stored.sum(1), torch.ones(H, 17).double(), **TOLERANCE)
        assert (stored[:, :, N:] == 0.5).all()
    assert (pi - 0.5).abs().max() > 0.05
    assert layer.core.prior_statistics() is None  # nothing is left for an update per optimiser step
    before = layer.core.prior.value.clone()
    layer.eval()(x, key_mask=mask)
    assert torch.equal(layer.core.prior.value, before)


def test_exact_m_step_differs_from_the_released_one():
    """spec a.12: at −log density 10, 14, 20 the exact 0.731 becomes 0.708, 0.265, 0.001."""
    from lit_probattn.attention.masks import make_masks
    from lit_probattn.attention.released.mgk import code_parity_sums

    for exponent, expected in ((10, 0.708), (14, 0.265), (20, 0.001)):
        # One dimension, 2σ² = 1: densities e^{-exponent} and e^{-exponent - 1}, priors 1/2.
        key = torch.tensor([exponent**0.5, (exponent + 1) ** 0.5]).double().view(1, 1, 2, 1, 1)
        numerator, count = code_parity_sums(
            torch.zeros(1, 1, 1, 1).double(),
            key,
            torch.full((1, 2, 1), 0.5).double().log(),
            torch.full((1, 2), 0.5).double(),
            masks=make_masks(1, 1, 1, 1),
            query_mask=None,
            code="lm",
        )
        assert round((numerator / count)[0, 0, 0].item(), 3) == expected


@pytest.mark.parametrize("name", ["linear", "mlk", "smlk"])
def test_code_lra_linear_family_divides_by_the_root_of_the_padded_length(name):
    layer, (x, mask) = make(f"code_lra_{name}"), draw()
    padded = make(f"code_lra_{name}", padded_len=4 * N)
    padded.load_state_dict(layer.state_dict())
    bias = layer.out_proj.bias
    halves = (layer(x, key_mask=mask) - bias) / 2 + bias
    torch.testing.assert_close(padded(x, key_mask=mask), halves, **TOLERANCE)


@pytest.mark.parametrize("name", ["mgk", "smgk"])
def test_code_lm_intended_soft_counts_hidden_pairs(name):
    layer = make(f"code_lm_intended_{name}_soft_e", max_positions=17).train()
    pi = torch.full((H, N), 0.5, dtype=torch.float64)
    for _ in range(2):
        x = 2 * torch.randn(B, N, C, dtype=torch.float64)
        q, (k1, k2) = heads(layer.query_proj, x), keys(layer, x)
        d1, d2 = (torch.exp(-c * squared(q, k) / E**0.5) for c, k in ((0.5, k1), (1.5, k2)))
        density = pi[:, None] * d1 + (1 - pi[:, None]) * d2
        gamma = pi[:, None] * d1 / (density + 1e-6)
        seen = density.tril()
        out = seen / (seen.sum(-1, keepdim=True) + 1e-6) @ heads(layer.value_proj, x)
        torch.testing.assert_close(layer(x, is_causal=True), finish(layer, out), **TOLERANCE)
        pi = gamma.sum((0, 2)).detach() / (N * B)
        torch.testing.assert_close(layer.core.prior.value[:, 0, :N], pi, **TOLERANCE)


def test_a_scale_of_the_second_component_needs_two_that_are_mixed_after():
    name = "code_lm_intended_mlk_scaled"
    for options in ({"num_components": 3}, {"mix": "before"}):
        with pytest.raises(ValueError, match="needs num_components=2 and mix=after, received"):
            make(name, **options)
    assert make(name, num_components=3, second_scale=1.0).num_components == 3


# ---- translation -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mgk", "smgk"])
def test_code_translation_decodes_as_it_trains(name):
    """Step by step from a cache: the causal pass; a memory: the pass across."""
    layer = make(f"translation_{name}").eval()
    x, memory = (torch.randn(B, n, C, dtype=torch.float64) for n in (N, 7))
    whole = layer(x, is_causal=True)
    cache = layer.new_cache(N)
    steps = [layer(x[:, i : i + 1], cache=cache, is_causal=True) for i in range(N)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-11, rtol=0)
    across = layer(x, memory=layer.remember(memory))
    torch.testing.assert_close(across, layer(x, memory), atol=1e-11, rtol=0)


class Adapter(torch.nn.Module):
    """A wrapper such as those of peft: the weights of the layer, and another output."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.weight, self.bias = base_layer.weight, base_layer.bias

    def forward(self, x):
        return self.base_layer(x)


def test_an_adapter_of_values_is_refused_where_their_bias_is_omitted():
    layer = make("translation_smgk", bias=True)
    x, memory = torch.randn(B, N, C).double(), torch.randn(B, 7, C).double()
    before = layer(x, memory)
    layer.value_proj = Adapter(layer.value_proj)
    torch.testing.assert_close(layer(x, memory), before)
    with pytest.raises(NotImplementedError, match="value_proj, which is a Adapter: leave"):
        layer(x)


def test_magnitudes_need_priors_that_are_learned():
    for options in ({"e_step": "hard"}, {"e_step": "soft"}, {"prior_param": "softmax"}):
        with pytest.raises(ValueError, match="magnitude_prior needs e_step=learned"):
            make("translation_mgk", **options)
    with pytest.raises(ValueError, match="value_bias"):
        make("translation_smgk", value_bias="never")


@pytest.mark.parametrize(
    "name",
    [
        *(name for name, path in FILES.items() if path.parent.name in ("lra", "lm")),
        *("translation_mgk", "translation_smgk"),
    ],
)
def test_released_starts(name):
    """Priors 1/2; shifts 0 for the first component and N(0, 1/4) for the second."""
    cls, arguments = load(name)
    layer = cls(C, head_dim=64, **arguments)
    if issubclass(cls, LinearAttention) and not issubclass(cls, MLKAttention):
        return
    if layer.core.prior is not None:
        assert (layer.core.prior.value == 0.5).all()
    if layer.shifted_keys:
        assert (layer.core.key_shift[:, 0] == 0).all()
        assert abs(layer.core.key_shift[:, 1].std().item() - 0.5) < 0.15


def test_row_epsilon_needs_the_reference():
    layer = make("code_lm_intended_mgk", max_positions=17, backend="sdpa")
    with pytest.raises(NotImplementedError, match=r"cannot add row_eps .* use one of: auto, ref"):
        layer(torch.randn(B, N, C, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:.* has no effect with ")
def test_code_parity_is_refused_where_the_code_has_no_such_mode():
    for options in ({"num_components": 3}, {"prior_share": "head"}, {"num_kv_heads": 1}):
        with pytest.raises(ValueError, match="em_code_parity needs num_components=2"):
            make("code_lra_mgk_soft_e", **options)


def test_code_parity_is_refused_if_a_step_has_several_calls():
    """The first call updates the priors that the others would use."""
    layer = make("code_lra_mgk_soft_e", max_positions=N)
    x = torch.randn(B, N, C, dtype=torch.float64, requires_grad=True)
    with pytest.raises(NotImplementedError, match="set activation_checkpointing=False"):
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    bounds = torch.tensor([0, 2, N, 2 * N])
    with pytest.raises(NotImplementedError, match="pad the documents"):
        layer(x, cu_seqlens=bounds)
    layer.eval()(x, cu_seqlens=bounds)


@pytest.mark.parametrize(
    "kind", [ReleasedOptions, partial(ReleasedArguments, embed_dim=8, num_heads=2)]
)
def test_options_of_the_released_code_are_checked_like_the_others(kind):
    with pytest.raises(ValueError, match="key_norm_weight must be in"):
        kind(key_norm_weight=2.0)
    with pytest.raises(ValueError, match=r"prior_floor=.* needs prior_param=clamp"):
        kind(prior_floor=0.1, prior_param="softmax")
    with pytest.raises(ValueError, match="em_code_parity must be one of none, lra, lm"):
        kind(em_code_parity="both")
