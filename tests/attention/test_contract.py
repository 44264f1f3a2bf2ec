"""What every layer promises: shapes, masks, causality, padding, decoding, copies, refusals.

The layers are those of `variants.py`: a new variant is held to this without a line here. What a
variant of one's own promises too is checked by `lit_probattn.attention.own.contract`.
"""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch

from lit_probattn.attention import (
    KVCache,
    LinearFiSHAttention,
    SoftmaxAttention,
    variants,
)
from lit_probattn.attention.backends import STORE_UP_TO
from lit_probattn.attention.call import outline
from lit_probattn.attention.engines.native import native_refusal
from lit_probattn.attention.numerics import repeat_heads
from lit_probattn.attention.own.contract import CHECKS
from lit_probattn.randomness import RandomKey
from tests.attention.own.test_related import CLASSES as RELATED
from tests.attention.own.test_related import OF_VALUES
from tests.attention.variants import (
    EMBED,
    HEAD,
    backends_for,
    examples,
    in_turn,
    layers,
    shipped_variants,
)
from tests.support.helpers import double, refuses_other_values, types_of
from tests.support.slow import mostly_slow

B, N, C, E, H = 2, 13, EMBED, HEAD, 3
LAYERS = layers()
EXAMPLES = {**LAYERS, **examples()}
EVERY = pytest.mark.parametrize("name", LAYERS)
KEY = RandomKey(5, step=3, sample_ids=torch.tensor([19, 4]))
CLOSE = {"rtol": 0.0, "atol": 1e-11}
# Layers whose rows of weights do not sum to 1: DCMHA mixes them by numbers of any sign.
SIGNED = {"DCMHAttention", "dcmha"}


def made_by(name):
    return LAYERS[name].func


def test_every_public_variant_has_a_shipped_file_or_is_a_released_one():
    shipped = {cls.__name__ for cls, _ in shipped_variants().values()}
    without = {name for name in variants() if name not in shipped}
    assert without == {name for name in variants() if name.startswith("Released")}


# `own/test_related.py` has these, away from where their parameters start. Bisections of α-entmax
# take seconds for long sequences; its own tests compare shorter ones with loops over keys.
ELSEWHERE = {(name, check) for name in LAYERS for check in OF_VALUES if made_by(name) in RELATED}
ELSEWHERE |= {("ast", "causality"), ("ast", "padding")}
FAST = [case for case in in_turn(LAYERS, list(CHECKS), nth=6) if case not in ELSEWHERE]


@pytest.mark.parametrize(("name", "check"), mostly_slow(itertools.product(LAYERS, CHECKS), FAST))
def test_every_layer_keeps_its_promises(name, check):
    CHECKS[check].run(LAYERS[name])


@EVERY
def test_cost_counts_keys_and_values_of_another_width(name):
    """Per entry of the width: a multiply-add, and by the papers' rule a product and an addition."""
    make, less = LAYERS[name], 5
    wide, narrow = (make(key_embed_dim=width).cost(N) for width in (C, C - less))
    saved = N * less * (make().key_proj.out_features + make().value_proj.out_features)
    assert wide.macs - narrow.macs == saved
    assert wide.paper_flops - narrow.paper_flops == 2 * saved
    totals = [term.operations for term in narrow.terms if term.is_total]
    assert totals[:2] in ([], [2 * narrow.macs, narrow.paper_flops])


@pytest.mark.parametrize("is_causal", [False, True])
@EVERY
def test_sequences_without_tokens_have_no_rows(name, is_causal):
    layer = LAYERS[name]()
    x = torch.empty(B, 0, C, requires_grad=True)
    out = layer(x, is_causal=is_causal)
    out.sum().backward()
    assert out.shape == x.grad.shape == x.shape


