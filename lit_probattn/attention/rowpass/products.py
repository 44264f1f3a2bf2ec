"""Blocks of queries, the matrix products of a block, and sums over blocks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lit_probattn.attention.masks import Masks
from lit_probattn.attention.rowpass.terms import Place, RowTerms
from lit_probattn.base.memory import device_type, is_predicting, telling

# Scores of one map in a block of whole heads: small enough to stay in the cache of a CPU core with
# their gradients; on CUDA large enough to fill the device.
BLOCK_SCORES = {"cpu": 1 << 18, "cuda": 1 << 25}
# A head whose scores do not fit into the cache is cut into blocks of this many rows, if they are
# not far too large for it: every block reads all keys and values.
LEAST_ROWS = 512
# How many times as many scores a block may have for the sake of `LEAST_ROWS`.
LARGER = 4


def places(terms: RowTerms, batch_heads: int, device: torch.device) -> Iterator[Place]:
    """Cut all queries of all heads into blocks: whole heads together, or rows of one.

    Under a causal mask blocks stay small, because they leave out the keys that none of their rows
    may see.
    """
    masks, budget = terms.masks, BLOCK_SCORES["cpu" if device_type(device) == "cpu" else "cuda"]
    rows = budget // max(1, masks.num_keys)
    if not masks.is_causal:
        rows = max(rows, min(LEAST_ROWS, LARGER * budget // max(1, masks.num_keys)))
    rows = max(1, min(masks.num_queries, rows))
    count = 1
    if rows == masks.num_queries:
        count = max(1, min(batch_heads, budget // max(1, rows * masks.num_keys)))
    found = _cut(masks, batch_heads, count, rows)
    # All blocks use one room, which grows with those of the first heads.
    if not is_predicting():
        yield from found
    elif terms.common and masks.is_causal:
        yield from _growing(found, terms.num_heads, device)
    else:
        yield from _telling(found, count)


def _telling(found: Iterator[Place], count: int) -> list[Place]:
    """Return the last three places of the first `count` heads, and the last of all."""
    every = list(found)
    first = [place for place in every if place.first < count]
    return [*telling(first), *(every[-1:] if every[-1].first >= count else [])]


def _growing(found: Iterator[Place], heads: int, device: torch.device) -> list[Place]:
    """Return the places that need more room than all before, and the last three.

    Where heads have maps in common, fewer keys mean more heads at once.
    """
    every, largest = list(found), 0
    needed = []
    for place in every[:-3]:
        size = heads_at_once(place, heads, device) * len(place.rows) * len(place.cols)
        if size > largest:
            largest = size
            needed.append(place)
    return [*needed, *every[-3:]]


def heads_at_once(part: Place, heads: int, device: torch.device) -> int:
    """Return how many heads of a sample make a block of about the same size as one head's."""
    budget = BLOCK_SCORES["cpu" if device_type(device) == "cpu" else "cuda"]
    return max(1, min(heads, budget // max(1, len(part.rows) * len(part.cols))))


def _cut(masks: Masks, batch_heads: int, count: int, rows: int) -> Iterator[Place]:
    for first in range(0, batch_heads, count):
        here = min(count, batch_heads - first)
        for start in range(0, masks.num_queries, rows):
            block = range(start, min(start + rows, masks.num_queries))
            yield Place(first, here, block, masks.visible_keys(block))


def product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Multiply (count, n, x) with (count, x, m) into a dense `out`; one matrix by one product."""
    if a.shape[0] == 1:
        torch.mm(a[0], b[0], out=out[0])
        return out
    return torch.bmm(a, b, out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to a view of a gradient."""
    if a.shape[0] == 1:
        total[0].addmm_(a[0], b[0])
    else:
        total.baddbmm_(a, b)


def add_by_head(total: Tensor | None, part: Tensor | None, terms: RowTerms, place: Place) -> None:
    """Add (count, K) of a block's (sample, head) pairs to (H, K)."""
    if total is None or part is None:
        return
    head = torch.arange(place.first, place.first + place.count, device=part.device)
    total.index_add_(0, head % terms.num_heads, part)


def add_bias(total: Tensor | None, grad: Tensor, terms: RowTerms, place: Place) -> None:
    """Add gradients of a block's scores to those of the bias, over what it is broadcast along."""
    if total is None:
        return
    heads = terms.num_heads
    block_rows = slice(place.rows.start, place.rows.stop) if total.shape[2] > 1 else slice(None)
    block_cols = slice(place.cols.start, place.cols.stop) if total.shape[3] > 1 else slice(None)
    sums = [d for d, size in ((-2, total.shape[2]), (-1, total.shape[3])) if size == 1]
    grad = grad.sum(sums, keepdim=True) if sums else grad
    index = torch.arange(place.first, place.first + place.count, device=grad.device)
    sample, head = index // heads % total.shape[0], index % heads % total.shape[1]
    flat = total.flatten(0, 1)[:, block_rows, block_cols]
    flat.index_add_(0, sample * total.shape[1] + head, grad)
