"""From raw inputs to (B, N, C), with positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TokenEmbedding(nn.Module):
    """Token table plus learned positions, then dropout.

    Source: the Long Range Arena encoder of MGK, ICML 2022 (appendix A.1.1): both tables start as
    N(0, 0.02²), no scaling.

    Args:
        vocab_size: number of token ids.
        max_seq_len: number of positions.
        embed_dim: C.
        dropout: dropout probability.
        init_std: standard deviation of both tables at the start.
    """

    def __init__(
        self,
        vocab_size: int,
        max_seq_len: int,
        embed_dim: int,
        dropout: float = 0.0,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        self.vocab_size, self.max_seq_len = vocab_size, max_seq_len
        self.tokens = nn.Embedding(vocab_size, embed_dim)
        self.positions = nn.Embedding(max_seq_len, embed_dim)
        nn.init.normal_(self.tokens.weight, std=init_std)
        nn.init.normal_(self.positions.weight, std=init_std)
        self.dropout = nn.Dropout(dropout)

    def forward(self, inputs: Tensor, positions: Tensor | None = None) -> Tensor:
        """Embed token ids: (B, N) int64 -> (B, N, C).

        Args:
            inputs: token ids.
            positions: index of each token, (B, N) below `max_seq_len`. None counts from 0.

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
        embedded: Tensor = self.dropout(self.tokens(inputs) + self.positions(positions))
        return embedded
