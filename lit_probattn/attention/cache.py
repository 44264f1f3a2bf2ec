"""The key/value cache of incremental decoding: an explicit object that the caller holds."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values of one layer for the tokens seen so far.

    What is stored is what the layer projects: for shifted keys the key before its shifts, for a
    mixture every component. Storage grows by doubling, so appending one token at a time costs
    O(1) per token on average. The cache holds no graph: it is for use without gradients.

    Args:
        capacity: positions to reserve at the first use, to avoid growing.
    """

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self.length = 0
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self._mask: Tensor | None = None

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
        self._key = self._store(self._key, key.detach(), -2)
        self._value = self._store(self._value, value.detach(), -2)
        if self._mask is not None:
            if key_mask is None:
                key_mask = torch.ones(key.shape[0], new, dtype=torch.bool, device=key.device)
            self._mask = self._store(self._mask, key_mask, -1)
        self.length += new
        mask = None if self._mask is None else self._mask[:, : self.length]
        return (
            self._key[..., : self.length, :],
            self._value[..., : self.length, :],
            mask,
        )

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
        """Bytes of the tokens held (reserved space not counted)."""
        total = 0
        for store, dim in ((self._key, -2), (self._value, -2), (self._mask, -1)):
            if store is not None:
                used = store.numel() // store.shape[dim] * self.length
                total += used * store.element_size()
        return total

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the storage, reserved space included."""
        stores = (self._key, self._value, self._mask)
        return sum(s.numel() * s.element_size() for s in stores if s is not None)
