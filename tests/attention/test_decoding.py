"""Decoding: caches and their bytes, split and merge, steps against full passes."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from lit_probattn.attention import KVCache
from lit_probattn.attention.engines.cached import merge_partials, partial_attention
from lit_probattn.commands.bounded_cache import BoundedCache, CacheBound
from lit_probattn.randomness import RandomKey
from tests.attention.decoding_layers import CACHED, LAYERS, B, C, E, N, make
from tests.support.helpers import cache_bytes_per_token, cpu_backends
from tests.support.slow import taking_turns


def left_padded_mask(pads=(0, 3)):
    mask = torch.ones(B, N, dtype=torch.bool)
    for row, count in enumerate(pads):
        mask[row, :count] = False
    return mask


def decode(layer, x, mask, cache, first, step):
    """Read `first` tokens at once, then `step` at a time."""
    stops = [0, first, *range(first + step, N, step), N]
    with torch.no_grad():
        return torch.cat(
            [
                layer(x[:, a:b], key_mask=mask[:, a:b], is_causal=True, cache=cache)
                for a, b in itertools.pairwise(stops)
            ],
            1,
        )


# ---------------------------------------------------------------------- a step equals the full pass
STEPS = [(1, 1), (5, 1), (3, 2), (4, 3)]


@pytest.mark.parametrize(("name", "steps"), taking_turns(LAYERS, STEPS))
def test_step_equals_the_full_causal_pass(name, steps):
    layer, x, mask = make(name), torch.randn(B, N, C, dtype=torch.float64), left_padded_mask()
    layer.backend = "reference"
    full = layer(x, key_mask=mask, is_causal=True)
    layer.backend = "auto"
    out = decode(layer, x, mask, layer.new_cache(capacity=7), *steps)
    torch.testing.assert_close(out, full, atol=1e-13, rtol=0)


@pytest.mark.parametrize("name", ["softmax", "mgk, equal, row eps", "linear, favor, grouped"])
@pytest.mark.parametrize("failing", ["attn_mask", "backend"])
def test_a_call_that_fails_leaves_the_cache_unchanged(name, failing):
    layer, x = make(name), torch.randn(B, N, C, dtype=torch.float64)
    cache = layer.new_cache()
    with torch.no_grad():
        full = layer(x, is_causal=True)
        first = layer(x[:, :4], is_causal=True, cache=cache)
        layer.backend = "flash" if failing == "backend" else "auto"
        wrong = torch.ones(4, 99, dtype=torch.bool) if failing == "attn_mask" else None
        with pytest.raises((ValueError, NotImplementedError)):
            layer(x[:, 4:], is_causal=True, attn_mask=wrong, cache=cache)
        layer.backend = "auto"
        rest = layer(x[:, 4:], is_causal=True, cache=cache)
    torch.testing.assert_close(torch.cat([first, rest], 1), full, atol=1e-12, rtol=0)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["softmax", "linear, favor, grouped", "linear fish"])
def test_a_hook_that_fails_leaves_the_cache_unchanged(name, error, monkeypatch):
    """It runs after a state has been updated."""
    check_failing_hook(make(name), lambda layer: layer.new_cache(), monkeypatch, error)


def test_a_hook_that_fails_leaves_a_bounded_cache_unchanged(monkeypatch):
    """It runs after the eviction."""
    bound = CacheBound(4)
    check_failing_hook(make("softmax"), lambda layer: BoundedCache(bound), monkeypatch)


def check_failing_hook(layer, make_cache, monkeypatch, error=RuntimeError):
    x, caches = torch.randn(B, N, C, dtype=torch.float64), [make_cache(layer) for _ in range(2)]

    def fail(out, x):
        raise error("gate")

    with torch.no_grad():
        for cache in caches:
            layer(x[:, :4], is_causal=True, cache=cache)
        with monkeypatch.context() as patch:
            patch.setattr(layer, "gate", fail)
            with pytest.raises(error, match="gate"):
                layer(x[:, 4:6], is_causal=True, cache=caches[0])
        rest = [layer(x[:, 4:], is_causal=True, cache=cache) for cache in caches]
    torch.testing.assert_close(rest[0], rest[1], atol=1e-13, rtol=0)
    assert caches[0].next_position == caches[1].next_position == N


@pytest.mark.parametrize("first", [0, 4])
def test_a_batch_that_is_refused_leaves_the_cache_unchanged(first):
    """Another number of sequences, as the first call or with the first key mask."""
    layer, x = make("softmax"), torch.randn(B, N, C, dtype=torch.float64)
    wrong, cache = torch.randn(B + 1, 2, C, dtype=torch.float64), layer.new_cache()
    given = {"is_causal": True, "cache": cache}
    with torch.no_grad():
        full = layer(x, is_causal=True)
        if first:
            layer(x[:, :first], **given)
            other = {"key_mask": torch.ones(B + 1, 2, dtype=torch.bool)}
        else:
            other = {"attn_mask": torch.ones(2, 99, dtype=torch.bool)}
        with pytest.raises(ValueError, match="shape"):
            layer(wrong, **other, **given)
        rest = layer(x[:, first:], **given)
    torch.testing.assert_close(rest, full[:, first:], atol=1e-12, rtol=0)


def test_a_call_that_fails_is_not_counted_by_the_memory():
    layer, x = make("softmax"), torch.randn(B, N, C, dtype=torch.float64)
    memory = layer.remember(x)
    layer.backend = "flash"
    with torch.no_grad(), pytest.raises((ValueError, NotImplementedError)):
        layer(x[:, :2], memory=memory)
    assert memory.num_read == 0


@pytest.mark.parametrize("name", ["softmax", "linear, favor, grouped"])
def test_gradients_through_a_cache_are_refused(name):
    """They would lack the keys and values, which the cache stores without their graph."""
    layer, x = make(name), torch.randn(B, N, C, dtype=torch.float64)
    out = layer(x, is_causal=True, cache=layer.new_cache())
    with pytest.raises(NotImplementedError, match="call the layer without a cache"):
        out.sum().backward()


@pytest.mark.parametrize(("name", "first"), taking_turns(LAYERS, [0, 5]))
def test_a_step_of_no_tokens_changes_nothing(name, first):
    layer, x, mask = make(name), torch.randn(B, N, C, dtype=torch.float64), left_padded_mask()
    full = decode(layer, x, mask, layer.new_cache(), 6, 2)
    cache = layer.new_cache()
    given = {"is_causal": True, "cache": cache}
    with torch.no_grad():
        parts = [layer(x[:, :first], key_mask=mask[:, :first], **given)]
        parts += [layer(x[:, :0], key_mask=mask[:, :0], **given)]
        parts += [layer(x[:, first:], key_mask=mask[:, first:], **given)]
    assert parts[1].shape == (B, 0, C)
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-13, rtol=0)


@pytest.mark.parametrize(("name", "rows"), taking_turns(LAYERS, [(1, 0), (1, 0, 1)]))
def test_rows_that_are_taken_go_on_as_theirs(name, rows):
    """As many as before, or more: what is stored per row moves with it in both cases."""
    layer, x, mask = make(name), torch.randn(B, N, C, dtype=torch.float64), left_padded_mask()
    ids, taken, cache = torch.tensor([8, 3]), torch.tensor(rows), layer.new_cache()
    layer.backend = "reference"
    full = layer(x, key_mask=mask, is_causal=True, rng=RandomKey(5, sample_ids=ids))
    layer.backend = "auto"
    given = {"is_causal": True, "cache": cache}
    with torch.no_grad():
        layer(x[:, :6], key_mask=mask[:, :6], rng=RandomKey(5, sample_ids=ids), **given)
        cache.reorder(taken)
        mine = RandomKey(5, sample_ids=ids[taken])
        out = layer(x[taken, 6:], key_mask=mask[taken, 6:], rng=mine, **given)
    torch.testing.assert_close(out, full[taken, 6:], atol=1e-13, rtol=0)


@pytest.mark.parametrize(("name", "part_len"), taking_turns(CACHED, [1, 4, 13]))
def test_reading_the_cache_in_parts_changes_nothing(name, part_len):
    layer, x, mask = make(name), torch.randn(B, N, C, dtype=torch.float64), left_padded_mask()
    layer.backend = "reference"
    full = layer(x, key_mask=mask, is_causal=True)
    layer.backend = "auto"
    cache = KVCache(part_len=part_len)
    out = decode(layer, x, mask, cache, 3, 1)
    torch.testing.assert_close(out, full, atol=1e-13, rtol=0)
    assert len(cache.parts()) == -(-N // part_len)


@pytest.mark.parametrize("name", CACHED)
def test_named_backends_decode_too(name):
    layer, x, mask = make(name), torch.randn(B, N, C, dtype=torch.float64), left_padded_mask()
    layer.backend = "reference"
    full = layer(x, key_mask=mask, is_causal=True)
    for backend in cpu_backends(layer):
        layer.backend = backend
        if "noise at evaluation" in name and backend == "native":  # draws it in float32 alone
            single, y = copy.deepcopy(layer).float(), x.float()
            out = decode(single, y, mask, layer.new_cache(), 4, 1)
            torch.testing.assert_close(out.double(), full, atol=1e-5, rtol=0)
            continue
        out = decode(layer, x, mask, layer.new_cache(), 4, 1)
        torch.testing.assert_close(out, full, atol=1e-13, rtol=0)


@pytest.mark.parametrize("name", ["gaussian", "mgk", "smgk, grouped"])
def test_a_cache_goes_on_from_where_it_is_cut(name):
    layer, x, other = make(name), torch.randn(B, N, C).double(), torch.randn(B, N, C).double()
    cache = layer.new_cache()

    def read(tokens):
        with torch.no_grad():
            found = [layer(token, is_causal=True, cache=cache) for token in tokens.split(1, 1)]
        return torch.cat(found, 1)

    read(x[:, :4]), read(other[:, 4:9])
    cache.truncate(4)
    out = read(x[:, 4:])
    layer.backend = "reference"
    full = layer(x, is_causal=True)
    torch.testing.assert_close(out, full[:, 4:], atol=1e-13, rtol=0)
    with pytest.raises(ValueError, match=r"in \[0, 13\], received 14"):
        cache.truncate(N + 1)


def test_masks_and_bias_reach_the_cached_keys():
    layer, x = make("mgk"), torch.randn(B, N, C, dtype=torch.float64)
    bias = torch.randn(N, N, dtype=torch.float64)
    pairs = torch.rand(N, N) < 0.8
    full = layer(x, is_causal=True, bias=bias, attn_mask=pairs)
    cache = KVCache(part_len=4)
    parts = []
    for i in range(N):
        row = {"bias": bias[i : i + 1, : i + 1], "attn_mask": pairs[i : i + 1, : i + 1]}
        parts.append(layer(x[:, i : i + 1], is_causal=True, cache=cache, **row))
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-13, rtol=0)


# ---------------------------------------------------------------------- split and merge
def test_merge_of_parts_is_softmax_over_all():
    scores = 30 * torch.randn(B, 3, 5, N, dtype=torch.float64)
    value = torch.randn(B, 3, N, 7, dtype=torch.float64)
    allowed = torch.rand(B, 1, 5, N) < 0.5
    allowed[:, :, 1] = False  # sees nothing at all
    allowed[:, :, 2, :4] = False  # sees nothing of the first part
    hidden = scores.masked_fill(~allowed, float("-inf"))
    expected = hidden.softmax(-1).nan_to_num() @ value
    for cuts in ([0, N], [0, 4, N], [0, 1, 4, 9, N]):
        parts = [
            partial_attention(scores[..., a:b], value[:, :, a:b], allowed[..., a:b])
            for a, b in itertools.pairwise(cuts)
        ]
        out, total = merge_partials([p[0] for p in parts], [p[1] for p in parts])
        torch.testing.assert_close(out, expected, atol=1e-14, rtol=0)
        torch.testing.assert_close(total[..., 0], hidden.logsumexp(-1), atol=1e-13, rtol=0)
        assert (out[:, :, 1] == 0).all()


def test_merge_holds_for_scores_that_overflow_exponentials():
    scores = torch.tensor([[[[900.0, -900.0, 899.0]]]], dtype=torch.float64)
    value = torch.tensor([[[[1.0], [2.0], [3.0]]]], dtype=torch.float64)
    parts = [
        partial_attention(scores[..., i : i + 1], value[:, :, i : i + 1], None) for i in range(3)
    ]
    out, _ = merge_partials([p[0] for p in parts], [p[1] for p in parts])
    share = torch.sigmoid(torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(out.squeeze(), share * 1.0 + (1 - share) * 3.0)


# ---------------------------------------------------------------------- bytes
H = 3
TABLE = [  # name, numbers per token, constant numbers; extensions.md, section 3, D = D_v = E
    ("softmax", {}, H * (E + E), 0),
    ("softmax", {"num_kv_heads": 1}, E + E, 0),
    ("softmax", {"value_head_dim": 7}, H * (E + 7), 0),
    ("mgk", {}, H * (2 * E + E + 2), 0),
    ("mgk", {"num_components": 4}, H * (4 * E + E + 4), 0),
    ("mgk", {"num_kv_heads": 1}, 2 * E + E + 2, 0),
    ("smgk", {}, H * (E + E + 2), 0),
    ("smgk", {"num_components": 4}, H * (E + E + 4), 0),
    ("fish", {}, 2 * E + 3 * E, 0),
    ("linear", {}, 0, 2 * E * (E + 1)),
    ("mlk", {}, 0, H * E * (E + 1)),
    ("mlk", {"num_components": 4, "value_head_dim": 7}, 0, H * E * (7 + 1)),
    ("mlk, shifted keys", {}, 0, H * E * (E + 1)),
]


@pytest.mark.parametrize(("name", "options", "per_token", "constant"), TABLE)
def test_bytes_of_the_decoding_table(name, options, per_token, constant):
    layer = make(name, **options).float()
    assert cache_bytes_per_token(layer) == (4 * per_token, 4 * constant)
    memory = layer.remember(torch.randn(B, 7, C)).cache  # which does not grow
    assert memory.allocated_bytes == memory.num_bytes


def test_half_precision_halves_keys_and_keeps_terms():
    layer = make("mgk").to(torch.bfloat16)
    assert cache_bytes_per_token(layer, torch.bfloat16) == (2 * H * 3 * E + 4 * H * 2, 0)


def test_cache_grows_by_doubling_and_reads_back():
    cache = KVCache(capacity=3)
    key, value = torch.randn(B, 2, 4, 20, E), torch.randn(B, 2, 20, 7)
    for i in range(20):
        cache.append(key[..., i : i + 1, :], value[..., i : i + 1, :])
    assert cache.allocated_bytes == (24 * cache.num_bytes) // 20  # 3, 6, 12, 24
    keys, values, terms = cache.part(range(4, 9))
    assert torch.equal(keys, key[..., 4:9, :])
    assert torch.equal(values, value[..., 4:9, :])
    assert terms is None
    with pytest.raises(ValueError, match="the cache is empty"):
        KVCache().part(range(1))
    with pytest.raises(ValueError, match="part_len must be at least 1, received 0"):
        KVCache(part_len=0)


def test_rows_that_are_selected_keep_their_terms():
    cache, rows = KVCache(capacity=9), torch.tensor([1, 1, 0])
    key, value, terms = torch.randn(2, 3, 2, 7, E), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 2, 7)
    cache.append(key, value)
    cache.append_terms(terms[..., :5])
    cache.reorder(rows)
    found = cache.part(range(2, 5))
    parts = key[..., 2:5, :], value[..., 2:5, :], terms[..., 2:5]
    for tensor, expected in zip(found, parts, strict=True):
        assert torch.equal(tensor, expected[rows])
    assert cache.part(range(2, 7))[2] is None
