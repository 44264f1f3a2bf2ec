"""FiSH as its authors' code runs it: the released settings against the order of the code.

Outputs, and the gradients of every input and parameter, in float64.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from lit_probattn.attention import FiSHAttention, HeadCall, SoftmaxAttention
from lit_probattn.attention.masks import Masks
from lit_probattn.base.config_files import run_stem
from lit_probattn.configs import attention_entry
from lit_probattn.randomness import RandomKey, normal_noise
from tests.attention.fish.oracle import fish_oracle
from tests.support.helpers import (
    largest_difference,
    run_with_gradients,
    use_backend,
    use_oracle,
)
from tests.support.paths import shipped

FILES = {run_stem(path): path for path in shipped("attention") if "as_released" in path.parts}
BATCH, LENGTH, EMBED, HEAD = 2, 13, 11, 5


def make(name, **extra):
    spec = attention_entry(FILES[name])
    assert spec["class_path"] == "lit_probattn.attention.FiSHAttention"
    sizes = {"embed_dim": EMBED, "head_dim": HEAD}
    return FiSHAttention(**{**sizes, **spec["init_args"], **extra})


def split(projected, heads):
    return projected.unflatten(-1, (heads, -1)).transpose(1, 2)


def two_layers(layer, scores):
    """Linear, ReLU, Linear over the heads, heads last, with both biases."""
    mixing = layer.core.mixing
    hidden = F.linear(scores.movedim(1, -1), mixing.weights[0], mixing.biases[0])
    return F.linear(F.relu(hidden), mixing.weights[1], mixing.last_bias).movedim(-1, 1)


# Constant over the keys of a row, or no part of the scores at all: softmax does not see it.
LAST_BIAS = "core.mixing.last_bias"


def causal(layer, leaves):
    return layer(leaves[0], is_causal=True, rng=RandomKey(5, step=3))


def global_noise(layer):
    """What the draw of `causal` adds to the scores of every global head."""
    theta = layer.core.noise_scale.theta
    draw = (BATCH, layer.num_global_heads, range(LENGTH), range(LENGTH), torch.device("cpu"))
    return theta[:, None, None] ** 2 * normal_noise(RandomKey(5), *draw, torch.float64)


def finish(layer, scores, value):
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return layer.out_proj((weights @ value).transpose(1, 2).flatten(2))


def assert_same(layer, inputs, ours, written, without_gradient=()):
    """Compare outputs, and the gradients of every input and parameter.

    Args:
        layer: owns the parameters that both use.
        inputs: float64 tensors.
        ours: a function of the inputs.
        written: the same by the order of the code.
        without_gradient: parameters whose gradient is zero, up to rounding.
    """
    found, expected = (run_with_gradients(layer, inputs, call) for call in (ours, written))
    wanted = {n for n, _ in layer.named_parameters()} | {f"input{i}" for i in range(len(inputs))}
    assert set(found[1]) == set(expected[1]) == wanted
    still = {name for name, grad in expected[1].items() if grad.abs().max() < 1e-9}
    assert still == set(without_gradient), "zeros compare with nothing"
    out, grad = largest_difference(found, expected)
    assert out < 1e-12
    assert grad < 1e-11


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
@pytest.mark.parametrize(
    "name", ["lm_gfish", "lm_hard_gfish", "translation_gfish", "translation_hard_gfish"]
)
def test_generalized_mixing_follows_the_code(name, backend):
    layer = make(name, backend=backend).double().eval()  # the code draws noise in evaluation too
    with torch.no_grad():
        for parameter in layer.core.mixing.parameters():
            parameter.normal_()
        if layer.core.noise_scale is not None:
            layer.core.noise_scale.theta.fill_(0.7)
    heads, num_global = layer.num_heads, layer.num_global_heads

    def written(leaves):
        (x,) = leaves
        q = split(layer.query_proj(x), num_global)
        k, v = split(layer.key_proj(x), num_global), split(layer.value_proj(x), heads)
        if name.startswith("translation"):
            q = q / HEAD**0.5
        scores = q @ k.mT
        if layer.core.noise_scale is not None:
            scores = scores + global_noise(layer)
        scores = two_layers(layer, scores)
        return finish(layer, scores / HEAD**0.5 if name.startswith("lm") else scores, v)

    x = torch.randn(BATCH, LENGTH, EMBED, dtype=torch.float64)
    assert_same(layer, [x], lambda leaves: causal(layer, leaves), written, [LAST_BIAS])


@pytest.mark.parametrize("name", ["lm_fish", "lm_hard_fish"])
def test_linear_mixing_of_the_language_model(name):
    layer = make(name).double().eval()
    with torch.no_grad():
        layer.core.mixing.weights[0].normal_()
    assert (layer.core.noise_scale is None) == (name == "lm_hard_fish")

    def written(leaves):
        (x,) = leaves
        q, k = split(layer.query_proj(x), 2), split(layer.key_proj(x), 2)
        scores = q @ k.mT
        if name == "lm_fish":
            scores = scores + global_noise(layer)
        scores = torch.einsum("jk,bkil->bjil", layer.core.mixing.weights[0], scores) / HEAD**0.5
        return finish(layer, scores, split(layer.value_proj(x), 8))

    x = torch.randn(BATCH, LENGTH, EMBED, dtype=torch.float64)
    assert_same(layer, [x], lambda leaves: causal(layer, leaves), written)


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_mixture_follows_the_sums(backend):
    """One local map per head and its own draw; the sums are written out map by map."""
    layer = make("lm_mish").double().eval()
    with torch.no_grad():
        layer.core.mixing.weights[0].normal_()
        layer.core.noise_scale.theta.fill_(0.7)
    x = torch.randn(BATCH, LENGTH, EMBED, dtype=torch.float64)

    def written(leaves):
        use_oracle(layer, fish_oracle)
        return causal(layer, leaves)

    def ours(leaves):
        use_backend(layer, backend)
        return causal(layer, leaves)

    assert_same(layer, [x], ours, written)


def test_mixture_draws_for_every_local_and_global_head():
    """The code sums p_k (G_k + s ε_jk) over k; ours draws that sum's normal directly."""
    layer = make("lm_mish").double()
    assert layer.core.noise_kind == "local_global"
    with torch.no_grad():
        layer.core.mixing.weights[0].normal_()
        layer.core.noise_scale.theta.fill_(0.7)
    zeros = torch.zeros(1, 2, 256, HEAD, dtype=torch.float64)
    call = HeadCall(zeros, zeros, zeros, Masks(256, 256), rng=RandomKey(1))
    drawn = layer.core.variant(call).scores(call)[0]
    drawn = drawn.detach().flatten(1) * HEAD**0.5
    s = 0.7**2
    generator = torch.Generator().manual_seed(1)
    literal = torch.randn(8, 2, 256 * 256, generator=generator, dtype=torch.float64)
    literal = (layer.core.mixing.weights[0].detach()[0][:, None] * s * literal).sum(1)
    assert (drawn.std(1) / literal.std(1) - 1).abs().max() < 0.02
    assert torch.corrcoef(drawn).fill_diagonal_(0).abs().max() < 0.02


