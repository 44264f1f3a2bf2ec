"""What every softmax-like layer promises: shapes, masks, causality, padding, cache, state dicts."""

from __future__ import annotations

import pytest
import torch

from lit_probattn.attention import KVCache, MGKAttention, SoftmaxAttention
from lit_probattn.attention.backends import AUTO_RULES
from tests.support.helpers import cpu_backends

B, N, C, E, H = 2, 13, 11, 5, 3
LAYERS = {
    "softmax": lambda **o: SoftmaxAttention(C, H, head_dim=E, **o),
    "gaussian": lambda **o: SoftmaxAttention(C, H, head_dim=E, score="gaussian", **o),
    "multi-query": lambda **o: SoftmaxAttention(C, H, head_dim=E, num_kv_heads=1, **o),
    "mgk": lambda **o: MGKAttention(C, H, head_dim=E, **o),
    "mgk-hard": lambda **o: MGKAttention(C, H, head_dim=E, e_step="hard", **o),
    "smgk": lambda **o: MGKAttention(
        C, H, head_dim=E, shifted_keys=True, variance="paper_main", **o
    ),
    "mgk-multi-query": lambda **o: MGKAttention(C, H, head_dim=E, num_kv_heads=1, **o),
}
EVERY = pytest.mark.parametrize("name", LAYERS)


@EVERY
def test_future_tokens_change_nothing_when_causal(name):
    layer = LAYERS[name]().double()
    x = torch.randn(B, N, C, dtype=torch.float64)
    y = x.clone()
    y[:, 7:] = torch.randn(B, N - 7, C, dtype=torch.float64)
    a, b = layer(x, is_causal=True), layer(y, is_causal=True)
    torch.testing.assert_close(a[:, :7], b[:, :7], atol=1e-13, rtol=0)
    assert (a[:, 7:] - b[:, 7:]).abs().min() > 0


@EVERY
def test_padding_changes_nothing(name):
    layer = LAYERS[name]().double()
    x = torch.randn(B, N, C, dtype=torch.float64)
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[0, 9:] = False
    short = layer(x[:1, :9])
    torch.testing.assert_close(layer(x, key_mask=mask)[:1, :9], short, atol=1e-13, rtol=0)


@EVERY
@pytest.mark.parametrize("step", [1, 3])
def test_decoding_with_the_cache_equals_the_full_pass(name, step):
    layer = LAYERS[name]().double().eval()
    x = torch.randn(B, N, C, dtype=torch.float64)
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[1, :2] = False  # left padding, as generation from prompts of unequal length has it
    full = layer(x, key_mask=mask, is_causal=True)
    cache, parts = KVCache(), []
    with torch.no_grad():
        for start in range(0, N, step):
            new = slice(start, start + step)
            parts.append(layer(x[:, new], key_mask=mask[:, new], is_causal=True, cache=cache))
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-13, rtol=0)
    assert cache.length == N


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
    layer = LAYERS[name]().eval()
    cache = KVCache()
    with torch.no_grad():
        layer(torch.randn(B, N, C), is_causal=True, cache=cache)
    assert cache.num_bytes == B * N * numbers * 4
    assert cache.allocated_bytes >= cache.num_bytes


def test_cache_of_another_batch_is_refused():
    layer, cache = LAYERS["softmax"]().eval(), KVCache()
    layer(torch.randn(B, N, C), cache=cache)
    with pytest.raises(ValueError, match="a cache belongs to one layer and one batch"):
        layer(torch.randn(B + 1, 1, C), cache=cache)


@EVERY
def test_empty_rows_give_zeros_and_zero_gradients(name):
    layer = LAYERS[name]()
    mask = torch.zeros(B, N, dtype=torch.bool)
    mask[0] = True
    for backend in cpu_backends(layer):
        if name == "mgk-hard" and backend == "sdpa":
            continue
        layer.backend = backend
        x = torch.randn(B, N, C, requires_grad=True)
        out = layer(x, key_mask=mask)
        bias = layer.out_proj.bias
        torch.testing.assert_close(out[1], bias.expand_as(out[1]))
        out.square().sum().backward()
        assert (x.grad[1] == 0).all(), backend
        assert x.grad.isfinite().all(), backend


@EVERY
def test_state_dict_round_trip(name):
    a, b = LAYERS[name](), LAYERS[name]()
    x = torch.randn(B, N, C)
    assert not torch.equal(a(x), b(x))
    b.load_state_dict(a.state_dict())
    assert torch.equal(a(x), b(x))


@EVERY
def test_cross_attention_with_other_widths(name):
    layer = LAYERS[name](key_embed_dim=19, value_head_dim=7)
    out = layer(torch.randn(B, 5, C), torch.randn(B, N, 19))
    assert out.shape == (B, 5, C)


@EVERY
def test_autocast_keeps_scores_in_single_precision(name):
    layer = LAYERS[name]()
    x = torch.randn(B, N, C)
    exact = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        low = layer(x)
    assert low.dtype == torch.bfloat16
    assert (low.float() - exact).abs().max() < 0.05


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
        ({"key_mask": torch.ones(B, N + 1, dtype=torch.bool)}, r"key_mask has shape \(2, 14\)"),
        ({"key_mask": torch.ones(B, N)}, "key_mask has dtype torch.float32"),
        ({"attn_mask": torch.ones(N, N + 1, dtype=torch.bool)}, "attn_mask has shape"),
        ({"attn_mask": torch.ones(B, N, N, dtype=torch.bool)}, "attn_mask has shape"),
        ({"attn_mask": torch.zeros(N, N)}, "additive masks go to bias"),
        ({"bias": torch.zeros(N, N, dtype=torch.bool)}, "boolean masks go to attn_mask"),
        ({"bias": torch.zeros(5, N, N)}, "bias has shape"),
        ({"value": torch.zeros(B, N, C)}, "value is given without key"),
        ({"key": torch.zeros(B, N, C), "value": torch.zeros(B, 7, C)}, "key has 13 positions"),
        ({"key": torch.zeros(1, N, C)}, "batch size 2 and key 1"),
        ({"key": torch.zeros(B, N, C + 1)}, r"expected \(batch, positions, 11\)"),
    ],
)
def test_bad_calls(call, message):
    with pytest.raises(ValueError, match=message):
        LAYERS["softmax"]()(torch.zeros(B, N, C), **call)


def test_auto_takes_what_serves_the_call():
    from lit_probattn.attention import recorded_choices

    big = int(AUTO_RULES["cpu"].store_up_to ** 0.5) + 1
    layer = SoftmaxAttention(C, 1, head_dim=E, dropout=0.5)
    layer.core.variant = "softmax under test"
    layer(torch.randn(1, 3, C))
    assert recorded_choices()["softmax under test (cpu, float32, dropout)"] == "reference"
    layer(torch.randn(1, big, C))
    assert recorded_choices()["softmax under test (cpu, float32, dropout)"] == "blockwise"
    layer.eval()(torch.randn(1, big, C))
    assert recorded_choices()["softmax under test (cpu, float32)"] == "sdpa"
