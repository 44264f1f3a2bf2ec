"""What a pass over the rows of a block is given, and what it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lit_probattn.attention.masks import Masks
from lit_probattn.randomness import AttentionDropout

Reduction = Literal["soft", "hard", "sum"]


@dataclass(frozen=True)
class RowTerms:
    """What the rows of a call have in common.

    Args:
        masks: what each query may see, and the bias.
        dropout: one decision per pair.
        num_heads: H.
        reduction: how the maps of components become scores.
        num_components: K, or the number of maps that are summed.
        shared: one map serves all components of a head.
        common: all heads of a sample read the same maps (`sum`).
        coef: c, (H, K).
        row: a, (B·H, N, K).
        col: β, (B·H, K, L).
        samples: counter words of the samples, (B,), where there is dropout.
    """

    masks: Masks
    dropout: AttentionDropout | None
    num_heads: int
    reduction: Reduction = "soft"
    num_components: int = 1
    shared: bool = False
    common: bool = False
    coef: Tensor | None = None
    row: Tensor | None = None
    col: Tensor | None = None
    samples: Tensor | None = None


@dataclass(frozen=True)
class Place:
    """A block: `count` (sample, head) pairs from `first` on, some queries, a prefix of keys."""

    first: int
    count: int
    rows: range
    cols: range

    @property
    def pairs(self) -> slice:
        """The (sample, head) pairs."""
        return slice(self.first, self.first + self.count)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of one map of the block."""
        return self.count, len(self.rows), len(self.cols)


class Buffers:
    """Room for maps of a block, given out again for every block."""

    def __init__(self, like: Tensor) -> None:
        self.like, self.rooms = like, dict[int, Tensor]()

    def __call__(self, index: int, shape: Sequence[int]) -> Tensor:
        """Return room number `index` as a tensor of this shape, with anything in it."""
        size = shape[0] * shape[1] * shape[2]
        room = self.rooms.get(index)
        if room is None or room.numel() < size:
            room = self.rooms[index] = self.like.new_empty(size)
        return room[:size].view(*shape)


@dataclass
class RowGrads:
    """Gradients that a pass over rows writes, each None where it is not wanted.

    Args:
        maps: of the maps; may be the maps themselves, or the gradient of l where that is the same
            (one map, no coefficients). Those that heads have in common are added to.
        row: (count, n, K). col: (count, K, l). coef: (count, K).
    """

    maps: Sequence[Tensor]
    row: Tensor | None = None
    col: Tensor | None = None
    coef: Tensor | None = None
