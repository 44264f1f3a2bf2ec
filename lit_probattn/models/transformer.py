"""The encoder: (B, N, C) -> (B, N, C) through blocks of attention and MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lit_probattn.attention.cache import Cache
from lit_probattn.attention.layer import Attention, AttentionFactory
from lit_probattn.randomness import RandomKey

Activation = Literal["gelu", "relu"]
MOST_LAYERS = 10_000  # more are a slip of the pen, and would fill the memory


class MLP(nn.Module):
    """Two linear layers, an activation (exact GELU or ReLU) between them, dropout after each."""

    def __init__(
        self, embed_dim: int, mlp_dim: int, dropout: float = 0.0, activation: Activation = "gelu"
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(embed_dim, mlp_dim)
        self.activation = nn.GELU() if activation == "gelu" else nn.ReLU()
        self.dropout1 = nn.Dropout(dropout)
        self.fc2 = nn.Linear(mlp_dim, embed_dim)
        self.dropout2 = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, N, C) to (B, N, C)."""
        x = self.dropout1(self.activation(self.fc1(x)))  # (B, N, mlp_dim)
        return self.dropout2(self.fc2(x))  # (B, N, C)


class Block(nn.Module):
    """Attention and MLP with residual paths, normalised before (pre) or after (post) each.

    pre:   x ─┬─ norm1 ─ attention ─ drop ─ + ─┬─ norm2 ─ mlp ─ + ─
              └─────────────────────────────┘  └───────────────┘
    post:  x ─┬─ attention ─ drop ─ + ─ norm1 ─┬─ mlp ─ + ─ norm2 ─
              └──────────────────┘             └──────┘

    `dropout` acts on the attention's output and in the MLP; the sizes are those of `Transformer`.
    """

    def __init__(
        self,
        attention: Attention,
        embed_dim: int,
        mlp_dim: int,
        dropout: float = 0.0,
        norm_first: bool = True,
        activation: Activation = "gelu",
    ) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.norm1 = nn.LayerNorm(embed_dim)
        self.attention = attention
        self.dropout = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(embed_dim)
        self.mlp = MLP(embed_dim, mlp_dim, dropout, activation)

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
        rng: RandomKey | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Map (B, N, C) to (B, N, C)."""

        def attend(inputs: Tensor) -> Tensor:
            out = self.attention(
                inputs, key_mask=key_mask, is_causal=is_causal, cache=cache, rng=rng
            )
            return self.dropout(out)

        if self.norm_first:
            x = x + attend(self.norm1(x))
            x = x + self.mlp(self.norm2(x))
        else:
            x = self.norm1(x + attend(x))
            x = self.norm2(x + self.mlp(x))
        return x


class Transformer(nn.Module):
    """A stack of blocks, with a final norm when blocks are pre-norm.

    Args:
        attention: makes one attention layer per block from (embed_dim, head_dim).
        embed_dim: C.
        head_dim: E.
        mlp_dim: inner width of the MLPs.
        dropout: of both branches of a block.
        norm_first: pre-norm (True) or post-norm.
        activation_checkpointing: recompute each block in backward instead of storing its inside.

    Raises:
        ValueError: fewer than one layer, or an MLP without width.
    """

    def __init__(
        self,
        attention: AttentionFactory,
        embed_dim: int,
        head_dim: int,
        num_layers: int,
        mlp_dim: int,
        dropout: float = 0.0,
        norm_first: bool = True,
        activation: Activation = "gelu",
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        if mlp_dim < 1:
            raise ValueError(f"mlp_dim must be at least 1, received {mlp_dim}")
        if not 1 <= num_layers <= MOST_LAYERS:
            raise ValueError(f"num_layers must be from 1 to {MOST_LAYERS}, received {num_layers}")
        self.blocks = nn.ModuleList(
            Block(
                attention(embed_dim, head_dim=head_dim),
                embed_dim,
                mlp_dim,
                dropout,
                norm_first,
                activation,
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(embed_dim) if norm_first else nn.Identity()
        self.activation_checkpointing = activation_checkpointing

    def forward(
        self,
        x: Tensor,
        *,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
        rng: RandomKey | None = None,
        caches: Sequence[Cache] | None = None,
    ) -> Tensor:
        """Map (B, N, C) to (B, N, C).

        Args:
            key_mask: real tokens, (B, N) bool.
            rng: names the draw of attention dropout and noise; folded with each layer's index.
            caches: memory of earlier tokens, one per block, from `new_caches`; `x` follows them.

        Raises:
            ValueError: there are more or fewer caches than blocks.
        """
        if caches is not None and len(caches) != len(self.blocks):
            raise ValueError(
                f"received {len(caches)} caches for {len(self.blocks)} blocks: expected one each"
            )
        for index, block in enumerate(self.blocks):
            key = None if rng is None else rng.fold(index)
            if caches is not None:
                x = block(x, key_mask, is_causal, key, caches[index])
            elif self.activation_checkpointing and self.training:
                x = checkpoint(block, x, key_mask, is_causal, key, use_reentrant=False)
            else:
                x = block(x, key_mask, is_causal, key)
        return self.norm(x)

    def new_caches(self, capacity: int = 0) -> list[Cache]:
        """Return an empty memory per block, with room for `capacity` positions."""
        layers = (cast(Attention, block.attention) for block in self.blocks)
        return [layer.new_cache(capacity) for layer in layers]
