"""Configs of the released behaviours, each against its formula written out in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn.functional import elu

from lit_probattn.attention import (
    LinearAttention,
    MGKAttention,
    MLKAttention,
    ReleasedLinearAttention,
    ReleasedMGKAttention,
    ReleasedMLKAttention,
)
from lit_probattn.attention.released.mgk import ReleasedArguments, ReleasedOptions
from lit_probattn.base.config_files import run_stem
from lit_probattn.configs import read_yaml
from tests.support.paths import shipped

FILES = {run_stem(path): path for path in shipped("attention") if "as_released" in path.parts}
CLASSES = {
    cls.__name__: cls
    for cls in (
        *(LinearAttention, MGKAttention, MLKAttention),
        *(ReleasedLinearAttention, ReleasedMGKAttention, ReleasedMLKAttention),
    )
}
B, N, C, E, H = 2, 13, 11, 5, 3
RAW = [0.4, 1.3]  # 1.3 counts as 1
TOLERANCE = {"atol": 1e-12, "rtol": 0}


def load(name):
    config = read_yaml(FILES[name])
    assert list(config) == ["model"]
    assert list(config["model"]["init_args"]) == ["attention"]  # sets the variant, nothing else
    attention = config["model"]["init_args"]["attention"]
    cls = CLASSES[attention["class_path"].removeprefix("lit_probattn.attention.")]
    return cls, {**attention["init_args"], "num_heads": H, "dropout": 0.0}


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


def visible(is_causal, key_mask):
    allowed = key_mask[:, None, None, :].double().expand(B, 1, N, N)
    return allowed.tril() if is_causal else allowed


def draw():
    x = torch.randn(B, N, C, dtype=torch.float64)
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[1, 9:] = False  # padding at the end, as in Long Range Arena
    return x, mask


def finish(layer, out):
    return layer.out_proj(out.transpose(1, 2).flatten(2))


def test_every_file_is_tested():
    tested = {f"code_lra_{n}{s}" for n in ("mgk", "smgk") for s in ("", "_soft_e", "_hard_e")}
    tested |= {f"code_lm_intended_{n}{s}" for n in ("mgk", "smgk") for s in ("", "_soft_e")}
    tested |= {f"code_lra_{n}" for n in ("linear", "mlk", "smlk")}
    tested |= {f"code_lm_intended_{n}" for n in ("mlk", "smlk")}
    tested |= {"code_lm_linear", "code_lm_as_released_mgk", "code_lm_as_released_mlk"}
    tested |= {"code_lm_intended_mgk_hard_e", "code_lm_intended_mlk_scaled"}
    assert {name for name, path in FILES.items() if path.parent.name in ("lra", "lm")} == tested
    others = {"gfish", "hard_gfish", "gfish_query", "gfish_key"}  # tests/attention/fish
    assert {p.stem for p in FILES.values() if p.parent.name == "translation"} == {
        "mgk",
        "smgk",
    } | others


@pytest.mark.parametrize("name", ["mgk", "smgk"])
@pytest.mark.parametrize("backend", ["reference", "sdpa", "blockwise"])
def test_code_lra_learned_priors(name, backend):
    """A = Σ_r clamp(p_r) e^{−‖q − k_r‖² / 2√E} / (bare row sum), one pair p per layer."""
    layer, (x, mask) = make(f"code_lra_{name}", backend=backend), draw()
    assert layer.core.prior.value.shape == (2,)
    with torch.no_grad():
        layer.core.prior.value.copy_(torch.tensor(RAW, dtype=torch.float64))
    q = heads(layer.query_proj, x)
    density = sum(
        p * torch.exp(-squared(q, k) / (2 * E**0.5))
        for p, k in zip((0.4, 1.0), keys(layer, x), strict=True)
    ) * visible(False, mask)
    out = density / density.sum(-1, keepdim=True) @ heads(layer.value_proj, x)
    torch.testing.assert_close(layer(x, key_mask=mask), finish(layer, out), **TOLERANCE)


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
@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_code_lra_hard(name, backend):
    """A = softmax(−min_r ‖q − k_r‖² / 2√E), no prior."""
    layer, (x, mask) = make(f"code_lra_{name}_hard_e", backend=backend), draw()
    assert layer.core.prior is None
    q, (k1, k2) = heads(layer.query_proj, x), keys(layer, x)
    smallest = torch.minimum(squared(q, k1), squared(q, k2))
    density = torch.exp(-smallest / (2 * E**0.5)) * visible(False, mask)
    out = density / density.sum(-1, keepdim=True) @ heads(layer.value_proj, x)
    torch.testing.assert_close(layer(x, key_mask=mask), finish(layer, out), **TOLERANCE)


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
@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_code_lra_linear_family(name, backend):
    """φ(q) φ(Σ_r clamp(p_r) k_r)ᵀ V, both features divided by N_pad^¼, no denominator."""
    layer, (x, mask) = make(f"code_lra_{name}", backend=backend), draw()
    if name == "linear":
        mixed = heads(layer.key_proj, x)
    else:
        with torch.no_grad():
            layer.core.prior.value.copy_(torch.tensor(RAW, dtype=torch.float64))
        k1, k2 = keys(layer, x)
        mixed = 0.4 * k1 + 1.0 * k2
    q = (elu(heads(layer.query_proj, x)) + 1) / N**0.25
    k = (elu(mixed) + 1) / N**0.25 * mask[:, None, :, None]
    out = q @ (k.mT @ heads(layer.value_proj, x))
    torch.testing.assert_close(layer(x, key_mask=mask), finish(layer, out), **TOLERANCE)
    padded = make(f"code_lra_{name}", backend=backend, padded_len=4 * N)
    padded.load_state_dict(layer.state_dict())
    half = finish(layer, out / 2)
    torch.testing.assert_close(padded(x, key_mask=mask), half, **TOLERANCE)


@pytest.mark.parametrize("name", ["mgk", "smgk"])
def test_code_lm_intended_learned_priors(name):
    """A = Σ_r clamp(p_jr) e^{−c_r ‖q − k_r‖² / √E} / (row sum + 1e-6), c = 1/2 and 3/2."""
    layer, (x, mask) = make(f"code_lm_intended_{name}", max_positions=17), draw()
    assert layer.query_proj.bias is None
    assert layer.core.prior.value.shape == (H, 2, 17)
    x = 3 * x
    q, prior = heads(layer.query_proj, x), layer.core.prior.value[..., :N].clamp(0, 1)
    density = sum(
        prior[:, r, None] * torch.exp(-c * squared(q, k) / E**0.5)
        for r, (c, k) in enumerate(zip((0.5, 1.5), keys(layer, x), strict=True))
    ) * visible(True, mask)
    out = density / (density.sum(-1, keepdim=True) + 1e-6) @ heads(layer.value_proj, x)
    found = layer(x, is_causal=True, key_mask=mask)
    torch.testing.assert_close(found, finish(layer, out), **TOLERANCE)
    bare = density / density.sum(-1, keepdim=True) @ heads(layer.value_proj, x)
    assert (found - finish(layer, bare)).abs().max() > 1e-6  # the 1e-6 is felt


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


def all_gradients(layer, given, *outs):
    """Assert that outputs are equal, and every gradient of a weighted sum of theirs; return those.

    Args:
        given: inputs by name.
    """
    found, expected = outs
    torch.testing.assert_close(found, expected, **TOLERANCE)
    weight, wanted = torch.randn_like(found), {**given, **dict(layer.named_parameters())}
    ours, theirs = (
        torch.autograd.grad((out * weight).sum(), list(wanted.values()), materialize_grads=True)
        for out in outs
    )
    for one, a, b in zip(wanted, ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11, msg=lambda m, n=one: f"{n}: {m}")
    return dict(zip(wanted, ours, strict=True))


@pytest.mark.parametrize("name", ["as_released_mgk", "intended_mgk_hard_e"])
@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_code_lm_as_released_mgk_is_hard_and_shifted(name, backend):
    """h-16: softmax over max_r(−c_r ‖q − k_r‖² / √E), no prior, no epsilon."""
    layer, (x, mask) = make(f"code_lm_{name}", backend=backend), draw()
    x.requires_grad_()
    assert layer.shifted_keys == (name == "as_released_mgk")
    assert layer.core.prior is None
    q, (k1, k2) = heads(layer.query_proj, x), keys(layer, x)
    score = torch.maximum(-0.5 * squared(q, k1) / E**0.5, -1.5 * squared(q, k2) / E**0.5)
    density = score.exp() * visible(True, mask)
    out = density / density.sum(-1, keepdim=True) @ heads(layer.value_proj, x)
    all_gradients(layer, {"x": x}, layer(x, is_causal=True, key_mask=mask), finish(layer, out))


@pytest.mark.parametrize(
    "name",
    ["intended_mlk", "intended_mlk_scaled", "intended_smlk", "as_released_mlk", "linear"],
)
@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_code_lm_linear_family(name, backend):
    """Features over their sums, mixed after φ, denominator + 1e-5, output / √E."""
    cls, _ = load(f"code_lm_{name}")
    options = {"max_positions": 17} if issubclass(cls, MLKAttention) else {}
    layer, (x, mask) = make(f"code_lm_{name}", backend=backend, **options), draw()
    x.requires_grad_()
    assert layer.query_proj.bias is None
    scales = (1.0, 2.0 if name == "intended_mlk_scaled" else 1.0)  # scale_w

    def phi(vectors):
        features = elu(vectors) + 1
        return features / features.sum(-1, keepdim=True)

    if issubclass(cls, MLKAttention):
        assert layer.shifted_keys == (name == "intended_smlk")
        prior = layer.core.prior.value[..., :N].clamp(0, 1)
        both = zip(scales, keys(layer, x), strict=True)
        f = sum(s * prior[:, r, :, None] * phi(k) for r, (s, k) in enumerate(both))
    else:
        f = phi(heads(layer.key_proj, x))
    kernel = phi(heads(layer.query_proj, x)) @ f.mT * visible(True, mask)
    out = kernel / (kernel.sum(-1, keepdim=True) + 1e-5) @ heads(layer.value_proj, x) / E**0.5
    all_gradients(layer, {"x": x}, layer(x, is_causal=True, key_mask=mask), finish(layer, out))
    maps = kernel / kernel.sum(-1, keepdim=True)  # for analysis, whatever the denominator
    found = layer.weights(x, is_causal=True, key_mask=mask)
    torch.testing.assert_close(found, maps, **TOLERANCE)


def test_a_scale_of_the_second_component_needs_two_that_are_mixed_after():
    name = "code_lm_intended_mlk_scaled"
    for options in ({"num_components": 3}, {"mix": "before"}):
        with pytest.raises(ValueError, match="needs num_components=2 and mix=after, received"):
            make(name, **options)
    assert make(name, num_components=3, second_scale=1.0).num_components == 3


# ---- translation -------------------------------------------------------------------------------


# Of two components for three heads: inside, negative, above 2, at 0, below the floor, above 1.
MAGNITUDES = [[0.4, -1.3], [2.7, 0.0], [3e-7, -1.9]]


def translation_layer(name):
    layer = make(f"translation_{name}")
    with torch.no_grad():
        layer.core.prior.value.copy_(torch.tensor(MAGNITUDES, dtype=torch.float64))
    return layer


def translated(layer, x, memory, allowed, with_value_bias):
    """A = Σ_r min(max(|p_r|, 1e-6), 2) e^{−c_r ‖q − k_r‖² / √E} / (row sum + 1e-6), c 1/2, 3/2."""
    q, tokens = heads(layer.query_proj, x), x if memory is None else memory
    bias = layer.value_proj.bias if with_value_bias else None
    v = torch.nn.functional.linear(tokens, layer.value_proj.weight, bias)
    p = layer.core.prior.value.abs().clamp(1e-6, 2.0)
    density = (
        sum(
            p[:, r, None, None] * torch.exp(-c * squared(q, k) / E**0.5)
            for r, (c, k) in enumerate(zip((0.5, 1.5), keys(layer, tokens), strict=True))
        )
        * allowed
    )
    maps = density / (density.sum(-1, keepdim=True) + 1e-6)
    return finish(layer, maps @ v.unflatten(-1, (H, E)).transpose(1, 2))


@pytest.mark.parametrize("name", ["mgk", "smgk"])
@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
def test_code_translation(name, kind):
    """Outputs and every gradient, of self-attention, of causal self-attention, across."""
    layer = translation_layer(name)
    x = (2 * torch.randn(B, N, C, dtype=torch.float64)).requires_grad_()
    memory = torch.randn(B, 7, C, dtype=torch.float64).requires_grad_() if kind == "cross" else None
    length = 7 if kind == "cross" else N
    mask = torch.ones(B, length, dtype=torch.bool)
    mask[1, 4:] = False
    allowed = mask[:, None, None, :].double().expand(B, 1, N, length)
    allowed = allowed.tril() if kind == "decoder" else allowed
    found = layer(x, memory, key_mask=mask, is_causal=kind == "decoder")
    expected = translated(layer, x, memory, allowed, name == "mgk" or kind == "cross")
    given = {"x": x} if memory is None else {"x": x, "memory": memory}
    prior = all_gradients(layer, given, found, expected)["core.prior.value"]
    beyond = torch.tensor([[False, False], [True, True], [True, False]])
    assert ((prior == 0) == beyond).all()


@pytest.mark.parametrize("name", ["mgk", "smgk"])
def test_code_translation_decodes_as_it_trains(name):
    """Step by step from a cache: the causal pass; a memory: the pass across."""
    layer = translation_layer(name).eval()
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
