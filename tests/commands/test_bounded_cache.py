"""Caches of bounded length: the identity behind eviction, what stays, which rule costs least."""

from __future__ import annotations

import itertools

import pytest
import torch

from lit_probattn.attention import FiSHAttention
from lit_probattn.commands.bounded_cache import (
    BoundedCache,
    CacheBound,
    bound_problem,
    bounded_caches,
    output_movements,
)
from lit_probattn.models.decoding import generate
from tests.attention.decoding_layers import CACHED, B, C, N, make
from tests.models.test_decoding import tiny
from tests.support.slow import mostly_slow

RULES = ("movement", "weight", "age")
REFUSED = (
    "mgk, prior per position",
    "smgk, rotary, shift before",
    "fish, noise at evaluation",
    "fish as written, noise per head at evaluation",
)
BOUNDED = [name for name in CACHED if name not in REFUSED]
PAIRS = list(itertools.product(BOUNDED, RULES))
ONE_RULE_EACH = list(zip(BOUNDED, itertools.cycle(RULES), strict=False))


def read(layer, x, cache, mask=None):
    """Decode token by token; the outputs, and how long the cache was after each."""
    parts, lengths = [], []
    with torch.no_grad():
        for i in range(x.shape[1]):
            real = None if mask is None else mask[:, i : i + 1]
            parts.append(layer(x[:, i : i + 1], key_mask=real, is_causal=True, cache=cache))
            lengths.append(cache.length)
    return torch.cat(parts, 1), lengths


def dropped(call, cache):
    """Which of N keys the cache of the others lacks, by the values of the first head."""
    lacking = call.value[:, 0, :, None] - cache.part(range(N - 1))[1][:, 0, None]
    return lacking.norm(dim=-1).amin(-1).argmax(-1)


@pytest.mark.parametrize("name", BOUNDED)
def test_removing_a_key_moves_the_output_by_its_movement(name):
    """Every key of a step in turn, hidden from the call itself; all heads of all layers' kinds."""
    layer, x = make(name), torch.randn(B, N, C, dtype=torch.float64)
    layer.backend = "reference"
    call = layer.call(x[:, -1:], x)
    with torch.no_grad():
        moved = output_movements(layer.core.weights(call), call.value)  # (B, H, 1, N)
        whole = layer.core(call)
        for t in range(N):
            others = torch.arange(N) != t
            removed = layer.core(layer.call(x[:, -1:], x, attn_mask=others[None]))
            found = (removed - whole).norm(dim=-1)
            torch.testing.assert_close(found, moved[..., t], atol=2e-14, rtol=1e-11)


def test_a_key_that_has_all_the_weight_stays():
    weights = torch.tensor([[[[1.0, 0.0, 0.0]]]], dtype=torch.float64)
    moved = output_movements(weights, torch.randn(1, 1, 3, 5, dtype=torch.float64))
    assert moved[0, 0, 0].tolist() == [float("inf"), 0.0, 0.0]


@pytest.mark.parametrize(("name", "rule"), mostly_slow(PAIRS, ONE_RULE_EACH))
def test_a_bounded_cache_stays_bounded_and_attends_to_what_it_kept(name, rule):
    """Each step against the full call in which all that was dropped is hidden."""
    layer, x = make(name), torch.randn(B, N, C, dtype=torch.float64)
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[1, :2] = False
    cache = BoundedCache(CacheBound(4, rule))
    places = torch.empty(B, 0, dtype=torch.long)  # what the cache holds, followed by its values
    for i in range(N):
        with torch.no_grad():
            out = layer(x[:, i : i + 1], key_mask=mask[:, i : i + 1], is_causal=True, cache=cache)
        places = torch.cat([places, torch.full((B, 1), i)], 1)
        kept = torch.zeros(B, 1, 1, i + 1, dtype=torch.bool).scatter_(-1, places[:, None, None], 1)
        layer.backend = "reference"
        whole = layer(x[:, : i + 1], key_mask=mask[:, : i + 1], attn_mask=kept, is_causal=True)
        layer.backend = "auto"
        seen = mask[:, i]
        torch.testing.assert_close(out[seen, 0], whole[seen, -1], atol=1e-13, rtol=0)
        assert cache.length == min(4, i + 1)
        assert cache.length + cache.num_dropped == i + 1
        values = layer.call(x[:, : i + 1]).value  # those of the held places say which they are
        held = cache.part(range(cache.length))[1]
        match = (held[:, 0, :, None] - values[:, 0, None]).norm(dim=-1) < 1e-12
        assert (match.sum(-1) == 1).all()
        places = match.long().argmax(-1)
        assert (places.diff(dim=-1) > 0).all(), "in their order"
        if rule == "age":
            assert places[0].tolist() == list(range(max(0, i - 3), i + 1))


