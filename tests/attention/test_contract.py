"""What every layer promises: shapes, masks, causality, padding, decoding, copies, refusals.

The layers are those of `variants.py`: a new variant is held to this without a line here.
"""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lit_probattn.attention import (
    KVCache,
    LinearFiSHAttention,
    MGKAttention,
    SoftmaxAttention,
    variants,
)
from lit_probattn.attention.backends import AUTO_RULES, native_refusal
from lit_probattn.attention.functional import repeat_heads
from lit_probattn.randomness import RandomKey
from tests.attention.variants import EMBED, HEAD, examples, layers, serving, shipped_variants

B, N, C, E, H = 2, 13, EMBED, HEAD, 3
LAYERS = layers()
EXAMPLES = {**LAYERS, **examples()}
EVERY = pytest.mark.parametrize("name", LAYERS)
KEY = RandomKey(5, step=3, sample_ids=torch.tensor([19, 4]))
CLOSE = {"rtol": 0.0, "atol": 1e-11}
# Layers whose caches are counted by hand.
KEPT = {
    "softmax": lambda **o: SoftmaxAttention(C, H, head_dim=E, **o),
    "multi-query": lambda **o: SoftmaxAttention(C, H, head_dim=E, num_kv_heads=1, **o),
    "mgk": lambda **o: MGKAttention(C, H, head_dim=E, **o),
    "smgk": lambda **o: MGKAttention(C, H, head_dim=E, shifted_keys=True, **o),
    "mgk-multi-query": lambda **o: MGKAttention(C, H, head_dim=E, num_kv_heads=1, **o),
}


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def test_every_public_variant_has_a_shipped_file_or_is_a_released_one():
    shipped = {cls.__name__ for cls, _ in shipped_variants().values()}
    without = {name for name in variants() if name not in shipped}
    assert without == {name for name in variants() if name.startswith("Released")}


@EVERY
def test_future_tokens_change_nothing_when_causal(name):
    layer, x = LAYERS[name]().double(), double(B, N, C)
    y = torch.cat([x[:, :7], double(B, N - 7, C)], 1)
    for backend in serving(layer, x, is_causal=True):
        layer.backend = backend
        a, b = (layer(z, is_causal=True, rng=KEY) for z in (x, y))
        torch.testing.assert_close(a[:, :7], b[:, :7], **CLOSE)
        assert (a[:, 7:] - b[:, 7:]).abs().amax(-1).min() > 0, backend


@EVERY
def test_padding_and_other_samples_change_nothing(name):
    layer, x = LAYERS[name]().double(), double(B, N, C)
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[1, 9:] = False
    alone = RandomKey(5, step=3, sample_ids=torch.tensor([4]))
    for backend in serving(layer, x, key_mask=mask):
        layer.backend = backend
        short = layer(x[1:, :9], rng=alone)
        torch.testing.assert_close(layer(x, key_mask=mask, rng=KEY)[1:, :9], short, **CLOSE)


@EVERY
def test_hidden_pairs_change_nothing_or_are_refused(name):
    layer, x = LAYERS[name]().double(), double(B, N, C)
    layer.eval()
    pairs = torch.rand(N, N) < 0.6
    pairs[3] = False
    y = x.clone()
    y[:, 5] = double(B, C)
    served = serving(layer, x, attn_mask=pairs)
    for backend in served:
        layer.backend = backend
        a, b = (layer(x, z, attn_mask=pairs) for z in (x, y))
        unseen = ~pairs[:, 5]
        torch.testing.assert_close(a[:, unseen], b[:, unseen], **CLOSE)
        assert (a[:, ~unseen] - b[:, ~unseen]).abs().amax(-1).max() > 0
    if not served:
        layer.backend = "auto"
        with pytest.raises(NotImplementedError, match="cannot apply attn_mask"):
            layer(x, attn_mask=pairs)


@EVERY
def test_masks_of_three_dimensions_are_heads(name):
    layer, x = LAYERS[name]().double().eval(), double(B, N, C)
    pairs = torch.rand(layer.num_heads, N, N) < 0.6
    for backend in serving(layer, x, attn_mask=pairs):
        layer.backend = backend
        found = layer.core(layer.call(x, attn_mask=pairs))
        for head, own in enumerate(pairs):
            alone = layer.core(layer.call(x, attn_mask=own))  # for all heads alike
            torch.testing.assert_close(found[:, head], alone[:, head], **CLOSE)


