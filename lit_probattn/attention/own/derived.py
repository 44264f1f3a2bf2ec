"""What follows from `reference_scores` alone: reference and blockwise form."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import Parameter
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.core import Core
from lit_probattn.attention.draws import keep_pairs
from lit_probattn.attention.engines.blocks import block_length
from lit_probattn.attention.engines.table import LACKS_OF_BLOCKS
from lit_probattn.attention.masks import Block, span
from lit_probattn.attention.numerics import (
    biased,
    grouped_values,
    masked_softmax,
    repeat_heads,
)
from lit_probattn.attention.variant import Engine, Variant

__all__ = ["DerivedCore", "OwnScores", "OwnVariant", "takes_positions"]

# From queries (B, H, N, E) and keys (B, H, L, E) to scores (B, H, N, L); two more arguments are the
# positions of queries (N,) and of keys (L,).
OwnScores = Callable[..., Tensor]


def takes_positions(scores: OwnScores) -> bool:
    """Whether scores take positions of queries and keys beside these."""
    named = Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD
    return sum(p.kind in named for p in inspect.signature(scores).parameters.values()) >= 4


def checked_scores(
    variant: OwnVariant, query: Tensor, key: Tensor, rows: range, first_row: int
) -> Tensor:
    """Return the scores, every query head with its key head; a ValueError for another shape.

    Args:
        variant: whose scores.
        query: (B, H, n, E), those of `rows`.
        key: (B, H_kv, l, E), the first l.
        rows: which queries of the call these are.
        first_row: position of the call's first query.
    """
    places: tuple[Tensor, ...] = ()
    if variant.positions:
        device = query.device
        at = torch.arange(rows.start + first_row, rows.stop + first_row, device=device)
        places = at, torch.arange(key.shape[-2], device=device)
    found = variant.function(query, repeat_heads(key, query.shape[1]), *places)
    expected = (*query.shape[:3], key.shape[-2])
    if tuple(found.shape) != expected:
        raise ValueError(
            f"reference_scores returned shape {tuple(found.shape)}, expected (batch, heads, "
            f"queries, keys) = {expected}"
        )
    return found


def in_blocks(call: HeadCall, variant: OwnVariant) -> Tensor:
    """By blocks of queries, which backward computes again; O(N · block) memory."""
    query, key, value, masks, dropout = call.precise().heads
    row_scores = query.shape[0] * query.shape[1] * masks.num_keys
    length = block_length(row_scores, masks.num_queries, query.device)

    def attend(block: Block, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, cols = block.rows, block.cols
        found = checked_scores(variant, query, key, rows, call.first_row)
        found = biased(found, masks, rows, cols)
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


@dataclass(frozen=True)
class OwnVariant(Variant):
    """A variant that is its scores alone.

    Args:
        function: from queries and keys to scores.
        name: for messages.
        pairwise: whether a score depends on its query, its key and their positions alone; without,
            there are no blocks.
        positions: whether the function takes positions.
    """

    takes_scale: ClassVar[bool] = False
    own_engines: ClassVar[Mapping[str, Engine]] = {
        "blockwise": Engine(
            in_blocks,
            lacks={
                **LACKS_OF_BLOCKS,
                "all pairs": "cannot cut the scores of {}: pairwise is False",
            },
        ),
    }

    function: OwnScores
    name: str = "own variant"  # type: ignore[misc]
    pairwise: bool = True
    positions: bool = False

    def scores(self, call: HeadCall) -> Tensor:
        """Return the scores of a call."""
        rows = span(0, call.query.shape[2])
        return checked_scores(self, call.query, call.key, rows, call.first_row)

    def needs(self) -> dict[str, str]:
        """Scores that depend on more than their pair cannot be cut."""
        return {} if self.pairwise else {"all pairs": self.name}

    def check(self, call: HeadCall) -> None:
        """Refuse a scale: the scores have their own."""
        if call.scale is not None:
            raise ValueError(
                f"{self.name} has no place for scale={call.scale}: its scores have one"
            )


class DerivedCore(Core):
    """The scores that a layer gives; parameters are the layer's."""

    makes = OwnVariant

    options_class = OwnVariant

    def make_parameters(self, options: OwnVariant) -> None:
        """Keep the variant, which is the same for every call."""
        self.knows_positions, self._variant = options.positions, options
        self.takes_padding = options.pairwise

    @property
    def name(self) -> str:
        """Name of the layer's class."""
        return self._variant.name

    def variant(self, call: HeadCall) -> OwnVariant:
        """Return the scores."""
        return self._variant
