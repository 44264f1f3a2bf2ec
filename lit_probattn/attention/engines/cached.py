"""Decoding: a few new queries attend to a cache part by part, by the normal form of each part.

Outputs of parts are merged exactly. The terms β of cached keys are stored in the cache when they
are first read, so that a step computes only the terms of new tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from lit_probattn.attention.cache import KVCache
from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.masks import Block
from lit_probattn.attention.numerics import biased, compute_dtype, grouped_values, masked_softmax
from lit_probattn.attention.variant import Variant

# Calls with at most this many queries read a cache part by part.
STEP_QUERIES = 16


def reads_parts(call: HeadCall, variant: Variant) -> bool:
    """Whether a call is short and parts of its cache can be read one by one and merged."""
    return (
        isinstance(call.cache, KVCache)
        and call.cache.length > 0
        and call.query.shape[2] <= STEP_QUERIES
        and call.scale is None  # stored terms are for 1/√E
        and call.dropout is None
        and type(variant).lower is not Variant.lower
        and "normaliser" not in variant.needs()
    )


def by_parts(call: HeadCall, variant: Variant) -> Tensor:
    """Attend to all cached keys, including the new tokens; (B, H, N, E_v), at least float32."""
    assert isinstance(call.cache, KVCache)
    dtype, masks, cache = compute_dtype(call.query), call.masks, call.cache
    outputs, normalisers, parts = [], [], cache.parts()
    for cols in parts:
        scores = part_scores(call, variant, cols)
        value = cache.part(cols)[1].to(dtype)
        allowed = masks.allowed(masks.all_rows, cols, scores.device)
        if len(parts) == 1 and not variant.row_eps:  # nothing to merge
            plain = allowed is None and masks.bias is None
            weights = scores.softmax(-1) if plain else masked_softmax(scores, allowed)
            return grouped_values(weights, value)
        output, normaliser = partial_attention(scores, value, allowed)
        outputs.append(output)
        normalisers.append(normaliser)
    if variant.row_eps:
        outputs.append(torch.zeros_like(outputs[0]))
        normalisers.append(torch.full_like(normalisers[0], math.log(variant.row_eps)))
    return merge_partials(outputs, normalisers)[0]


def part_scores(call: HeadCall, variant: Variant, cols: range) -> Tensor:
    """Return scores plus bias of all queries and a part of the cache, (B, H, N, len(cols)).

    They equal the scores of the equation up to a constant per row that all parts share. Missing
    terms of keys are stored; parts must be read in order.

    Args:
        call: a call with the keys and values of its cache.
        variant: a variant with a normal form.
        cols: positions of the part.
    """
    cache, rows = call.cache, call.masks.all_rows
    assert isinstance(cache, KVCache)
    key, value, _ = cache.part(cols)
    known = max(0, min(cache.num_terms, cols.stop) - cols.start)
    query, key = (x.to(compute_dtype(call.query)) for x in (call.query, key))
    part = replace(call, query=query, key=key, value=value, first_key=cols.start, num_terms=known)
    scores = variant.lower(part)
    if scores.col is not None:
        if known < len(cols):  # a variant may return the terms of all keys
            cache.append_terms(scores.col[..., known - len(cols) :])
        scores = replace(scores, col=cache.part(cols)[2])
    heads = max(call.query.shape[1], call.value.shape[1])
    reduced = scores.reduced(Block(rows, cols)).expand(-1, heads, -1, -1)
    return biased(reduced, call.masks, rows, cols)


def partial_attention(
    scores: Tensor, value: Tensor, allowed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attend to l of the keys; also return the log of each row's sum of exponentials.

    Args:
        scores: (B, H, N, l).
        value: (B, H_kv, l, E_v).
        allowed: bool, broadcastable to `scores`. None means all.

    Returns:
        (B, H, N, E_v) and (B, H, N, 1); zeros and -inf in fully masked rows.
    """
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    largest = scores.amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == float("-inf"), 0.0)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True)
    weights = weights / total.masked_fill(total == 0, 1.0)
    return grouped_values(weights, value), largest + total.log()


def merge_partials(
    outputs: Sequence[Tensor], normalisers: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Merge the results of `partial_attention`; exact for every softmax over all keys.

    L = logsumexp_s L_s,  o = Σ_s exp(L_s − L) o_s, for outputs o_s and logarithms L_s of the sums
    of exponentials; zeros and -inf for rows that are fully masked in all parts.
    """
    if len(outputs) == 1:
        return outputs[0], normalisers[0]
    stacked = torch.stack(list(normalisers))
    total = stacked.logsumexp(0)
    shift = total.masked_fill(total == float("-inf"), 0.0)
    factors = torch.exp(stacked - shift)
    return (factors * torch.stack(list(outputs))).sum(0), total
