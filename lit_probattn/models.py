"""Whole models: tokens -> embedding -> blocks -> head."""

from __future__ import annotations

from torch import Tensor, nn

from lit_probattn.attention.base import AttentionFactory
from lit_probattn.embeddings import TokenEmbedding
from lit_probattn.heads import PooledClassifier, Pooling
from lit_probattn.randomness import RandomKey
from lit_probattn.transformer import Transformer


class Classifier(nn.Module):
    """Sequence classifier of the Long Range Arena experiments.

    Source: MGK, ICML 2022, appendix A.1.1; sizes of its base code: embed_dim 64, head_dim 32,
    2 pre-norm layers, mlp_dim 128, head 64 -> 128 -> classes.

    Args:
        attention: makes one attention layer from (embed_dim, head_dim).
        vocab_size: number of token ids.
        num_classes: number of logits.
        max_seq_len: longest sequence.
        embed_dim: C.
        head_dim: E.
        num_layers: number of blocks.
        mlp_dim: inner width of the MLPs and of the head.
        dropout: dropout of embeddings, attention output and MLPs.
        pooling: how positions are averaged.
        activation_checkpointing: recompute blocks in backward.
    """

    def __init__(
        self,
        attention: AttentionFactory,
        *,
        vocab_size: int,
        num_classes: int,
        max_seq_len: int,
        embed_dim: int,
        head_dim: int,
        num_layers: int,
        mlp_dim: int,
        dropout: float = 0.1,
        pooling: Pooling = "mean",
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(vocab_size, max_seq_len, embed_dim, dropout)
        self.encoder = Transformer(
            attention,
            embed_dim,
            head_dim,
            num_layers,
            mlp_dim,
            dropout,
            activation_checkpointing=activation_checkpointing,
        )
        self.head = PooledClassifier(embed_dim, mlp_dim, num_classes, max_seq_len, pooling)

    def forward(
        self, inputs: Tensor, *, key_mask: Tensor | None = None, rng: RandomKey | None = None
    ) -> Tensor:
        """Classify token ids.

        Args:
            inputs: (B, N) int64.
            key_mask: real tokens, (B, N) bool.
            rng: names the draw of attention dropout and noise.

        Returns:
            Logits, (B, num_classes).
        """
        x = self.embedding(inputs)  # (B, N, C)
        x = self.encoder(x, key_mask=key_mask, rng=rng)  # (B, N, C)
        logits: Tensor = self.head(x, key_mask)  # (B, num_classes)
        return logits
