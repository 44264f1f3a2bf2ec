"""Attention within hash buckets: queries score only the keys that were sorted close to them.

Source: value-aware attention (Gupta and Berant, 2021), appendix A.1, after Kitaev et al., 2020.
Departs from the source: hidden keys are left out, and a query that sees none uses itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Duplicates = Literal["count", "union"]


@dataclass(frozen=True)
class Round:
    """One round's sorting: positions by (hash, position), and everyone's chunk."""

    query_order: Tensor  # (G, C, B), positions chunk by chunk
    key_order: Tensor
    query_chunk: Tensor  # (G, N), the chunk of each position
    key_chunk: Tensor


def hash_round(query: Tensor, key: Tensor, directions: Tensor, chunk_len: int) -> Round:
    """Hash queries and keys (G, N, E) by argmax [−R x; R x], sort them, cut them into chunks.

    `directions` are R, (half the buckets, E) standard normals; `chunk_len` is B and divides N.
    """

    def sort(x: Tensor) -> tuple[Tensor, Tensor]:
        projected = x @ directions.to(x).mT
        bucket = torch.cat([-projected, projected], -1).argmax(-1)  # (G, N)
        order = torch.sort(bucket, dim=-1, stable=True).indices
        places = torch.arange(order.shape[-1], device=x.device).expand_as(order)
        chunk = torch.empty_like(order).scatter(-1, order, places // chunk_len)
        return order.unflatten(-1, (-1, chunk_len)), chunk

    query_order, query_chunk = sort(query)
    key_order, key_chunk = sort(key)
    return Round(query_order, key_order, query_chunk, key_chunk)


def lsh_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    num_kept: int,
    num_rounds: int,
    generator: torch.Generator,
    allowed: Tensor | None = None,
    duplicates: Duplicates = "count",
    wrap: bool = True,
) -> Tensor:
    """Return attention over hash buckets, (G, N, E_v).

    Each query scores the keys of its own chunk and the one before, r = 2 B of them, in every round;
    sums of exp(q · k / √E) run over all rounds and are divided by each other at the end. Nothing of
    size N × N is formed.

    Args:
        query: (G, N, E); G stands for heads and samples.
        key: (G, N, E).
        value: (G, N, E_v).
        num_kept: r, even: keys per query and round. There are 4 N / r buckets.
        num_rounds: T.
        generator: draws the hash directions, new in every round, the same for queries and keys.
        allowed: pairs that may be used, (G, N, N) bool. None means all.
        duplicates: `count` adds a pair once per round that finds it, as the paper does; `union`
            once in all.
        wrap: whether the first chunk also sees the last; otherwise it has B keys.

    Raises:
        ValueError: r is odd or below 2, there is no round, or the numbers of queries and keys
            differ.
    """
    groups, length, size = query.shape
    if num_kept < 2 or num_kept % 2 or num_rounds < 1 or key.shape[1] != length:
        raise ValueError(
            f"expected an even num_kept of at least 2, at least one round and as many keys as "
            f"queries; received {num_kept}, {num_rounds}, {key.shape[1]} keys for {length} queries"
        )
    chunk_len = min(num_kept // 2, length)
    missing = -length % chunk_len
    query, key, value = (_pad(x, missing) for x in (query, key, value))
    seen = torch.ones(groups, length, length, dtype=torch.bool, device=query.device)
    seen = seen if allowed is None else seen & allowed
    seen = torch.nn.functional.pad(seen, (0, missing, 0, missing))
    half = max(1, query.shape[1] // chunk_len)
    rounds = []
    for _ in range(num_rounds):
        directions = torch.randn(half, size, generator=generator, dtype=torch.float64)
        rounds.append(hash_round(query, key, directions, chunk_len))
    sums = _Sums(query, value)
    group = torch.arange(groups, device=query.device).view(-1, 1, 1)
    for current in rounds:
        rows, cols = current.query_order, current.key_order  # (G, C, B)
        if cols.shape[1] > 1:
            cols = torch.cat([cols.roll(1, 1), cols], -1)  # (G, C, 2 B)
        scores = query[group, rows] @ key[group, cols].mT * size**-0.5
        hidden = ~seen[group[..., None], rows[..., :, None], cols[..., None, :]]
        if not wrap and cols.shape[1] > 1:
            hidden[:, 0, :, :chunk_len] = True
        if duplicates == "union" and num_rounds > 1:
            scores = scores - _multiplicity(rows, cols, rounds, wrap).to(scores.dtype).log()
        sums.add(rows, scores.masked_fill(hidden, float("-inf")), value[group, cols])
    return sums.result(value, seen)[:, :length]


def _pad(x: Tensor, missing: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, missing))


class _Sums:
    """Running maximum, numerator and denominator of every query."""

    def __init__(self, query: Tensor, value: Tensor) -> None:
        groups, length, _ = query.shape
        self.largest = query.new_full((groups, length), float("-inf"))
        self.total = query.new_zeros(groups, length)
        self.numerator = value.new_zeros(groups, length, value.shape[-1])

    def add(self, order: Tensor, scores: Tensor, value: Tensor) -> None:
        """Add scores (G, C, B, l) of values (G, C, l, E) for the queries `order` (G, C, B)."""
        rows = order.flatten(1)
        before = self.largest.gather(1, rows)
        largest = torch.maximum(before, scores.amax(-1).flatten(1))
        base = largest.masked_fill(largest == float("-inf"), 0.0)
        weights = torch.exp(scores - base.view(order.shape)[..., None])
        fade = torch.exp(before - base)
        total = self.total.gather(1, rows) * fade + weights.sum(-1).flatten(1)
        wide = rows[..., None].expand(-1, -1, value.shape[-1])
        numerator = self.numerator.gather(1, wide) * fade[..., None]
        numerator = numerator + (weights @ value).flatten(1, 2)
        self.largest = self.largest.scatter(1, rows, largest)
        self.total = self.total.scatter(1, rows, total)
        self.numerator = self.numerator.scatter(1, wide, numerator)

    def result(self, value: Tensor, seen: Tensor) -> Tensor:
        """Divide; a query that found nothing gets its own value, if it may see itself."""
        empty = (self.total == 0)[..., None]
        own = value * seen.diagonal(dim1=-2, dim2=-1)[..., None]
        return torch.where(empty, own, self.numerator / self.total[..., None].clamp_min(1e-38))


def _multiplicity(rows: Tensor, cols: Tensor, rounds: list[Round], wrap: bool) -> Tensor:
    """In how many rounds each pair is found, at least 1; (G, C, B, l)."""
    groups = torch.arange(rows.shape[0], device=rows.device).view(-1, 1, 1)
    count = torch.zeros(*rows.shape, cols.shape[-1], dtype=torch.int64, device=rows.device)
    for other in rounds:
        number = other.key_order.shape[1]
        mine = other.query_chunk[groups, rows][..., :, None]
        theirs = other.key_chunk[groups, cols][..., None, :]
        before = (mine - 1) % number if wrap else mine - 1
        count += (theirs == mine) | (theirs == before)
    return count.clamp_min(1)
