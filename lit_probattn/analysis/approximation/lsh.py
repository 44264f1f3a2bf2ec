"""LSH attention: queries are compared only with keys that are close after sorting by hash.

Source: value-aware attention (Gupta and Berant, 2021), appendix A.1, after Kitaev et al., 2020.
Departs from the source: masked keys are excluded, and a query without keys uses its own position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Duplicates = Literal["count", "union"]


@dataclass(frozen=True)
class Round:
    """Sorting of one round: positions by (hash, position), and the chunk of each position."""

    query_order: Tensor  # (G, C, B), positions chunk by chunk
    key_order: Tensor
    query_chunk: Tensor  # (G, N), the chunk of each position
    key_chunk: Tensor


def hash_round(query: Tensor, key: Tensor, directions: Tensor, chunk_len: int) -> Round:
    """Hash queries and keys (G, N, E) by argmax [−R x; R x], sort them and split them into chunks.

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
) -> Tensor:
    """Return attention within hash buckets, (G, N, E_v).

    In each round a query attends to the r = 2 B keys of its chunk and the previous one, which for
    the first is the last. Numerator and denominator are sums of exp(q · k / √E) over all rounds. No
    N × N tensor is allocated.

    Args:
        query: (G, N, E); G are heads and samples.
        key: (G, N, E).
        value: (G, N, E_v).
        num_kept: r, keys per query and round; even. There are 4 N / r buckets.
        num_rounds: T.
        generator: draws the hash directions, new in each round, equal for queries and keys.
        allowed: allowed pairs, (G, N, N) bool. None means all.
        duplicates: `count` adds a pair once per round in which it is found, as in the paper;
            `union` adds it once.

    Raises:
        ValueError: r is odd or below 2, `num_rounds` is below 1, or the numbers of queries and keys
            differ.
    """
    groups, length, size = query.shape
    if num_kept < 2 or num_kept % 2 or num_rounds < 1 or key.shape[1] != length:
        raise ValueError(
            "expected an even num_kept of at least 2, at least one round and as many keys as "
            f"queries; received {num_kept}, {num_rounds}, {key.shape[1]} keys for {length} queries"
        )
    chunk_len = min(num_kept // 2, length)
    missing = -length % chunk_len
    pad = torch.nn.functional.pad
    query, key, value = (pad(x, (0, 0, 0, missing)) for x in (query, key, value))
    seen = torch.ones(groups, length, length, dtype=torch.bool, device=query.device)
    seen = seen if allowed is None else seen & allowed
    seen = pad(seen, (0, missing, 0, missing))
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
        if duplicates == "union" and num_rounds > 1:
            scores = scores - _multiplicity(rows, cols, rounds).to(scores.dtype).log()
        sums.add(rows, scores.masked_fill(hidden, float("-inf")), value[group, cols])
    return sums.result(value, seen)[:, :length]


class _Sums:
    """Running maximum, numerator and denominator of each query."""

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
        """Divide; a query without keys gets its own value, if it may attend to itself."""
        empty = (self.total == 0)[..., None]
        own = value * seen.diagonal(dim1=-2, dim2=-1)[..., None]
        return torch.where(empty, own, self.numerator / self.total[..., None].clamp_min(1e-38))


def _multiplicity(rows: Tensor, cols: Tensor, rounds: list[Round]) -> Tensor:
    """Return the number of rounds in which each pair is found, at least 1; (G, C, B, l)."""
    groups = torch.arange(rows.shape[0], device=rows.device).view(-1, 1, 1)
    count = torch.zeros(*rows.shape, cols.shape[-1], dtype=torch.int64, device=rows.device)
    for other in rounds:
        number = other.key_order.shape[1]
        mine = other.query_chunk[groups, rows][..., :, None]
        theirs = other.key_chunk[groups, cols][..., None, :]
        count += (theirs == mine) | (theirs == (mine - 1) % number)
    return count.clamp_min(1)
