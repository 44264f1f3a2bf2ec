"""Reading a long cache in parts: partial outputs with their normalisers, and how they merge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lit_probattn.attention.cache import KVCache
from lit_probattn.attention.functional import compute_dtype
from lit_probattn.attention.masks import Masks

if TYPE_CHECKING:
    from lit_probattn.attention.layer import Attention


def partial_attention(
    scores: Tensor, value: Tensor, allowed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Softmax attention over a part of the keys, with what is needed to merge it.

    Args:
        scores: (B, H, N, l).
        value: (B, H_kv, l, E_v).
        allowed: bool, broadcastable to `scores`. None means all.

    Returns:
        Output (B, H, N, E_v), zeros in rows that see nothing, and the logarithm of each row's sum
        of exponentials (B, H, N, 1), -inf in those rows.
    """
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    largest = scores.amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == float("-inf"), 0.0)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True)
    weights = weights / total.masked_fill(total == 0, 1.0)
    batch, heads, rows, keys = weights.shape
    grouped = weights.reshape(batch, value.shape[1], heads // value.shape[1] * rows, keys)
    return (grouped @ value).view(batch, heads, rows, -1), largest + total.log()


def merge_partials(
    outputs: Sequence[Tensor], normalisers: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Merge attention over parts of the keys: exact for every softmax over all keys.

    Source: L = logsumexp_s L_s,  o = Σ_s exp(L_s − L) o_s, for outputs o_s and logarithms L_s of
    the sums of exponentials.

    Args:
        outputs: one (B, H, N, E_v) per part.
        normalisers: one (B, H, N, 1) per part; -inf where a part shows nothing to a row.

    Returns:
        Merged output and normaliser; zeros and -inf for rows that see nothing in any part.
    """
    if len(outputs) == 1:
        return outputs[0], normalisers[0]
    stacked = torch.stack(list(normalisers))
    total = stacked.logsumexp(0)
    shift = total.masked_fill(total == float("-inf"), 0.0)
    factors = torch.exp(stacked - shift)
    return (factors * torch.stack(list(outputs))).sum(0), total


def attend_to_cache(layer: Attention, query: Tensor, cache: KVCache, masks: Masks) -> Tensor:
    """Attend from a few new queries to everything cached, part by part.

    Args:
        layer: gives the scores of a part through `cached_scores`.
        query: (B, H, N, E).
        cache: what was appended, the new tokens included.
        masks: over all cached positions.

    Returns:
        (B, H, N, E_v), in at least float32.
    """
    dtype = compute_dtype(query)
    query, rows = query.to(dtype), masks.all_rows
    outputs, normalisers = [], []
    for cols in cache.parts():
        key, value, offset = cache.part(cols)
        scores = layer.cached_scores(query, key.to(dtype), offset, cols, cache.length)
        bias = masks.bias_block(rows, cols)
        if bias is not None:
            scores = scores + bias
        allowed = masks.allowed(rows, cols, query.device)
        output, normaliser = partial_attention(scores, value.to(dtype), allowed)
        outputs.append(output)
        normalisers.append(normaliser)
    if layer.row_eps:
        outputs.append(torch.zeros_like(outputs[0]))
        normalisers.append(torch.full_like(normalisers[0], math.log(layer.row_eps)))
    return merge_partials(outputs, normalisers)[0]
