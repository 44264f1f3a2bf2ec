"""A cache of bounded length for decoding: which position it gives up when it is full.

With weights α_t of the latest query and its output o = Σ_t α_t v_t, removing the key at t and
dividing the others by what is left moves the output by

    o' − o = α_t / (1 − α_t) · (o − v_t)

so the position whose removal moves it least need not be the one with the smallest weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lit_probattn.attention.cache import KVCache
from lit_probattn.attention.functional import (
    check_choice,
    grouped_values,
    masked_softmax,
    repeat_heads,
)

EvictBy = Literal["movement", "weight", "age"]


@dataclass(frozen=True)
class CacheBound:
    """How long a cache may grow, and what it gives up.

    Args:
        max_keys: positions that each layer keeps.
        evict_by: `movement`: the position whose removal moves the latest query's output least;
            `weight`: the one with the smallest weight; `age`: the oldest.

    Raises:
        ValueError: a number or a name is not one of these.
    """

    max_keys: int
    evict_by: EvictBy = "movement"

    def __post_init__(self) -> None:
        if self.max_keys < 1:
            raise ValueError(f"max_keys must be at least 1, received {self.max_keys}")
        check_choice("evict_by", self.evict_by, ("movement", "weight", "age"))


class BoundedCache(KVCache):
    """Keys and values of at most `max_keys` positions, after every call.

    A position is given up for all heads of the layer at once, of each sequence its own. While a
    call runs the cache also holds that call's tokens, so a prompt is read whole.

    Args:
        bound: how many positions, and which go.
        capacity: positions to reserve at the first use.
    """

    def __init__(self, bound: CacheBound, capacity: int = 0) -> None:
        super().__init__(min(capacity, bound.max_keys + 1), store_offsets=True)
        self.bound = bound

    @property
    def num_surplus(self) -> int:
        """Positions beyond the bound."""
        return max(0, self.length - self.bound.max_keys)

    def keep(self, places: Tensor) -> None:
        """Keep these places, (B, n) int64 in ascending order, and drop the others."""
        self.num_dropped += self.length - places.shape[1]
        self._key = _gathered(self._key, places, -2)
        self._value = _gathered(self._value, places, -2)
        self._mask = _gathered(self._mask, places, -1)
        self._offset = _gathered(self._offset, places, -1)
        self.length = places.shape[1]


def _gathered(store: Tensor | None, places: Tensor, dim: int) -> Tensor | None:
    """Take places of every sequence, in place; what is reserved beyond them is given back."""
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
        weights: α, (B, H, N, L), of sum 1 or less.
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

    Heads add up: squared movements, as the outputs of heads lie side by side, or weights.

    Args:
        scores: of the latest query, (B, H, 1, L).
        value: (B, H_kv, L, E_v).
        allowed: bool, broadcastable to `scores`; hidden positions go first.
        bound: how many, and by what.
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
