"""Decoding caches: explicit objects, one per layer, that the caller holds.

`engines/cached.py` attends to cached keys and values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

# Cached positions that a decoding step reads at once, which bounds its scores in memory.
DEFAULT_PART_LEN = 8192


class Cache(ABC):
    """Decoding cache of one layer, from `layer.new_cache()`.

    Attributes:
        length: positions in the cache, including masked ones.
    """

    length: int = 0

    @property
    def next_position(self) -> int:
        """Position of the next token, counted over all appended tokens."""
        return self.length

    @abstractmethod
    def append(
        self, key: Tensor, value: Tensor, key_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add tokens; return the keys, values and key mask to which the new queries attend."""

    def after_call(self, call: Any, variant: Any) -> None:  # noqa: B027
        """Update the cache after a `HeadCall` has read it; most caches do nothing."""

    def attributes(self) -> dict[str, Any]:
        """Return the present attributes, for `restore`, without copies of tensors."""
        return dict(vars(self))

    def restore(self, attributes: dict[str, Any]) -> None:
        """Set the attributes from before a call that failed.

        Calls may write into tensors of the cache only at positions after the first `length`.
        """
        vars(self).clear()
        vars(self).update(attributes)

    @abstractmethod
    def read(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the same as `append`, without adding tokens."""

    @abstractmethod
    def reorder(self, rows: Tensor) -> None:
        """Replace the batch by these rows, (B',) int64, which may repeat."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of the tensors, without reserved space."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the storage, including reserved space."""
        return self.num_bytes


class KVCache(Cache):
    """Cached keys and values of one layer.

    The cache stores projections: keys before their shifts for shifted keys, all components of a
    mixture, and rotated keys with rotary positions. Storage grows by doubling, so appending one
    token costs O(1) on average. The cache stores no graph: it is for use without gradients.

    Terms are the summand β of a key in the variant's normal form, for MGK log π − ‖k‖² / (2σ²).
    They are stored so that a step does not recompute the norms of all keys. Bytes per token of one
    sequence, for element size s (terms are float32, or float64 if the keys are):

        softmax   s H_kv (E + E_v)
        MGK       s H_kv (K E + E_v) + 4 H_prior K
        sMGK      s H_kv (E + E_v)   + 4 H_prior K

    Args:
        capacity: positions to reserve on first use.
        part_len: positions that a decoding step reads at once.

    Attributes:
        num_terms: number of leading positions whose terms are stored.

    Raises:
        ValueError: `part_len` is not positive.
    """

    def __init__(self, capacity: int = 0, *, part_len: int = DEFAULT_PART_LEN) -> None:
        if part_len < 1:
            raise ValueError(f"part_len must be at least 1, received {part_len}")
        self.capacity, self.part_len = capacity, part_len
        self.length = self.num_terms = 0
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self._mask: Tensor | None = None
        self._terms: Tensor | None = None

    def append(
        self, key: Tensor, value: Tensor, key_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add tokens and return all keys, values and the key mask so far.

        Args:
            key: (B, …, n, E), with the sequence in the second last dimension.
            value: (B, H_kv, n, E_v).
            key_mask: real tokens among the new ones, (B, n). None means all.

        Raises:
            ValueError: batch or head sizes differ from the cached tensors.
        """
        new = key.shape[-2]
        if self._mask is None and key_mask is not None:
            self._mask = torch.ones(
                key.shape[0], max(self.capacity, self.length), dtype=torch.bool, device=key.device
            )
        self._key = self._store(self._key, key.detach(), -2, self.length)
        self._value = self._store(self._value, value.detach(), -2, self.length)
        if self._mask is not None:
            if key_mask is None:
                key_mask = torch.ones(key.shape[0], new, dtype=torch.bool, device=key.device)
            self._mask = self._store(self._mask, key_mask, -1, self.length)
        self.length += new
        return self.read()

    def append_terms(self, terms: Tensor) -> None:
        """Store the terms (B, …, n) of the first keys without terms."""
        self._terms = self._store(self._terms, terms.detach(), -1, self.num_terms)
        self.num_terms += terms.shape[-1]

    def truncate(self, length: int) -> None:
        """Keep the first `length` positions, so that the next tokens replace the rest.

        Raises:
            ValueError: the cache is shorter.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"length must be in [0, {self.length}], received {length}")
        self.length, self.num_terms = length, min(self.num_terms, length)

    def read(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return all keys, values and the key mask so far.

        Raises:
            ValueError: the cache is empty.
        """
        key, value, _ = self.part(range(self.length))
        return key, value, None if self._mask is None else self._mask[:, : self.length]

    def reorder(self, rows: Tensor) -> None:
        """Select rows of the stored tensors; reserved space is kept."""
        self._key = _taken(self._key, rows, -2, self.length)
        self._value = _taken(self._value, rows, -2, self.length)
        self._mask = _taken(self._mask, rows, -1, self.length)
        self._terms = _taken(self._terms, rows, -1, self.num_terms)

    def parts(self) -> list[range]:
        """Return the ranges of positions that a step reads one after another."""
        starts = range(0, self.length, self.part_len)
        return [range(i, min(i + self.part_len, self.length)) for i in starts]

    def part(self, cols: range) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys, values and terms of a range; terms are None if one of them is missing.

        Raises:
            ValueError: the cache is empty.
        """
        if self._key is None or self._value is None:
            raise ValueError("the cache is empty: append tokens before reading it")
        span = slice(cols.start, cols.stop)
        terms = self._terms if cols.stop <= self.num_terms else None
        terms = None if terms is None else terms[..., span]
        return self._key[..., span, :], self._value[..., span, :], terms

    def _store(self, store: Tensor | None, new: Tensor, dim: int, start: int) -> Tensor:
        end = start + new.shape[dim]
        if store is None:
            shape = list(new.shape)
            shape[dim] = max(self.capacity, end)
            store = new.new_zeros(shape)
        self._check(store, new, dim)
        if store.shape[dim] < end:
            shape = list(new.shape)
            shape[dim] = max(end, 2 * store.shape[dim]) - store.shape[dim]
            store = torch.cat([store, store.new_zeros(shape)], dim)
        store.narrow(dim, start, new.shape[dim]).copy_(new)
        return store

    @staticmethod
    def _check(store: Tensor, new: Tensor, dim: int) -> None:
        held, given = list(store.shape), list(new.shape)
        held[dim] = given[dim] = -1
        if held != given:
            raise ValueError(
                f"cache contains tensors of shape {held} (-1: positions), received {given}: "
                "a cache belongs to one layer and one batch"
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors, without reserved space."""
        held = [None if x is None else x[..., : self.length, :] for x in (self._key, self._value)]
        held += [None if self._mask is None else self._mask[:, : self.length]]
        held += [None if self._terms is None else self._terms[..., : self.num_terms]]
        return tensor_bytes(*held)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the storage, including reserved space."""
        return tensor_bytes(self._key, self._value, self._mask, self._terms)


def tensor_bytes(*tensors: Tensor | None) -> int:
    """Return the total bytes of tensors that are not None."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def _taken(store: Tensor | None, rows: Tensor, dim: int, length: int) -> Tensor | None:
    """Select rows of the first `length` positions; reserved space is kept."""
    if store is None:
        return None
    taken = store.new_empty(len(rows), *store.shape[1:])
    used = taken.narrow(dim, 0, length)
    used.copy_(store.narrow(dim, 0, length).index_select(0, rows))
    return taken


def _rows_of(tensor: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if tensor is None else tensor.index_select(0, rows)


class Memory:
    """Encoder memory: keys and values that cross-attention projects once and every step reads.

    `layer.remember(key)` returns one, and `layer(query, memory=...)` reads it.

    Args:
        cache: the projected keys and values.

    Attributes:
        num_read: number of queries that have read it, which is the position of the next one.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache, self.num_read = cache, 0

    def reorder(self, rows: Tensor) -> None:
        """Select rows of the batch."""
        self.cache.reorder(rows)


class LinearState(Cache):
    """Sums Σ_j f_j [v_j, 1]ᵀ of one layer over all tokens so far.

    Per sequence it stores H_kv · F · (E_v + 1) numbers in at least float32 (H_kv · F · E_v without
    a sum in the denominator), independent of length and number of components; random features add
    the logarithm of their common factor, H_kv numbers. It stores no graph.
    """

    def __init__(self) -> None:
        self.length = 0
        self.sums: Tensor | None = None
        self.log_scale: Tensor | None = None
        # Keys and values with zero positions, for calls that add none.
        self._nothing: tuple[Tensor, Tensor] | None = None

    def append(
        self, key: Tensor, value: Tensor, key_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Count the tokens and return them; earlier tokens are in the sums.

        Raises:
            ValueError: the batch differs from the state's.
        """
        if self.sums is not None and self.sums.shape[0] != key.shape[0]:
            raise ValueError(
                f"state contains a batch of {self.sums.shape[0]}, received {key.shape[0]}: "
                "a state belongs to one layer and one batch"
            )
        self.length += value.shape[-2]
        none = (x.new_empty(*x.shape[:-2], 0, x.shape[-1]) for x in (key, value))
        self._nothing = next(none), next(none)
        return key, value, key_mask

    def read(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys and values with zero positions: all are in the sums.

        Raises:
            ValueError: the state is empty.
        """
        if self._nothing is None:
            raise ValueError("the state is empty: append tokens before reading it")
        return *self._nothing, None

    def reorder(self, rows: Tensor) -> None:
        """Select rows of the sums."""
        self.sums, self.log_scale = (_rows_of(x, rows) for x in (self.sums, self.log_scale))
        if self._nothing is not None:
            key, value = self._nothing
            self._nothing = key.index_select(0, rows), value.index_select(0, rows)

    def common_scale(self, log_scale: Tensor | None) -> Tensor | None:
        """Return the common divisor of old and new features, and rescale the sums to it.

        Args:
            log_scale: logarithm of the divisor for the new keys, (B, H_kv, 1, 1); −inf for none.
        """
        if log_scale is None or self.log_scale is None or self.sums is None:
            return log_scale
        common = torch.maximum(self.log_scale, log_scale)
        change = (self.log_scale - common).masked_fill(common == float("-inf"), 0.0)  # no keys yet
        self.sums = self.sums * torch.exp(change)
        return common

    def replace(self, sums: Tensor, log_scale: Tensor | None) -> None:
        """Store the sums over all tokens so far, and their divisor."""
        self.sums = sums.detach()
        self.log_scale = None if log_scale is None else log_scale.detach()

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return tensor_bytes(self.sums, self.log_scale)