def test_released_starts():
    for name in ("lm_gfish", "lm_mish", "translation_gfish"):
        theta = make(name).core.noise_scale.theta
        torch.testing.assert_close(theta, torch.full_like(theta, 0.1))
    assert make("lm_gfish").core.noise_scale.theta.shape == (2,)
    assert make("translation_gfish").core.noise_scale.theta.shape == (1,)
    assert make("lm_gfish").core.mixing.weights[1].abs().max() < 0.12


def test_swin_follows_the_code_and_its_parameter_count():
    layer = make("swin_hard_gfish").double()
    x = torch.randn(BATCH, LENGTH, EMBED, dtype=torch.float64)
    bias = torch.randn(1, 12, LENGTH, LENGTH, dtype=torch.float64)

    def written(leaves):
        x, bias = leaves
        q = split(layer.query_proj(x), 6) * HEAD**-0.5
        k, v = split(layer.key_proj(x), 6), split(layer.value_proj(x), 12)
        return finish(layer, two_layers(layer, q @ k.mT) + bias, v)

    def ours(leaves):
        return layer(leaves[0], is_causal=True, bias=leaves[1])

    assert_same(layer, [x, bias], ours, written, [LAST_BIAS])
    saved = 0
    for embed_dim, heads, blocks in ((384, 12, 6), (768, 24, 2)):
        plain = SoftmaxAttention(embed_dim, head_dim=32, num_heads=heads)
        fish = make("swin_hard_gfish", embed_dim=embed_dim, head_dim=32, num_heads=heads)
        assert fish.num_global_heads == heads // 2
        saved += blocks * (plain.cost(1).num_parameters - fish.cost(1).num_parameters)
    assert saved == 28_288_354 - 26_223_394