def test_the_rule_takes_the_smallest():
    """One step over the bound: the dropped key has the smallest movement, or weight, of all."""
    layer, x = make("mgk"), 3.0 * torch.randn(16, N, C, dtype=torch.float64)
    with torch.no_grad():
        call = layer.call(x[:, -1:], x)
        weights = layer.core.weights(call)
        moved = output_movements(weights, call.value)
    worth = {"movement": moved.square().sum((1, 2)), "weight": weights.sum((1, 2))}
    assert (worth["movement"].argmin(-1) != worth["weight"].argmin(-1)).any(), "rules differ here"
    for rule, values in worth.items():
        cache = BoundedCache(CacheBound(N - 1, rule))
        read(layer, x, cache)
        assert torch.equal(dropped(call, cache), values.argmin(-1)), rule


@pytest.mark.parametrize("rule", ["movement", "weight"])
def test_a_prompt_that_is_read_at_once_is_judged_by_its_latest_query(rule):
    """One position over the bound after a call with N queries."""
    layer, x = make("mgk"), 3.0 * torch.randn(16, N, C, dtype=torch.float64)
    cache = BoundedCache(CacheBound(N - 1, rule))
    with torch.no_grad():
        call = layer.call(x[:, -1:], x)
        weights = layer.core.weights(call)
        layer(x, is_causal=True, cache=cache)
    if rule == "movement":
        weights = output_movements(weights, call.value).square()
    assert torch.equal(dropped(call, cache), weights.sum((1, 2)).argmin(-1))


def test_a_bound_that_is_not_reached_changes_nothing():
    for name in ("softmax", "mgk", "smgk"):
        model = tiny(name)
        prompt = torch.randint(19, (B, 5))
        whole = generate(model, prompt, max_new_tokens=7).tokens
        found = generate(
            model, prompt, max_new_tokens=7, caches=bounded_caches(model.encoder, CacheBound(11))
        )
        assert torch.equal(found.tokens, whole)


@pytest.mark.parametrize("rule", RULES)
def test_generation_holds_the_bound_in_every_layer(rule):
    """A prompt longer than the bound, padded on the left; bytes do not grow with new tokens."""
    model, prompt = tiny("mgk"), torch.randint(19, (B, 9))
    mask = torch.ones(B, 9, dtype=torch.bool)
    mask[1, :3] = False

    def read(prompt, count, **options):
        caches = bounded_caches(model.encoder, CacheBound(6, rule))
        return generate(model, prompt, max_new_tokens=count, caches=caches, **options)

    few, many = (read(prompt, n, prompt_mask=mask) for n in (2, 15))
    assert few.cache_bytes == many.cache_bytes
    assert torch.equal(many.tokens[:, :2], few.tokens)
    alone = read(prompt[1:, 3:], 15)
    assert torch.equal(alone.tokens, many.tokens[1:]), "padding goes first"


def test_rotary_positions_count_what_was_dropped():
    """Under `age` the cache is a window, so a rotary layer equals attention under a band."""
    layer, x = make("softmax, grouped, rotary"), torch.randn(B, N, C, dtype=torch.float64)
    found, _ = read(layer, x, BoundedCache(CacheBound(3, "age")))
    band = torch.ones(N, N, dtype=torch.bool).tril().triu(-3)  # itself and the three held before it
    torch.testing.assert_close(found, layer(x, attn_mask=band), atol=1e-13, rtol=0)


def test_errors_of_the_three_rules():
    """Mean error of a step's output just after one eviction, of many steps: movement is least."""
    errors = dict.fromkeys(RULES, 0.0)
    for name, _ in itertools.product(("softmax", "mgk", "smgk"), range(6)):
        layer = make(name)
        x = 2.0 * torch.randn(B, N, C, dtype=torch.float64)
        with torch.no_grad():
            call = layer.call(x[:, -1:], x)
            weights, whole = layer.core.weights(call), layer.core(call)
            for rule in RULES:
                cache = BoundedCache(CacheBound(N - 1, rule))
                for part in (x[:, :-1], x[:, -1:]):
                    layer(part, is_causal=True, cache=cache)
                kept = torch.arange(N) != dropped(call, cache)[:, None]
                left = weights * kept[:, None, None]
                moved = left / left.sum(-1, keepdim=True) @ call.value - whole
                errors[rule] += float(moved.norm())
    assert errors["movement"] < 0.97 * errors["weight"] < 0.97 * errors["age"], errors


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (make("mgk, prior per position"), "with prior_share=head_position"),
        (make("smgk, rotary, shift before"), "with rotary_shift=before"),
        (make("linear"), "linear cannot decode from a bounded number of keys"),
        (FiSHAttention(8, 4, num_global_heads=2), "of keys with noise=global"),
    ],
)
def test_layers_that_need_all_keys_refuse(layer, reason):
    model = tiny("mgk")
    model.encoder.blocks[1].attention = layer
    with pytest.raises(NotImplementedError, match=f"{reason}.*: unset the bound"):
        bounded_caches(model.encoder, CacheBound(3))


@pytest.mark.parametrize("name", BOUNDED)
def test_layers_without_positions_do_not(name):
    assert bound_problem(make(name).core) is None


def test_bad_bounds():
    with pytest.raises(ValueError, match="max_keys must be at least 1, received 0"):
        CacheBound(0)
    with pytest.raises(ValueError, match="evict_by must be one of movement, weight, age"):
        CacheBound(3, "size")
