"""From encoded sequences (B, N, C) to logits."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from lit_probattn.base.arguments import Count, checks_arguments

Pooling = Literal["mean", "mean_valid", "cls"]


def pool(x: Tensor, key_mask: Tensor | None, pooling: Pooling, max_seq_len: int) -> Tensor:
    """Average the real tokens, or select the first: (B, N, C) -> (B, C).

    Args:
        key_mask: real tokens, (B, N). None means all.
        pooling: `mean` divides by `max_seq_len`, independent of the padding of this batch (like the
            authors' code, which always pads to `max_seq_len`); `mean_valid`
            divides by the number of real tokens; `cls` selects position 0, a class token.
    """
    if pooling == "cls":
        return x[:, 0]
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

    Source: the Long Range Arena head of MGK's released code and its base.

    Args:
        hidden_dim: width between the two linear layers.
        num_classes: number of labels.
        max_seq_len: N, the padded length.
        pooling: reduction from (B, N, C) to (B, C): `mean` over `max_seq_len`, `mean_valid` over
            real tokens, or `cls`, the output at a class token at position 0.

    Raises:
        ValueError: unknown pooling.
    """

    feature_parts = 1  # width of the feature in multiples of embed_dim

    @checks_arguments
    def __init__(
        self,
        *,
        embed_dim: Count,
        hidden_dim: Count,
        num_classes: Count,
        max_seq_len: Count,
        pooling: Pooling = "mean",
    ) -> None:
        super().__init__()
        self.pooling: Pooling = pooling
        self.max_seq_len = max_seq_len
        self.fc1 = nn.Linear(self.feature_parts * embed_dim, hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, num_classes)

    def feature(self, pooled: Tensor) -> Tensor:
        """Return the input of the linear layers, for pooled sequences (B, C)."""
        return pooled

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Map (B, N, C) to logits (B, num_classes)."""
        pooled = pool(x, key_mask, self.pooling, self.max_seq_len)  # (B, C)
        return self.fc2(torch.relu(self.fc1(self.feature(pooled))))  # (B, num_classes)


class PairClassifierHead(PooledClassifier):
    """Pool both texts of a pair, compare them, then Linear, ReLU, Linear.

    Encoded pairs are (2 B, N, C), with the texts of a pair adjacent.

    Source: the Retrieval head of MGK's released code and its base:

        feature = [X0, X1, X0 ⊙ X1, X0 − X1]   (4 C entries from the pooled texts X0, X1)
    """

    feature_parts = 4

    def feature(self, pooled: Tensor) -> Tensor:
        """Return the comparison of each pair, (B, 4 C), for pooled texts (2 B, C)."""
        first, second = pooled.unflatten(0, (-1, 2)).unbind(1)  # (B, C) each
        return torch.cat([first, second, first * second, first - second], dim=-1)