@pytest.mark.parametrize("name", ["swin_affine", "swin_hard_fish"])
def test_swin_with_one_linear_mixing(name):
    layer = make(name).double()
    mixing = layer.core.mixing
    assert (mixing.last_bias is None) == (name == "swin_hard_fish")

    def written(leaves):
        (x,) = leaves
        q = split(layer.query_proj(x), 6) * HEAD**-0.5
        k, v = split(layer.key_proj(x), 6), split(layer.value_proj(x), 12)
        mixed = F.linear((q @ k.mT).movedim(1, -1), mixing.weights[0], mixing.last_bias)
        return finish(layer, mixed.movedim(-1, 1), v)

    x = torch.randn(BATCH, LENGTH, EMBED, dtype=torch.float64)
    constant = ["key_proj.bias"] + ([LAST_BIAS] if name == "swin_affine" else [])
    assert_same(layer, [x], lambda leaves: causal(layer, leaves), written, constant)


MIXED_HEADS = [f"{code}_{on}" for code in ("swin", "translation_gfish") for on in ("query", "key")]


@pytest.mark.parametrize("name", MIXED_HEADS)
def test_mixed_queries_and_keys_follow_the_code(name):
    """Mixed before the products and 1/√E; biases of the code's starts stay as they are."""
    layer = make(name).double()
    on, mixing = layer.mix_on, layer.core.mixing
    assert name.endswith(on)
    with torch.no_grad():
        for parameter in mixing.parameters():
            parameter.normal_()

    def written(leaves):
        (x,) = leaves
        projections = {"query": layer.query_proj, "key": layer.key_proj, "value": layer.value_proj}
        heads = {part: proj(x) for part, proj in projections.items()}
        heads = {part: split(h, h.shape[-1] // HEAD) for part, h in heads.items()}
        assert heads[on].shape[1] == layer.num_heads // 2
        heads[on] = two_layers(layer, heads[on])
        scores = (heads["query"] * HEAD**-0.5) @ heads["key"].mT
        return finish(layer, scores, heads["value"])

    x = torch.randn(BATCH, LENGTH, EMBED, dtype=torch.float64)
    constant = [] if layer.key_proj.bias is None or on == "key" else ["key_proj.bias"]
    constant += [LAST_BIAS] if on == "key" else []
    assert_same(layer, [x], lambda leaves: causal(layer, leaves), written, constant)


def test_every_file_is_tested():
    names = {"lm_gfish", "lm_mish", "translation_gfish", "translation_hard_gfish"}
    names |= {"lm_fish", "lm_hard_fish", "lm_hard_gfish"}
    names |= {"swin_hard_gfish", "swin_affine", "swin_hard_fish", *MIXED_HEADS}
    folders = {name: path.parent.name for name, path in FILES.items()}
    files = {name for name, folder in folders.items() if folder == "fish"}
    files |= {
        name for name, folder in folders.items() if folder == "translation" and "gfish" in name
    }
    assert files == names