@EVERY
def test_a_bias_is_added_to_the_scores_or_refused(name):
    layer, x = LAYERS[name]().double().eval(), double(B, N, C)
    hidden = torch.zeros(N, N, dtype=torch.float64)
    hidden[:, 4] = -torch.inf
    pairs = torch.ones(N, N, dtype=torch.bool)
    pairs[:, 4] = False
    if not layer.core.has_scores:
        with pytest.raises(ValueError, match="add a bias to"):
            layer(x, bias=hidden)
        return
    for backend in serving(layer, x, bias=hidden):
        layer.backend = backend
        torch.testing.assert_close(layer(x, bias=hidden), layer(x, attn_mask=pairs), **CLOSE)


@EVERY
@pytest.mark.parametrize("step", [1, 3])
def test_decoding_with_the_cache_equals_the_full_pass(name, step):
    layer, x = LAYERS[name]().double().eval(), double(B, N, C)
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[1, :2] = False  # left padding, as generation from prompts of unequal length has it
    full = layer(x, key_mask=mask, is_causal=True)
    cache, parts = layer.new_cache(), []
    with torch.no_grad():
        for start in range(0, N, step):
            new = slice(start, start + step)
            parts.append(layer(x[:, new], key_mask=mask[:, new], is_causal=True, cache=cache))
    torch.testing.assert_close(torch.cat(parts, 1), full, **CLOSE)
    assert cache.length == N
    assert 0 < cache.num_bytes <= cache.allocated_bytes


@EVERY
def test_empty_rows_give_zeros_and_zero_gradients(name):
    layer = LAYERS[name](bias=False).double()
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[1] = False
    for backend in serving(layer, double(B, N, C), key_mask=mask):
        layer.backend = backend
        layer.zero_grad()
        x = double(B, N, C).requires_grad_()
        out = layer(x, key_mask=mask, rng=KEY)
        assert not out[1].any(), backend
        out.square().sum().backward()
        assert not x.grad[1].any(), backend
        assert x.grad[0].any(), backend
        assert x.grad.isfinite().all(), backend
        grads = [p.grad for p in layer.parameters() if p.grad is not None]
        assert all(bool(grad.isfinite().all()) for grad in grads), backend


@EVERY
def test_state_dict_restores_the_layer(name):
    layer, x = LAYERS[name]().double(), double(B, N, C)
    torch.manual_seed(7)
    other = LAYERS[name]().double()
    assert not torch.equal(other(x, rng=KEY), layer(x, rng=KEY))
    other.load_state_dict(copy.deepcopy(layer.state_dict()))
    assert torch.equal(other(x, rng=KEY), layer(x, rng=KEY))


@EVERY
def test_weights_without_the_name_of_the_core_load(name):
    layer, x = LAYERS[name]().double(), double(B, N, C)
    old = {key.removeprefix("core."): value for key, value in layer.state_dict().items()}
    torch.manual_seed(7)
    other = LAYERS[name]().double()
    other.load_state_dict(old)
    assert torch.equal(other(x, rng=KEY), layer(x, rng=KEY))


@EVERY
def test_cross_attention_with_other_widths_and_lengths(name):
    """Every query by itself, over the keys of its own sample that are real."""
    layer = LAYERS[name](key_embed_dim=17, value_head_dim=3).double().eval()
    memory, x = double(B, 19, 17), double(B, 7, C)
    mask = torch.ones(B, 19, dtype=torch.bool)
    mask[0, 11:] = False
    for backend in serving(layer, x, key=memory, key_mask=mask):
        layer.backend = backend
        out = layer(x, memory, key_mask=mask)
        assert out.shape == (B, 7, C)
        for i in (0, 3, 6):
            alone = layer(x[:1, i : i + 1], memory[:1, :11])
            torch.testing.assert_close(out[:1, i : i + 1], alone, **CLOSE)
        assert (out[:, 1:] - out[:, :-1]).abs().amax(-1).min() > 0


@pytest.mark.parametrize("name", EXAMPLES)
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
    if core.has_scores:
        masks["bias"] = torch.randn(layer.num_heads, N, 19)
    for training, dtype in itertools.product((True, False), (torch.float32, torch.float64)):
        layer.train(training).to(dtype)
        query, key = x.to(dtype), memory.to(dtype)
        for inputs in ({"query": query, "is_causal": True}, {"query": query, "key": key, **masks}):
            call = layer.call(**inputs, rng=KEY)
            maps = layer.weights(**inputs, rng=KEY)
            sums = maps.sum(-1)  # 0 where features without a sign leave nothing
            torch.testing.assert_close(sums, (sums > 0.5).to(sums))
            assert sums.mean() > 0.7
            found = maps @ repeat_heads(call.value, maps.shape[1])
            bound = 1e-10 if dtype == torch.float64 else 2e-6
            torch.testing.assert_close(found, core(call).to(dtype), rtol=0, atol=bound)
    low = layer.bfloat16().weights(x.bfloat16(), rng=KEY)
    assert low.dtype == torch.float32


