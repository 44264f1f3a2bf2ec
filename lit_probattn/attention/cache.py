"""What decoding keeps of earlier tokens: explicit objects that the caller holds, one per layer.

`engines/cached.py` attends to those of keys and values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

# Cached positions that a decoding step reads at once: bounds the scores it stores.
DEFAULT_PART_LEN = 8192


class Cache(ABC):
    """Memory of one layer over the tokens seen so far; made by `layer.new_cache()`.

    Attributes:
        length: positions held, masked ones included.
    """

    length: int = 0

    @property
    def next_position(self) -> int:
        """Position of the next token among all that were appended."""
        return self.length

    @abstractmethod
    def append(
        self, key: Tensor, value: Tensor, key_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Add tokens; return the keys, values and key mask that the new queries attend to."""

    def after_call(self, call: Any, variant: Any) -> None:  # noqa: B027
        """Change what is held once a `HeadCall` has read it; most caches keep everything."""

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

    Terms are what a key adds to its scores in the variant's normal form, β: of MGK
    log π − ‖k‖² / (2σ²). They are stored so that a step does not compute the norms of all keys
    again. Bytes per token of one sequence, for element size s (terms are float32, float64 if keys
    are):

        softmax   s H_kv (E + E_v)
        MGK       s H_kv (K E + E_v) + 4 H_prior K
        sMGK      s H_kv (E + E_v)   + 4 H_prior K

    Args:
        capacity: positions to reserve at the first use.
        part_len: positions that a decoding step reads at once.

    Attributes:
        num_terms: positions, from the first on, whose terms are stored.

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
            key: (B, …, n, E), the sequence in the second last dimension.
            value: (B, H_kv, n, E_v).
            key_mask: real tokens among the new ones, (B, n). None means all.

        Raises:
            ValueError: batch or head sizes differ from what the cache holds.
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
        """Store the terms of the first keys that have none yet, (B, …, n)."""
        self._terms = self._store(self._terms, terms.detach(), -1, self.num_terms)
        self.num_terms += terms.shape[-1]

    def truncate(self, length: int) -> None:
        """Keep the first `length` positions, so that others can be appended in place of the rest.

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
        """Take these rows of what is stored; reserved space stays."""
        self._key = _taken(self._key, rows, -2, self.length)
        self._value = _taken(self._value, rows, -2, self.length)
        self._mask = _taken(self._mask, rows, -1, self.length)
        self._terms = _taken(self._terms, rows, -1, self.num_terms)

    def parts(self) -> list[range]:
        """Return the ranges of positions that a step reads one after the other."""
        starts = range(0, self.length, self.part_len)
        return [range(i, min(i + self.part_len, self.length)) for i in starts]

    def part(self, cols: range) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return keys, values and terms of some positions; no terms where one of them has none.

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
                f"cache holds tensors of shape {held} (-1: positions), received {given}: "
                "a cache belongs to one layer and one batch"
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors held (reserved space not counted)."""
        held = [None if x is None else x[..., : self.length, :] for x in (self._key, self._value)]
        held += [None if self._mask is None else self._mask[:, : self.length]]
        held += [None if self._terms is None else self._terms[..., : self.num_terms]]
        return tensor_bytes(*held)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the storage, reserved space included."""
        return tensor_bytes(self._key, self._value, self._mask, self._terms)


def tensor_bytes(*tensors: Tensor | None) -> int:
    """Return the bytes of those that exist."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def _taken(store: Tensor | None, rows: Tensor, dim: int, length: int) -> Tensor | None:
    """Take rows of the first `length` positions; reserved space stays."""
    if store is None:
        return None
    taken = store.new_empty(len(rows), *store.shape[1:])
    used = taken.narrow(dim, 0, length)
    used.copy_(store.narrow(dim, 0, length).index_select(0, rows))
    return taken


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
        self, key: Tensor, value: Tensor, key_mask: Tensor | None = None
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