@pytest.mark.parametrize("shape", [(N, 1), (1, N), (B, 1, 1, 1)])
@EVERY
def test_masks_that_are_broadcast_equal_whole_ones(name, shape):
    layer, x = LAYERS[name]().double().eval(), double(B, N, C)
    pairs = torch.rand(shape) < 0.5
    whole = pairs.expand(*(() if pairs.dim() == 2 else (B, 1)), N, N)
    for backend in backends_for(layer, x, attn_mask=pairs):
        layer.backend = backend
        found, expected = (layer(x, attn_mask=mask) for mask in (pairs, whole))
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("given", ["key_mask", "attn_mask", "bias"])
@EVERY
def test_masks_that_change_before_backward_are_an_error_or_no_matter(name, given):
    layer, x = LAYERS[name]().double().eval(), double(B, N, C).requires_grad_()
    shape = (B, N) if given == "key_mask" else (N, N)
    if given == "bias" and not layer.core.makes.has_scores:
        return
    first = torch.zeros(shape) if given == "bias" else torch.arange(shape[1]).expand(shape) < 9
    other = torch.randn(shape) if given == "bias" else first.flip(1)
    for backend in backends_for(layer, x, **{given: first}):
        layer.backend, found = backend, []
        for changes in (False, True):
            mask = first.clone()
            loss = layer(x, **{given: mask}).square().sum()
            if changes:
                mask.copy_(other)
            try:
                found += torch.autograd.grad(loss, x)
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)  # noqa: PT017
                break
        else:
            torch.testing.assert_close(*found, **CLOSE)


@EVERY
def test_a_bias_of_another_precision_is_converted(name):
    layer, x = LAYERS[name]().eval(), torch.randn(B, N, C)
    if not layer.core.makes.has_scores:
        return
    bias = double(N, N)
    for backend in backends_for(layer, x, bias=bias):
        layer.backend = backend
        found, expected = (layer(x, bias=given) for given in (bias, bias.float()))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name", mostly_slow(EXAMPLES, [*LAYERS, *list(EXAMPLES)[len(LAYERS) :: 3]])
)
def test_weights_are_the_maps_of_the_forward_pass(name):
    """In training, and at evaluation with the noise that is asked for; in both precisions."""
    layer, masks = EXAMPLES[name](), {}
    core = layer.core
    assert layer.dropout == 0
    if getattr(core, "noise_scale", None) is not None:
        core.noise_at_eval = True
        torch.nn.init.constant_(core.noise_scale.theta, 0.7)
    x, memory = torch.randn(B, N, C), torch.randn(B, 19, C)
    if isinstance(layer, LinearFiSHAttention):
        with pytest.raises(NotImplementedError, match="no attention maps"):
            layer.weights(x)
        return
    masks["key_mask"] = torch.rand(B, 19) < 0.8
    if core.makes.has_scores:
        masks["bias"] = torch.randn(layer.layout.out, N, 19)
    for training, dtype in itertools.product((True, False), (torch.float32, torch.float64)):
        layer.train(training).to(dtype)
        query, key = x.to(dtype), memory.to(dtype)
        for inputs in ({"query": query, "is_causal": True}, {"query": query, "key": key, **masks}):
            call = layer.call(**inputs, rng=KEY)
            maps = layer.weights(**inputs, rng=KEY)
            if name not in SIGNED:
                sums = maps.sum(-1)  # 0 where features without a sign leave nothing
                torch.testing.assert_close(sums, (sums > 0.5).to(sums))
                assert sums.mean() > 0.7
            found = maps @ repeat_heads(call.value, maps.shape[1])
            bound = 1e-10 if dtype == torch.float64 else 2e-6
            torch.testing.assert_close(found, core(call).to(dtype), rtol=0, atol=bound)
    low = layer.bfloat16().weights(x.bfloat16(), rng=KEY)
    assert low.dtype == torch.float32


@EVERY
def test_an_outline_has_the_sizes_of_a_call(name):
    layer = LAYERS[name](value_head_dim=3)
    call = layer.call(torch.randn(B, N, C), torch.randn(B, 19, C))
    for found in (outline(layer.layout, B, N, 19), call):
        assert found.query.shape == (B, layer.layout.query, N, E)
        assert found.key.flatten(1, -3).shape == call.key.flatten(1, -3).shape
        assert found.value.shape == (B, layer.layout.value, 19, 3)


@EVERY
def test_older_keywords_and_sizes_that_do_not_divide(name):
    cls = made_by(name)
    assert cls(head_dim=5, num_heads=2, embed_dim=8).head_dim == 5  # as older code calls it
    with pytest.raises(ValueError, match="num_heads must divide embed_dim"):
        cls(8, 3)


