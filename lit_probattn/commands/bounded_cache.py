"""Caches of bounded length, for `generate --max_keys`.

A full cache evicts a position. With weights α_t of the latest query and its output
o = Σ_t α_t v_t, removing the key at t and renormalising the others changes the output by

    o' − o = α_t / (1 − α_t) · (o − v_t)

so the position whose removal changes it least need not be the one with the smallest weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lit_probattn.attention.cache import Cache, KVCache
from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.core import Core
from lit_probattn.attention.engines.cached import part_scores
from lit_probattn.attention.masks import Masks
from lit_probattn.attention.numerics import grouped_values, masked_softmax, repeat_heads
from lit_probattn.attention.variant import Variant, first_lack
from lit_probattn.base.arguments import check_argument
from lit_probattn.models.transformer import Transformer

# Requirements of a variant (`Variant.needs`) that depend on evicted keys or their positions.
_REASON = "cannot decode from a bounded number of keys"
_LACKS = dict.fromkeys(("positions", "map noise", "head noise", "normaliser"), _REASON + " with {}")

EvictBy = Literal["movement", "weight", "age"]


@dataclass(frozen=True)
class CacheBound:
    """Maximum length of a cache, and its eviction rule.

    Args:
        max_keys: number of positions kept per layer.
        evict_by: `movement`: the position whose removal changes the latest query's output least;
            `weight`: the one with the smallest weight; `age`: the oldest.

    Raises:
        ValueError: a value is invalid.
    """

    max_keys: int
    evict_by: EvictBy = "movement"

    def __post_init__(self) -> None:
        if self.max_keys < 1:
            raise ValueError(f"max_keys must be at least 1, received {self.max_keys}")
        check_argument("evict_by", self.evict_by, EvictBy)


class BoundedCache(KVCache):
    """Keys and values of at most `max_keys` positions, after every call.

    Eviction is per sequence and shared by all heads of a layer. During a call the cache also
    contains that call's tokens, so a prompt is attended to in full.

    Args:
        bound: maximum length and eviction rule.

    Attributes:
        num_dropped: number of evicted positions.
    """

    def __init__(self, bound: CacheBound) -> None:
        super().__init__(bound.max_keys + 1)
        self.bound, self.num_dropped = bound, 0

    @property
    def next_position(self) -> int:
        """Position of the next token, counting evicted ones."""
        return self.length + self.num_dropped

    @torch.no_grad()
    def after_call(self, call: HeadCall, variant: Variant) -> None:
        """Evict the positions beyond the bound, based on the latest query of a call."""
        if self.length <= self.bound.max_keys:
            return
        masks, cols = call.masks, range(self.length)
        rows = range(masks.num_queries - 1, masks.num_queries)
        latest = Masks(1, self.length, bias=masks.bias_block(rows, cols))
        scores = part_scores(
            replace(call, query=call.query[:, :, -1:], masks=latest), variant, cols
        )
        allowed, value = masks.allowed(rows, cols, scores.device), call.value.to(scores.dtype)
        self.keep(kept_places(scores, value, allowed, self.bound, variant.row_eps))

    def keep(self, places: Tensor) -> None:
        """Keep these positions, (B, n) int64 in ascending order, and evict the others."""
        self.num_dropped += self.length - places.shape[1]
        self._key = _gathered(self._key, places, -2)
        self._value = _gathered(self._value, places, -2)
        self._mask = _gathered(self._mask, places, -1)
        self._terms = _gathered(self._terms, places, -1)
        self.length = places.shape[1]
        self.num_terms = 0 if self._terms is None else self.length


def bounded_caches(model: Transformer, bound: CacheBound) -> list[Cache]:
    """Return an empty cache of bounded length for every layer of a model.

    Raises:
        NotImplementedError: a layer does not support eviction; the message gives the reason.
    """
    for block in model.layers:
        reason = bound_problem(block.attention.core)
        if reason is not None:
            raise NotImplementedError(f"{block.attention.core.name} {reason}: unset the bound")
    return [BoundedCache(bound) for _ in model.layers]


def bound_problem(core: Core) -> str | None:
    """Return the reason why a core does not support eviction ("cannot …"), or None.

    It is supported if scores have a normal form in which no key depends on its position.
    """
    if core.makes.lower is Variant.lower:
        return _REASON
    return first_lack(core.needs(), _LACKS)


def _gathered(store: Tensor | None, places: Tensor, dim: int) -> Tensor | None:
    """Gather positions of every sequence; reserved space beyond them is released."""
    if store is None:
        return None
    dim %= store.dim()
    shape = [1] * store.dim()
    shape[0], shape[dim] = places.shape
    wanted = list(store.shape)
    wanted[dim] = places.shape[1]
    return store.gather(dim, places.view(shape).expand(wanted))


def output_movements(weights: Tensor, value: Tensor) -> Tensor:
    """Return ‖o' − o‖ for the removal of each key, (B, H, N, L).

    Args:
        weights: α, (B, H, N, L), with sum at most 1.
        value: (B, H_kv, L, E_v).
    """
    value = value.to(weights.dtype)
    out = grouped_values(weights, value)
    value = repeat_heads(value, weights.shape[1])
    distance = (out[..., :, None, :] - value[..., None, :, :]).norm(dim=-1)
    left = 1.0 - weights
    moved = weights / left.masked_fill(left <= 0, 1.0) * distance
    return moved.masked_fill(left <= 0, float("inf"))


def kept_places(
    scores: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    bound: CacheBound,
    row_eps: float = 0.0,
) -> Tensor:
    """Return the positions to keep after a query, (B, max_keys), ascending.

    Scores are summed over heads: squared movements, since head outputs are concatenated, or
    weights.

    Args:
        scores: scores of the latest query, (B, H, 1, L).
        value: (B, H_kv, L, E_v).
        allowed: bool, broadcastable to `scores`; masked positions are evicted first.
        bound: maximum length and eviction rule.
        row_eps: added to each row's sum of exponentials.
    """
    weights = masked_softmax(scores, allowed, row_eps)
    if bound.evict_by == "age":
        length = scores.shape[-1]
        worth = torch.arange(length, device=scores.device).expand(scores.shape[0], length)
    elif bound.evict_by == "weight":
        worth = weights.sum((1, 2))
    else:
        worth = output_movements(weights, value).square().sum((1, 2))
    if allowed is not None:
        seen = allowed.expand(scores.shape).any(1)[:, 0]
        worth = worth.to(weights.dtype).masked_fill(~seen, -1.0)
    best = torch.argsort(worth, dim=-1, descending=True, stable=True)[:, : bound.max_keys]
    return best.sort(-1).values
