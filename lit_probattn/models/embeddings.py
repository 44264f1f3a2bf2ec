"""Embeddings with learned or fixed positions: token ids -> (B, N, C)."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from lit_probattn.base.arguments import Count, NotNegative, Rate, checks_arguments
from lit_probattn.base.torch_internals import FollowingModule
from lit_probattn.randomness import Dropout

Positions = Literal["reversed", "forward", "rotary"]
TokenPositions = Literal["learned", "sinusoidal"]
PositionInit = Literal["normal", "sinusoidal"]
_BASE = 10000.0
_FIRST_FORWARD = 2  # first position in fairseq, the library of the value-aware model


def sine_positions(length: int, width: int) -> Tensor:
    """Return sines (even channels) and cosines of step · 10000^(−2i / C), (length, width) float64.

    Raises:
        ValueError: odd width.
    """
    if width % 2:
        raise ValueError(f"fixed positions need an even embed_dim, received {width}")
    steps = torch.arange(length, dtype=torch.float64)[:, None]
    rates = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(1e4) / width))
    return torch.stack([(steps * rates).sin(), (steps * rates).cos()], dim=-1).flatten(1)


class SineTable(FollowingModule):
    """Non-trainable position embedding with rows of `sine_positions`, (length, width)."""

    table: Tensor

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.register_buffer("table", self.exact(length, width).float(), persistent=False)

    def exact(self, length: int, width: int) -> Tensor:
        """Return the table in float64."""
        return sine_positions(length, width)

    def after_move(self) -> None:
        """Round the table from float64 once, so that a float64 model has exact positions."""
        self.table = self.exact(*self.table.shape).to(self.table)

    def forward(self, positions: Tensor) -> Tensor:
        """Return the rows at `positions` (…); (…, C)."""
        return self.table[positions]


class TokenEmbedding(nn.Module):
    """Token embedding plus learned or fixed positions, then dropout; optional class token.

    Source: the Long Range Arena encoder of MGK, ICML 2022 (appendix A.1.1): both embeddings are
    initialised to N(0, init_std²), no scaling; its code has options for the class token and fixed
    positions.
    Departs from the source: the class token is a separate parameter, where the code uses the last
    row of the token embedding.

    Args:
        vocab_size: number of token ids.
        max_seq_len: N, longest sequence.
        embed_dim: C, width of the residual stream.
        positions: `learned`, or `sinusoidal`: fixed sines and cosines.
        class_token: insert a learned token at position 0, before the `max_seq_len` others.

    Raises:
        ValueError: unknown positions, or sinusoidal positions with an odd width.
    """

    @checks_arguments
    def __init__(
        self,
        *,
        vocab_size: Count,
        max_seq_len: Count,
        embed_dim: Count,
        dropout: Rate = 0.0,
        init_std: NotNegative = 0.02,
        positions: TokenPositions = "learned",
        class_token: bool = False,
    ) -> None:
        super().__init__()
        self.vocab_size, self.max_seq_len = vocab_size, max_seq_len
        self.tokens = nn.Embedding(vocab_size, embed_dim)
        length = max_seq_len + class_token
        self.positions: nn.Embedding | SineTable
        if positions == "learned":
            self.positions = nn.Embedding(length, embed_dim)
        else:
            self.positions = SineTable(length, embed_dim)
        nn.init.normal_(self.tokens.weight, std=init_std)
        if isinstance(self.positions, nn.Embedding):
            nn.init.normal_(self.positions.weight, std=init_std)
        self.class_token: nn.Parameter | None = None
        if class_token:
            self.class_token = nn.Parameter(torch.empty(embed_dim).normal_(std=init_std))
        self.dropout = Dropout(dropout)

    def forward(self, inputs: Tensor, positions: Tensor | None = None) -> Tensor:
        """Embed token ids: (B, N) int64 -> (B, N, C), or (B, 1 + N, C) with a class token.

        Args:
            positions: position of each token, (B, N), below `max_seq_len`. None counts from 0.

        Raises:
            ValueError: more positions than `max_seq_len`.
        """
        length = inputs.shape[1]
        if length > self.max_seq_len:
            raise ValueError(
                f"cannot embed a sequence of length {length}: max_seq_len is {self.max_seq_len}"
            )
        if positions is None:
            positions = torch.arange(length, device=inputs.device)
        x = self.tokens(inputs)
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(len(x), 1, -1), x], 1)
            positions = nn.functional.pad(positions + 1, (1, 0))  # 0 is the class token
        return self.dropout(x + self.positions(positions).to(x.dtype))


class Sinusoid(SineTable):
    """Sines, then cosines, of the position at C / 2 frequencies.

    Source: `reversed` is MGK's language model (ICML 2022, A.1.2, and its code): frequencies
    10000^(−2m / C); positions count down to 0 at the last token of the segment. `forward` is the
    value-aware causal model (fairseq): frequencies 10000^(−m / (C/2 − 1)), counted up from 2.
    Departs from the source: positions are not clamped to the context, which a segment cannot
    exceed.

    Args:
        max_seq_len: longest segment.
        embed_dim: C.
        kind: `reversed` or `forward`.

    Raises:
        ValueError: embed_dim is odd or below 4.
    """

    @checks_arguments
    def __init__(
        self, *, max_seq_len: Count, embed_dim: Count, kind: Literal["reversed", "forward"]
    ) -> None:
        if embed_dim % 2 or embed_dim < 4:
            raise ValueError(
                f"sinusoidal positions need an even embed_dim of at least 4, received {embed_dim}"
            )
        self.max_seq_len, self.kind = max_seq_len, kind
        super().__init__(max_seq_len, embed_dim)

    def exact(self, length: int, width: int) -> Tensor:
        """Return the table in float64."""
        half = width // 2
        reverse = self.kind == "reversed"
        index = torch.arange(half, dtype=torch.float64)
        frequency = _BASE ** -(index / half if reverse else index / (half - 1))
        first = 0 if reverse else _FIRST_FORWARD
        position = torch.arange(first, first + length, dtype=torch.float64)
        angle = position[:, None] * frequency  # (length, C / 2)
        return torch.cat([angle.sin(), angle.cos()], -1)

    def forward(  # type: ignore[override]
        self, positions: Tensor, lengths: Tensor | int
    ) -> Tensor:
        """Return the embeddings of `positions` (…) in segments of `lengths`; (…, C).

        Positions count from 0 at the first token.
        """
        if self.kind == "reversed":
            positions = (lengths - 1 - positions).clamp(0, self.max_seq_len - 1)
        return self.table[positions]