@EVERY
def test_recomputation_draws_the_same(name):
    layer, x = LAYERS[name]().double(), double(B, N, C).requires_grad_()

    def call(z):
        return layer(z, is_causal=True, rng=KEY)

    expected = torch.autograd.grad(call(x).square().sum(), x)[0]
    again = checkpoint(call, x, use_reentrant=False)
    found = torch.autograd.grad(again.square().sum(), x)[0]
    torch.testing.assert_close(found, expected, **CLOSE)


@EVERY
def test_layers_can_be_built_and_counted_without_memory(name):
    with torch.device("meta"):
        layer = LAYERS[name]()
        out = layer(torch.empty(B, N, C), rng=RandomKey(0))
        without_key = layer(torch.empty(B, N, C))
    assert out.shape == without_key.shape == (B, N, C)
    assert layer.cost(N).num_parameters == sum(p.numel() for p in layer.parameters())


@EVERY
def test_head_size_is_given_by_name(name):
    cls = type(LAYERS[name]())
    with pytest.raises(TypeError):
        cls(8, 4, 2)
    assert cls(8, 2).head_dim == 4
    assert repr(cls(8, 2)) == repr(cls(embed_dim=8, head_dim=4, num_heads=2))
    assert cls(head_dim=5, num_heads=2, embed_dim=8).head_dim == 5  # as older code calls it
    with pytest.raises(ValueError, match="num_heads must divide embed_dim"):
        cls(8, 3)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("softmax", 2 * H * E),
        ("multi-query", 2 * E),
        ("mgk", H * (2 * E + E)),
        ("smgk", 2 * H * E),
        ("mgk-multi-query", 2 * E + E),
    ],
)
def test_cache_bytes_per_token(name, numbers):
    """Per token: softmax 2HE, MGK H(K+1)E, shifted keys 2HE, multi-query MGK (K+1)E numbers."""
    layer = KEPT[name]().eval()
    cache = KVCache()
    with torch.no_grad():
        layer(torch.randn(B, N, C), is_causal=True, cache=cache)
    assert cache.num_bytes == B * N * numbers * 4
    assert cache.allocated_bytes >= cache.num_bytes


def test_cache_of_another_batch_is_refused():
    layer, cache = KEPT["softmax"]().eval(), KVCache()
    layer(torch.randn(B, N, C), cache=cache)
    with pytest.raises(ValueError, match="a cache belongs to one layer and one batch"):
        layer(torch.randn(B + 1, 1, C), cache=cache)


def test_softmax_equals_torch_multihead_attention():
    ours = SoftmaxAttention(C, H, head_dim=E, bias=True).double()
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
    assert ours(torch.randn(B, N, C, dtype=torch.float64)).shape == (B, N, C)


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
            r"bias has shape \(5, 13, 13\).*\(batch, heads, queries, keys\) = \(2, 3, 13, 13\)$",
        ),
        ({"value": torch.zeros(B, N, C)}, "value is given without key"),
        (
            {"key": torch.zeros(B, N, C), "value": torch.zeros(B, 7, C)},
            "key has 13 positions and value 7: expected the same",
        ),
        ({"key": torch.zeros(1, N, C)}, "batch size 2 and key 1"),
        ({"key": torch.zeros(B, N, C + 1)}, r"expected \(batch, positions, 11\)"),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        KEPT["softmax"]()(torch.zeros(B, N, C), **call)


def test_auto_takes_what_serves_the_call():
    from lit_probattn.attention import recorded_choices

    big = int(AUTO_RULES["cpu"].store_up_to ** 0.5) + 1
    native = None if native_refusal("cpu") else "native"
    layer = SoftmaxAttention(C, 1, head_dim=E, dropout=0.5)
    layer.core.variant = "softmax under test"
    layer(torch.randn(1, 3, C))
    dropped = "softmax under test (cpu, float32, dropout)"
    assert recorded_choices()[dropped] == (native or "reference")
    layer(torch.randn(1, big, C))
    assert recorded_choices()[dropped] == (native or "rows")
    layer.eval()(torch.randn(1, big, C))
    assert recorded_choices()["softmax under test (cpu, float32)"] == "sdpa"
