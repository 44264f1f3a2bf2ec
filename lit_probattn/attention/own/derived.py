"""What follows from `reference_scores` alone: reference, blockwise form and cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lit_probattn.attention.backends import Backend, BackendFunction
from lit_probattn.attention.blockwise import Block, block_length
from lit_probattn.attention.cache import Cache
from lit_probattn.attention.core import Choice, Core, HeadCall, HeadLayout
from lit_probattn.attention.draws import keep_pairs
from lit_probattn.attention.functional import (
    Heads,
    biased,
    compute_dtype,
    grouped_values,
    masked_softmax,
    reference_output,
    repeat_heads,
)

__all__ = ["DerivedCore", "Scores", "count_score_macs"]

# From queries (B, H, N, E) and keys (B, H, L, E) to scores (B, H, N, L).
Scores = Callable[[Tensor, Tensor], Tensor]


def checked_scores(scores: Scores, query: Tensor, key: Tensor) -> Tensor:
    """Return the scores, every query head with its key head; a ValueError for another shape."""
    found = scores(query, repeat_heads(key, query.shape[1]))
    expected = (*query.shape[:3], key.shape[-2])
    if tuple(found.shape) != expected:
        raise ValueError(
            f"reference_scores returned shape {tuple(found.shape)}, expected (batch, heads, "
            f"queries, keys) = {expected}"
        )
    return found


def derived_reference(given: Heads, scores: Scores) -> Tensor:
    """Return the softmax of the scores times the values, (B, H, N, E_v), in at least float32."""
    query, key, value, masks, dropout = given.precise()
    return reference_output(checked_scores(scores, query, key), value, masks, dropout)


def derived_blockwise(given: Heads, scores: Scores) -> Tensor:
    """Return the same by blocks of queries, which backward computes again; O(N · block) memory."""
    query, key, value, masks, dropout = given.precise()
    row_scores = query.shape[0] * query.shape[1] * masks.num_keys
    length = block_length(row_scores, masks.num_queries, query.device)

    def attend(block: Block, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, cols = block.rows, block.cols
        found = biased(checked_scores(scores, query, key), masks, rows, cols)
        weights = masked_softmax(found, masks.allowed(rows, cols, query.device))
        if dropout is not None:
            batch, heads = weights.shape[:2]
            keep = keep_pairs(dropout, batch, heads, rows, cols, query.device)
            weights = weights * keep * dropout.scale
        return grouped_values(weights, value)

    outs = []
    for first in range(0, masks.num_queries, length):
        rows = range(first, min(first + length, masks.num_queries))
        cols = masks.visible_keys(rows)
        parts = (query[:, :, rows.start : rows.stop], *(x[:, :, : cols.stop] for x in (key, value)))
        run = partial(attend, Block(rows, cols))
        outs.append(checkpoint(run, *parts, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(outs, -2)


class DerivedCore(Core):
    """Attention by the scores that a layer gives, from heads to heads.

    Args:
        scores: the layer's `reference_scores`.
        name: name of the variant, for messages.
        pairwise: whether a score depends on its query and its key alone; without, there are no
            blocks.
    """

    variant: ClassVar[str] = "own variant"
    backends: ClassVar[Mapping[str, BackendFunction]] = {
        "reference": derived_reference,
        "blockwise": derived_blockwise,
    }

    def __init__(
        self, layout: HeadLayout, backend: Backend, scores: Scores, name: str, pairwise: bool
    ) -> None:
        super().__init__(layout, backend)
        vars(self)["variant"] = name
        self._scores = scores
        if not pairwise:
            self.refused["blockwise"] = f"cannot cut the scores of {name}: pairwise is False"

    def choose(self, call: HeadCall, backend: str) -> Choice:
        """Return the scores; keys as they are."""
        return Choice(backend, call.key, self._scores)

    def scores(self, call: HeadCall) -> Tensor:
        """Return the scores of a call."""
        dtype = compute_dtype(call.query)
        return checked_scores(self._scores, call.query.to(dtype), call.key.to(dtype))

    def check(self, bias: Tensor | None, cache: Cache | None, scale: float | None = None) -> None:
        """Refuse a scale: the scores have their own."""
        if scale is not None:
            raise ValueError(f"{self.variant} has no place for scale={scale}: its scores have one")


def count_score_macs(layer: Any, seq_len: int) -> int:
    """Count the multiply-adds of a layer's scores over a sequence, in matrix products.

    Counted at three small lengths, and continued as the polynomial of degree 2 that they are.
    """
    first, second, third = (_score_macs(layer, length) for length in (1, 2, 3))
    step, bend = second - first, third - 2 * second + first
    n = seq_len - 1
    return first + n * step + n * (n - 1) // 2 * bend


def _score_macs(layer: Any, length: int) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    weight = layer.query_proj.weight
    heads = torch.zeros(1, layer.num_heads, length, layer.head_dim)
    heads = heads.to(weight.device, weight.dtype)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer.reference_scores(heads, heads)
    return int(counter.get_total_flops()) // 2
