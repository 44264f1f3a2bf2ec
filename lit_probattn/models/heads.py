"""From encoded sequences (B, N, C) to logits."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

Pooling = Literal["mean", "mean_valid"]


def pool(x: Tensor, key_mask: Tensor | None, pooling: Pooling, max_seq_len: int) -> Tensor:
    """Average the real tokens: (B, N, C) -> (B, C).

    Args:
        x: encoded tokens, (B, N, C).
        key_mask: real tokens, (B, N). None means all.
        pooling: `mean` divides by `max_seq_len`, whatever the padding of this batch (what the
            authors' code does with batches that it always pads to `max_seq_len`); `mean_valid`
            divides by the number of real tokens.
        max_seq_len: longest sequence of the task.
    """
    if key_mask is not None:
        x = x * key_mask[..., None]
    total = x.sum(1)
    if pooling == "mean":
        return total / max_seq_len
    if key_mask is None:
        return total / x.shape[1]
    return total / key_mask.sum(1, keepdim=True).clamp_min(1)


class PooledClassifier(nn.Module):
    """Pool over positions, then Linear, ReLU, Linear.

    Source: the Long Range Arena head of MGK's released code and its base (spec d.2).

    Args:
        embed_dim: C.
        hidden_dim: width between the two linear layers.
        num_classes: number of logits.
        max_seq_len: longest sequence of the task, the divisor of `mean`.
        pooling: see `pool`.
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        num_classes: int,
        max_seq_len: int,
        pooling: Pooling = "mean",
    ) -> None:
        super().__init__()
        if pooling not in ("mean", "mean_valid"):
            raise ValueError(f"pooling must be mean or mean_valid, received {pooling!r}")
        self.pooling: Pooling = pooling
        self.max_seq_len = max_seq_len
        self.fc1 = nn.Linear(embed_dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, num_classes)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Map (B, N, C) to logits (B, num_classes)."""
        pooled = pool(x, key_mask, self.pooling, self.max_seq_len)  # (B, C)
        logits: Tensor = self.fc2(torch.relu(self.fc1(pooled)))  # (B, num_classes)
        return logits


class PairClassifierHead(nn.Module):
    """Pool both texts of a pair, compare them, then Linear, ReLU, Linear.

    Source: the Retrieval head of MGK's released code and its base (spec d.2):

        feature = [X0, X1, X0 ⊙ X1, X0 − X1]   (4 C numbers of the pooled texts X0, X1)

    Args:
        embed_dim: C.
        hidden_dim: width between the two linear layers.
        num_classes: number of logits.
        max_seq_len: longest text, the divisor of `mean`.
        pooling: see `pool`.
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        num_classes: int,
        max_seq_len: int,
        pooling: Pooling = "mean",
    ) -> None:
        super().__init__()
        if pooling not in ("mean", "mean_valid"):
            raise ValueError(f"pooling must be mean or mean_valid, received {pooling!r}")
        self.pooling: Pooling = pooling
        self.max_seq_len = max_seq_len
        self.fc1 = nn.Linear(4 * embed_dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, num_classes)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Map encoded pairs (2 B, N, C), the texts of a pair after one another, to (B, classes)."""
        pooled = pool(x, key_mask, self.pooling, self.max_seq_len)  # (2 B, C)
        first, second = pooled.unflatten(0, (-1, 2)).unbind(1)  # (B, C) each
        feature = torch.cat([first, second, first * second, first - second], dim=-1)  # (B, 4 C)
        logits: Tensor = self.fc2(torch.relu(self.fc1(feature)))  # (B, num_classes)
        return logits
