"""Fixed positions of language models, added to the embedded tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

Positions = Literal["reversed", "forward", "rotary"]

_BASE = 10000.0
_FIRST_FORWARD = 2  # where the library of the value-aware model begins to count


class Sinusoid(nn.Module):
    """Sines, then cosines, of the position at C / 2 frequencies.

    Source: `reversed` is MGK's language model (ICML 2022, A.1.2, and its code): frequencies
    10000^(−2m / C); positions count down to 0 at the last token of the segment. `forward` is that
    of the value-aware causal model (fairseq): frequencies 10000^(−m / (C/2 − 1)), counted up from
    2.
    Departs from the source: the index is not clamped at the context, which a segment cannot exceed.

    Args:
        max_seq_len: longest segment.
        embed_dim: C, even, at least 4.
        kind: which of the two.

    Raises:
        ValueError: C is odd or too small.
    """

    table: Tensor

    def __init__(
        self, max_seq_len: int, embed_dim: int, kind: Literal["reversed", "forward"]
    ) -> None:
        super().__init__()
        if embed_dim % 2 or embed_dim < 4:
            raise ValueError(
                f"sinusoidal positions need an even embed_dim of at least 4, received {embed_dim}"
            )
        self.max_seq_len, self.kind = max_seq_len, kind
        half = embed_dim // 2
        reverse = kind == "reversed"
        index = torch.arange(half, dtype=torch.float64)
        frequency = _BASE ** -(index / half if reverse else index / (half - 1))
        first = 0 if reverse else _FIRST_FORWARD
        position = torch.arange(first, first + max_seq_len, dtype=torch.float64)
        angle = position[:, None] * frequency  # (max_seq_len, C / 2)
        table = torch.cat([angle.sin(), angle.cos()], -1).float()
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: Tensor, lengths: Tensor | int) -> Tensor:
        """Return what is added to tokens at `positions` (…) of segments of `lengths`; (…, C).

        Positions count from 0 at the first token.
        """
        if self.kind == "reversed":
            positions = (lengths - 1 - positions).clamp(0, self.max_seq_len - 1)
        return self.table[positions]
