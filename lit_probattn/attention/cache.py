"""What decoding keeps of earlier tokens: explicit objects that the caller holds, one per layer.

Long caches are read in parts; partial outputs with their normalisers are merged exactly. A cache of
bounded length gives up a position when it is full: with weights α_t of the latest query and its
output o = Σ_t α_t v_t, removing the key at t and dividing the others by what is left moves it by

    o' − o = α_t / (1 − α_t) · (o − v_t)

so the position whose removal moves it least need not be the one with the smallest weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lit_probattn.attention.numerics import (
    check_choice,
    grouped_values,
    masked_softmax,
    repeat_heads,
)

# Cached positions that a decoding step reads at once: bounds the scores it stores.
DEFAULT_PART_LEN = 8192


class Cache(ABC):
    """Memory of one layer over the tokens seen so far; made by `layer.new_cache()`.

    Attributes:
        length: positions held, masked ones included.
        num_dropped: positions that were held and given up.
        store_offsets: whether the layer should pass key offsets to `append`.
    """

    length: int = 0
    num_dropped: int = 0
    store_offsets: bool = False

    @abstractmethod
    def append(
        self,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None = None,
        offset: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add tokens; return the keys, values and key mask that the new queries attend to."""

    @abstractmethod
    def read(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return what `append` does, without adding tokens."""

    @abstractmethod
    def reorder(self, rows: Tensor) -> None:
        """Take rows of the batch, (B',) int64, in place of its own; a row may come again."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of the tensors held (reserved space not counted)."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the storage, reserved space included."""
        return self.num_bytes


class KVCache(Cache):
    """Keys and values of one layer for the tokens seen so far.

    What is stored is what the layer projects: for shifted keys the key before its shifts, for a
    mixture every component; with rotary positions, rotated. Storage grows by doubling, so appending
    one token at a time costs O(1) per token on average. The cache holds no graph: it is for use
    without gradients.

    Bytes per token of one sequence, for element size s (offsets are float32, float64 if keys are):

        softmax   s H_kv (E + E_v)
        MGK       s H_kv (K E + E_v) + 4 H_prior K     with offsets, else without the last term
        sMGK      s H_kv (E + E_v)   + 4 H_prior K     with offsets, else without the last term

    Args:
        capacity: positions to reserve at the first use.
        store_offsets: also keep what a key adds to its scores, log π − ‖k‖² / (2σ²), so that a
            step does not compute the norms of all keys again.
        part_len: positions that a decoding step reads at once.

    Raises:
        ValueError: `part_len` is not positive.
    """

    def __init__(
        self, capacity: int = 0, *, store_offsets: bool = False, part_len: int = DEFAULT_PART_LEN
    ) -> None:
        if part_len < 1:
            raise ValueError(f"part_len must be at least 1, received {part_len}")
        self.capacity, self.store_offsets, self.part_len = capacity, store_offsets, part_len
        self.length = 0
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self._mask: Tensor | None = None
        self._offset: Tensor | None = None

    def append(
        self,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None = None,
        offset: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add tokens and return all keys, values and the key mask so far.

        Args:
            key: (B, …, n, E), the sequence in the second last dimension.
            value: (B, H_kv, n, E_v).
            key_mask: real tokens among the new ones, (B, n). None means all.
            offset: what each key adds to its scores, (B, …, n).

        Raises:
            ValueError: batch or head sizes differ from what the cache holds.
        """
        new = key.shape[-2]
        if self._mask is None and key_mask is not None:
            self._mask = torch.ones(
                key.shape[0], max(self.capacity, self.length), dtype=torch.bool, device=key.device
            )
        self._key = self._store(self._key, key.detach(), -2)
        self._value = self._store(self._value, value.detach(), -2)
        if offset is not None:
            self._offset = self._store(self._offset, offset.detach(), -1)
        if self._mask is not None:
            if key_mask is None:
                key_mask = torch.ones(key.shape[0], new, dtype=torch.bool, device=key.device)
            self._mask = self._store(self._mask, key_mask, -1)
        self.length += new
        return self.read()

    def read(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return all keys, values and the key mask so far.

        Raises:
            ValueError: the cache is empty.
        """
        key, value, _ = self.part(range(self.length))
        return key, value, None if self._mask is None else self._mask[:, : self.length]

    def reorder(self, rows: Tensor) -> None:
        """Take these rows of what is stored; reserved space stays."""
        self._key = self._taken(self._key, rows, -2)
        self._value = self._taken(self._value, rows, -2)
        self._mask = self._taken(self._mask, rows, -1)
        self._offset = self._taken(self._offset, rows, -1)

    def _taken(self, store: Tensor | None, rows: Tensor, dim: int) -> Tensor | None:
        if store is None:
            return None
        taken = store.new_empty(len(rows), *store.shape[1:])
        used = taken.narrow(dim, 0, self.length)
        used.copy_(store.narrow(dim, 0, self.length).index_select(0, rows))
        return taken

    def parts(self) -> list[range]:
        """Return the ranges of positions that a step reads one after the other."""
        starts = range(0, self.length, self.part_len)
        return [range(i, min(i + self.part_len, self.length)) for i in starts]

    def part(self, cols: range) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys, values and offsets of some positions.

        Raises:
            ValueError: the cache is empty.
        """
        if self._key is None or self._value is None:
            raise ValueError("the cache is empty: append tokens before reading it")
        offset = None if self._offset is None else self._offset[..., cols.start : cols.stop]
        span = slice(cols.start, cols.stop)
        return self._key[..., span, :], self._value[..., span, :], offset

    def _store(self, store: Tensor | None, new: Tensor, dim: int) -> Tensor:
        end = self.length + new.shape[dim]
        if store is None:
            shape = list(new.shape)
            shape[dim] = max(self.capacity, end)
            store = new.new_zeros(shape)
        self._check(store, new, dim)
        if store.shape[dim] < end:
            shape = list(new.shape)
            shape[dim] = max(end, 2 * store.shape[dim]) - store.shape[dim]
            store = torch.cat([store, store.new_zeros(shape)], dim)
        store.narrow(dim, self.length, new.shape[dim]).copy_(new)
        return store

    @staticmethod
    def _check(store: Tensor, new: Tensor, dim: int) -> None:
        held, given = list(store.shape), list(new.shape)
        held[dim] = given[dim] = -1
        if held != given:
            raise ValueError(
                f"cache holds tensors of shape {held} (-1: positions), received {given}: "
                "a cache belongs to one layer and one batch"
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors held (reserved space not counted)."""
        held = [None if x is None else x[..., : self.length, :] for x in (self._key, self._value)]
        held += [None if x is None else x[..., : self.length] for x in (self._mask, self._offset)]
        return tensor_bytes(*held)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the storage, reserved space included."""
        return tensor_bytes(self._key, self._value, self._mask, self._offset)


def tensor_bytes(*tensors: Tensor | None) -> int:
    """Return the bytes of those that exist."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def partial_attention(
    scores: Tensor, value: Tensor, allowed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attend to l of the keys; also return the logarithm of each row's sum of exponentials.

    Args:
        scores: (B, H, N, l).
        value: (B, H_kv, l, E_v).
        allowed: bool, broadcastable to `scores`. None means all.

    Returns:
        (B, H, N, E_v) and (B, H, N, 1); zeros and -inf in rows that see nothing.
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
    """Merge the results of `partial_attention`: exact for every softmax over all keys.

    L = logsumexp_s L_s,  o = Σ_s exp(L_s − L) o_s, for outputs o_s and logarithms L_s of the sums
    of exponentials; zeros and -inf for rows that see nothing in any part.
    """
    if len(outputs) == 1:
        return outputs[0], normalisers[0]
    stacked = torch.stack(list(normalisers))
    total = stacked.logsumexp(0)
    shift = total.masked_fill(total == float("-inf"), 0.0)
    factors = torch.exp(stacked - shift)
    return (factors * torch.stack(list(outputs))).sum(0), total


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


def _rows_of(tensor: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if tensor is None else tensor.index_select(0, rows)


class Memory:
    """Keys and values that cross-attention projects once; the queries of every step read them.

    Made by `layer.remember(key)`, read by `layer(query, memory=...)`.

    Args:
        cache: what the layer keeps of the keys and values.

    Attributes:
        num_read: queries that have read it: the position of the next one.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache, self.num_read = cache, 0

    def reorder(self, rows: Tensor) -> None:
        """Take rows of the batch in place of its own."""
        self.cache.reorder(rows)


class LinearState(Cache):
    """Sums Σ_j f_j [v_j, 1]ᵀ of one layer over the tokens seen so far.

    It holds H_kv · F · (E_v + 1) numbers per sequence in at least float32 (H_kv · F · E_v without
    a sum in the denominator), whatever the length and the number of components; random features
    add the logarithm of their common factor, H_kv numbers. No graph is kept.
    """

    def __init__(self) -> None:
        self.length = 0
        self.sums: Tensor | None = None
        self.log_scale: Tensor | None = None
        # Keys and values of no position, for calls that add none.
        self._nothing: tuple[Tensor, Tensor] | None = None

    def append(
        self,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None = None,
        offset: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Count the tokens and return them: earlier ones are in the sums.

        Raises:
            ValueError: the batch differs from the state's.
        """
        if self.sums is not None and self.sums.shape[0] != key.shape[0]:
            raise ValueError(
                f"state holds a batch of {self.sums.shape[0]}, received {key.shape[0]}: "
                "a state belongs to one layer and one batch"
            )
        self.length += value.shape[-2]
        none = (x.new_empty(*x.shape[:-2], 0, x.shape[-1]) for x in (key, value))
        self._nothing = next(none), next(none)
        return key, value, key_mask

    def read(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys and values of no position: all are in the sums.

        Raises:
            ValueError: the state is empty.
        """
        if self._nothing is None:
            raise ValueError("the state is empty: append tokens before reading it")
        return *self._nothing, None

    def reorder(self, rows: Tensor) -> None:
        """Take these rows of the sums."""
        self.sums, self.log_scale = (_rows_of(x, rows) for x in (self.sums, self.log_scale))
        if self._nothing is not None:
            key, value = self._nothing
            self._nothing = key.index_select(0, rows), value.index_select(0, rows)

    def common_scale(self, log_scale: Tensor | None) -> Tensor | None:
        """Return the factor that old and new features are divided by, bringing the sums to it.

        Args:
            log_scale: logarithm of the factor that suits the new keys, (B, H_kv, 1, 1).
        """
        if log_scale is None or self.log_scale is None or self.sums is None:
            return log_scale
        common = torch.maximum(self.log_scale, log_scale)
        self.sums = self.sums * torch.exp(self.log_scale - common)
        return common

    def replace(self, sums: Tensor, log_scale: Tensor | None) -> None:
        """Keep the sums over all tokens so far, and the factor that they were divided by."""
        self.sums = sums.detach()
        self.log_scale = None if log_scale is None else log_scale.detach()

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return tensor_bytes(self.sums, self.log_scale)
