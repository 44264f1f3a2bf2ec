"""Functional forms: what the layers compute, and torch's attention where that is the same."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import lit_probattn
from lit_probattn import functional as LF
from lit_probattn.attention import (
    FiSHAttention,
    LinearAttention,
    LinearFiSHAttention,
    MGKAttention,
    MLKAttention,
    SoftmaxAttention,
)
from tests.functional.checks import E_V, KEY, B, C, E, H, N, check_form
from tests.support.helpers import double

G, K = 2, 3
CLOSE = {"rtol": 0.0, "atol": 1e-12}


def mgk(layer):
    core = layer.core
    given = {"hard": core.e_step == "hard", "score": core.score, "key_shift": core.shifts()}
    given["log_prior"] = None if core.prior is None else core.prior(N)[..., 0]
    given["include_log_det"] = core.include_log_det
    return given | {"variance": None if core.variance.is_equal else core.variance()}


def mixing(layer):
    core = layer.core
    weights, scale = list(core.mixing.weights), core.noise_scale
    return {
        "head_mix": weights if len(weights) > 1 else weights[0],
        "head_bias": list(core.mixing.biases) if len(weights) > 1 else None,
        "noise_scale": None if scale is None else scale(),
    }


def mlk(layer):
    return {"prior": layer.core.prior.probabilities(N)[..., 0], "key_shift": layer.core.key_shift}


def favor(layer):
    layer.core.redraws = False  # a form reads what it is given, in training too
    return {"projection": layer.core.projection}


def lfish(layer):
    norm = layer.core.normalizer(layer.core.mixing.weights[0])
    return {**mixing(layer), "last_bias": layer.core.mixing.last_bias, "norm_mix": norm}


def nothing(layer):
    return {}


SHIFT = {"shifted_keys": True, "num_components": K}
LEARN = {"num_components": K, "learn_variance": True, "variance": "paper_main"}
# name -> function, layer, its options, what the function is given of it, options of the function
FORMS = {
    "softmax": (LF.softmax_attention, SoftmaxAttention, {}, nothing, {}),
    "grouped": (LF.softmax_attention, SoftmaxAttention, {"num_kv_heads": 2}, nothing, {}),
    "gaussian": (
        *(LF.softmax_attention, SoftmaxAttention, {"score": "gaussian"}, nothing),
        {"score": "gaussian"},
    ),
    "mgk": (LF.mgk_attention, MGKAttention, {"num_components": K}, mgk, {}),
    "mgk learned": (LF.mgk_attention, MGKAttention, {**LEARN, "include_log_det": True}, mgk, {}),
    "mgk hard": (LF.mgk_attention, MGKAttention, {**LEARN, "e_step": "hard"}, mgk, {}),
    "mgk dot": (LF.mgk_attention, MGKAttention, {**LEARN, "score": "dot"}, mgk, {}),
    "mgk grouped": (LF.mgk_attention, MGKAttention, {**LEARN, "num_kv_heads": 2}, mgk, {}),
    "smgk": (LF.mgk_attention, MGKAttention, SHIFT, mgk, {}),
    "smgk grouped": (LF.mgk_attention, MGKAttention, {**SHIFT, "num_kv_heads": 3}, mgk, {}),
    "fish": (
        *(LF.fish_attention, FiSHAttention, {"num_global_heads": G, "noise_scale": 0.3}),
        *(mixing, {}),
    ),
    "fish local": (
        *(LF.fish_attention, FiSHAttention, {"num_global_heads": G, "noise": "local"}),
        *(mixing, {"noise": "local"}),
    ),
    "hard mish": (
        *(LF.fish_attention, FiSHAttention),
        *({"num_global_heads": G, "noise": "none", "mixer": "shared"}, mixing, {}),
    ),
    "gfish": (
        *(LF.fish_attention, FiSHAttention, {"num_global_heads": G, "mixer": "mlp"}),
        *(mixing, {}),
    ),
    "linear": (LF.linear_attention, LinearAttention, {}, nothing, {}),
    "dpfp": (
        *(LF.linear_attention, LinearAttention, {"feature_map": "dpfp", "dpfp_nu": 2}, nothing),
        {"feature_map": "dpfp", "dpfp_nu": 2},
    ),
    "favor": (
        *(LF.linear_attention, LinearAttention),
        *({"feature_map": "favor"}, favor, {"feature_map": "favor"}),
    ),
    "mlk": (LF.mlk_attention, MLKAttention, {"num_components": K}, mlk, {}),
    "smlk": (LF.mlk_attention, MLKAttention, SHIFT, mlk, {}),
    "lfish": (LF.linear_fish_attention, LinearFiSHAttention, {"num_global_heads": G}, lfish, {}),
    "glfish": (
        *(LF.linear_fish_attention, LinearFiSHAttention),
        *({"num_global_heads": G, "mixer": "mlp", "mixing_bias": True}, lfish, {}),
    ),
}


def test_every_name_is_tested():
    functions = {n for n in dir(LF) if n.endswith("_attention")}
    texts = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py")]
    assert [n for n in functions if not any(f"LF.{n}" in text for text in texts)] == []
    assert lit_probattn.functional is LF


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_what_the_layer_computes(name):
    check_form(*FORMS[name])


@pytest.mark.parametrize("queries", [N, 7, 13])
@pytest.mark.parametrize("mask", ["none", "pairs", "floats", "causal", "both"])
def test_softmax_is_torchs(queries, mask):
    query, key, value = double(B, H, queries, E), double(B, 2, N, E), double(B, 2, N, E_V)
    words = {"scale": 0.3, "enable_gqa": True}
    pairs = torch.rand(H, queries, N) < 0.7
    pairs[..., 0] = True
    if mask == "pairs":
        words["attn_mask"] = pairs
    elif mask == "floats":
        words["attn_mask"] = double(B, 1, queries, N).masked_fill(~pairs, -math.inf)
    elif mask == "causal":
        words["is_causal"] = True
    theirs = dict(words)
    if mask == "both":
        words |= {"attn_mask": pairs, "is_causal": True}
        theirs["attn_mask"] = pairs & torch.ones(queries, N, dtype=torch.bool).tril()
    found = LF.softmax_attention(query, key, value, **words)
    expected = F.scaled_dot_product_attention(query, key, value, **theirs)
    torch.testing.assert_close(found, expected, **CLOSE)


def test_what_must_collapse_to_torchs_attention():
    query, key, value = double(B, H, N, E), double(B, H, N, E), double(B, H, N, E_V)
    plain = F.scaled_dot_product_attention(query, key, value)
    one = LF.mgk_attention(query, [key], value, score="dot")
    torch.testing.assert_close(one, plain, **CLOSE)
    scaled = LF.mgk_attention(query, [key, key], value, score="dot", scale=0.2)
    expected = F.scaled_dot_product_attention(query, key, value, scale=0.2)
    torch.testing.assert_close(scaled, expected, **CLOSE)
    same = LF.fish_attention(query, key, value, torch.eye(H).double())
    torch.testing.assert_close(same, plain, **CLOSE)
    half = torch.tensor([[0.5, 0.5]]).double()
    twice = [torch.cat([t[:, :1], t[:, :1]], 1) for t in (query, key)]
    mixed = LF.fish_attention(*twice, value, half)
    expected = F.scaled_dot_product_attention(
        query[:, :1].expand(-1, H, -1, -1), key[:, :1].expand(-1, H, -1, -1), value
    )
    torch.testing.assert_close(mixed, expected, **CLOSE)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_a_negative_sum_divides_too(backend, is_causal):
    """Priors of layers are not negative, but those of a caller may be."""
    heads = (double(1, 1, 5, E), double(1, 1, 2, 5, E), double(1, 1, 5, E_V))
    leaves = [x.requires_grad_() for x in (*heads, torch.tensor([[-0.7, 0.2]]).double())]
    query, key, value, prior = leaves
    found = LF.mlk_attention(query, key, value, None, 0.0, is_causal, prior=prior, backend=backend)
    features = F.elu(query) + 1, F.elu(key) + 1
    kernel = torch.einsum("r,bhne,bhrle->bhnl", prior[0], *features)
    kernel = kernel.tril() if is_causal else kernel
    total = kernel.sum(-1, keepdim=True)
    assert total.max() < 0
    expected = kernel / total @ value
    torch.testing.assert_close(found, expected, **CLOSE)
    grads = (torch.autograd.grad(out.square().sum(), leaves) for out in (found, expected))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_a_fresh_draw_follows_torchs_generator():
    heads = [torch.randn(B, H, N, E) for _ in range(3)]

    def drawn(seed):
        torch.manual_seed(seed)
        return LF.softmax_attention(*heads, dropout_p=0.5)

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    assert LF.random_features(E).shape == (math.ceil(E * math.log(E)), E)


@pytest.mark.parametrize("name", ["softmax", "mgk", "smgk", "fish", "linear", "mlk", "lfish"])
@pytest.mark.parametrize("lower", [("value",), ("key",), ("query",), ("key", "value")], ids=str)
def test_autocast_takes_heads_of_several_dtypes(name, lower):
    """Keys rotated in single precision, for example, and values of a linear layer."""
    function, cls, options, given_of, own = FORMS[name]
    layer = cls(C, H, head_dim=E, value_head_dim=E_V, **options).eval()
    call = layer.call(torch.randn(B, N, C))
    heads = {n: getattr(call, n).detach() for n in ("query", "key", "value")}
    given = {k: v for k, v in given_of(layer).items() if v is not None} | {"rng": KEY, **own}
    expected = function(**heads, **given)
    mixed = {n: t.bfloat16() if n in lower else t for n, t in heads.items()}
    with torch.autocast("cpu", torch.bfloat16):
        found = function(**mixed, **given)
    torch.testing.assert_close(found.float(), expected, rtol=0.0, atol=0.01)


def heads_of(*counts, size=E):
    return [torch.zeros(B, count, N, size) for count in counts]


def whole(count):
    return [torch.ones(B, 6, N, E, dtype=torch.int64)] * count


P = torch.ones(H, G)
ROWS = torch.tensor([0, N, 2 * N])  # a document is a row


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LF.softmax_attention(*heads_of(6, 2, 2)), "enable_gqa=True"),
        (lambda: LF.softmax_attention(*heads_of(6, 4, 4), enable_gqa=True), "multiple of the key"),
        (lambda: LF.softmax_attention(*heads_of(6, 6, 2)), "key has 6 heads and value 2"),
        (lambda: LF.softmax_attention(*heads_of(6, 6, 6), dropout_p=1.0), r"\[0, 1\), received 1"),
        (lambda: LF.softmax_attention(torch.zeros(3, 4), *heads_of(6, 6)), "query has shape"),
        (lambda: LF.softmax_attention(*heads_of(0, 0, 0)), "at least one head and one feature"),
        (lambda: LF.linear_attention(*heads_of(6, 6, 6, size=0)), "at least one head and one"),
        (lambda: LF.mgk_attention(*heads_of(6, 6, 6)), "a sequence of keys, or key_shift"),
        (
            lambda: LF.mgk_attention(*heads_of(6, 6, 6), key_shift=torch.ones(2, E + 1)),
            r"key_shift has shape \(2, 6\), expected \(2, 5\) or \(6, 2, 5\)",
        ),
        (
            lambda: LF.mgk_attention(
                *heads_of(6, 6, 6), key_shift=torch.ones(2, E), scale=1.0, variance=torch.ones(2)
            ),
            "pass one of them",
        ),
        (lambda: LF.fish_attention(*heads_of(2, 2, 5), P), "2 global heads to 6, expected 5"),
        (lambda: LF.fish_attention(*heads_of(3, 3, 6), P), r"shape \(6, 2\), expected \(heads, 3"),
        (lambda: LF.linear_attention(*heads_of(6, 6, 6), feature_map="favor"), "random_features"),
        (
            lambda: LF.linear_attention(*heads_of(6, 6, 6), dpfp_nu=2),
            "dpfp_nu=2 is for feature_map",
        ),
        (lambda: LF.mlk_attention(*heads_of(6, 6, 6)), "expected .B, heads, components"),
        (lambda: LF.linear_fish_attention(*heads_of(6, 2, 6), P), "value has 6 heads, expected 2"),
        (
            lambda: LF.linear_attention(*heads_of(6, 6, 6), torch.zeros(N, N)),
            "no scores before a softmax to add a bias to",
        ),
        (
            lambda: LF.softmax_attention(
                *heads_of(6), torch.zeros(B, 6, N + 2, E), *heads_of(6), cu_seqlens=ROWS
            ),
            "key has 13 positions and value 11",
        ),
        (
            lambda: LF.softmax_attention(
                *heads_of(6), torch.zeros(B + 1, 6, N, E), *heads_of(6), cu_seqlens=ROWS
            ),
            "batch sizes 2, 3 and 2",
        ),
        (lambda: LF.softmax_attention(*whole(3)), "query has dtype torch.int64"),
        (lambda: LF.linear_attention(*heads_of(6, 6), *whole(1)), "value has dtype torch.int64"),
        (
            lambda: LF.fish_attention(*heads_of(2, 2), torch.zeros(B, 6, N, E).half(), P),
            "value has dtype torch.float16 and query torch.float32",
        ),
        (
            lambda: LF.softmax_attention(*heads_of(6, 6, 6), torch.ones(N, N).long()),
            "attn_mask has dtype torch.int64",
        ),
        *(
            (
                lambda mask=mask: LF.softmax_attention(*heads_of(6, 6, 6), mask),
                rf"attn_mask has shape \({B + 1}, 1, 1, {N}\), expected",
            )
            for mask in (torch.zeros(B + 1, 1, 1, N), torch.ones(B + 1, 1, 1, N).bool())
        ),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("scale", [-0.3, 0.0, math.inf, math.nan])
def test_a_scale_that_no_softmax_has_is_refused(scale):
    """Fused kernels, PyTorch's too, return NaN where it is negative."""
    for attend in (
        lambda *heads: LF.softmax_attention(*heads, scale=scale),
        lambda query, key, value: LF.mgk_attention(query, [key, key], value, scale=scale),
        lambda *heads: LF.fish_attention(*heads, torch.ones(6, 6), scale=scale, noise="none"),
        lambda *heads: LF.ast_attention(*heads, scale=scale),
    ):
        with pytest.raises(ValueError, match="scale must be positive"):
            attend(*heads_of(6, 6, 6))


@pytest.mark.parametrize("hidden", [-math.inf, torch.finfo(torch.float64).min])
@pytest.mark.parametrize("name", ["softmax", "mgk", "fish"])
def test_infinite_and_least_floats_of_a_mask_hide_pairs(name, hidden):
    """As the boolean mask of the same pairs; rows without a visible key are zeros."""
    query, key, value = double(B, H, N, E), double(B, H, N, E), double(B, H, N, E_V)
    attend = {
        "softmax": LF.softmax_attention,
        "mgk": lambda q, k, v, **mask: LF.mgk_attention(q, torch.stack([k, -k], 2), v, **mask),
        "fish": lambda q, k, v, **mask: LF.fish_attention(q, k, v, torch.eye(H).double(), **mask),
    }[name]
    seen = torch.rand(N, N) < 0.6
    seen[2] = False
    floats = double(N, N).masked_fill(~seen, hidden)
    found = attend(query, key, value, attn_mask=floats)
    visible = attend(query, key, value, attn_mask=floats.masked_fill(~seen, -1e6))
    assert (found[..., 2, :] == 0).all()
    others = [i for i in range(N) if i != 2]
    torch.testing.assert_close(found[..., others, :], visible[..., others, :], **CLOSE)