@pytest.mark.parametrize("cls", variants().values())
def test_an_argument_has_a_value_of_its_type(cls):
    def make(**one):
        return cls(**{"embed_dim": C, "num_heads": H, "head_dim": E, **one})

    kinds = types_of(cls)
    own = inspect.signature(cls).parameters
    assert refuses_other_values(make, {name: kinds[name] for name in own}) <= {"alpha", "degree"}


def test_cache_of_another_batch_is_refused():
    layer, cache = LAYERS["softmax"]().eval(), KVCache()
    layer(torch.randn(B, N, C), cache=cache)
    with pytest.raises(ValueError, match="a cache belongs to one layer and one batch"):
        layer(torch.randn(B + 1, 1, C), cache=cache)


def test_softmax_equals_torch_multihead_attention():
    theirs = torch.nn.MultiheadAttention(H * E, H, batch_first=True).double()
    wide = SoftmaxAttention(H * E, H, head_dim=E).double()
    with torch.no_grad():
        weights = theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3)
        for proj, w, b in zip(
            (wide.query_proj, wide.key_proj, wide.value_proj), *weights, strict=True
        ):
            proj.weight.copy_(w)
            proj.bias.copy_(b)
        wide.out_proj.load_state_dict(theirs.out_proj.state_dict())
    x = torch.randn(B, N, H * E, dtype=torch.float64)
    expected, maps = theirs(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(wide(x), expected, atol=1e-13, rtol=0)
    torch.testing.assert_close(wide.weights(x), maps, atol=1e-13, rtol=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            {"key_mask": torch.ones(B, N + 1, dtype=torch.bool)},
            r"key_mask has shape \(2, 14\), expected \(batch, keys\) = \(2, 13\)$",
        ),
        ({"key_mask": torch.ones(B, N)}, "key_mask has dtype torch.float32"),
        (
            {"attn_mask": torch.ones(N, N + 1, dtype=torch.bool)},
            r"attn_mask has shape \(13, 14\), expected \(queries, keys\) = \(13, 13\)",
        ),
        ({"attn_mask": torch.ones(B, N, N, dtype=torch.bool)}, "attn_mask has shape"),
        ({"attn_mask": torch.zeros(N, N)}, "additive masks go to bias"),
        ({"bias": torch.zeros(N, N, dtype=torch.bool)}, "boolean masks go to attn_mask"),
        (
            {"bias": torch.zeros(5, N, N)},
            r"bias has shape \(5, 13, 13\).*\(batch, heads, queries, keys\) = \(2, 4, 13, 13\)$",
        ),
        ({"value": torch.zeros(B, N, C)}, "received value without key"),
        (
            {"key": torch.zeros(B, N, C), "value": torch.zeros(B, 7, C)},
            "key has 13 positions and value 7: expected the same",
        ),
        ({"key": torch.zeros(1, N, C)}, "batch size 2 and key 1"),
        ({"key": torch.zeros(B, N, C + 1)}, r"expected \(batch, positions, 11\)"),
        (
            {"key": torch.zeros(B, N, C + 1), "value": torch.zeros(B, N, C)},
            r"^key has shape \(2, 13, 12\), expected \(batch, positions, 11\)",
        ),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        LAYERS["softmax"]()(torch.zeros(B, N, C), **call)


def test_auto_selects_a_backend_that_supports_the_call(monkeypatch):
    from lit_probattn.attention import recorded_choices

    big = int(STORE_UP_TO**0.5) + 1
    native = None if native_refusal("cpu") else "native"
    layer = SoftmaxAttention(C, 1, head_dim=E, dropout=0.5)
    monkeypatch.setattr(layer.core.makes, "name", "softmax under test")
    layer(torch.randn(1, 3, C))
    dropped = "softmax under test (cpu, float32, dropout)"
    assert recorded_choices()[dropped] == (native or "reference")
    layer(torch.randn(1, big, C))
    assert recorded_choices()[dropped] == (native or "blockwise")
    layer.eval()(torch.randn(1, big, C))
    assert recorded_choices()["softmax under test (cpu, float32)"] == (native or "sdpa")
    layer(torch.randn(1, 3, C))
    assert recorded_choices()["softmax under test (cpu, float32)"] == "sdpa"
