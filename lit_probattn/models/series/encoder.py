"""Encoder of multivariate series: embedding, post-norm blocks, flattened head.

Source: FiSH, NeurIPS 2022, table 6, and the two repositories that it builds on: mvts (batch norm)
and Flowformer (layer norm).
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_probattn.attention.layer import Attention, AttentionFactory
from lit_probattn.base.arguments import Count, OnlyWith, Rate, arguments_of, checks_arguments, takes
from lit_probattn.models.embeddings import SineTable
from lit_probattn.models.per_layer import layer_factories
from lit_probattn.models.series.norm import Norm, NormPositions, make_norm
from lit_probattn.models.transformer import MLP, Activation, LayerCount
from lit_probattn.randomness import Dropout, RandomKey

Positions = Literal["learnable", "fixed"]
AttentionInit = Literal["xavier", "default"]


class SeriesEmbedding(nn.Module):
    """Linear map of every step times √C, plus positions, then dropout.

    Args:
        num_features: dimensions of a series.
        max_seq_len: N, the longest series.
        embed_dim: C, width of the residual stream.
        positions: `learnable`, initialised uniformly in ±0.02, or `fixed` sines and cosines.

    Raises:
        ValueError: fixed positions with an odd width.
    """

    @checks_arguments
    def __init__(
        self,
        *,
        num_features: Count,
        max_seq_len: Count,
        embed_dim: Count,
        positions: Positions = "learnable",
        dropout: Rate = 0.0,
    ) -> None:
        super().__init__()
        self.num_features, self.max_seq_len = num_features, max_seq_len
        self.scale = math.sqrt(embed_dim)
        self.features = nn.Linear(num_features, embed_dim)
        self.positions: nn.Parameter | SineTable
        if positions == "learnable":
            self.positions = nn.Parameter(torch.empty(max_seq_len, embed_dim).uniform_(-0.02, 0.02))
        else:
            self.positions = SineTable(max_seq_len, embed_dim)
        self.dropout = Dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        """Embed (B, N, F) to (B, N, C).

        Raises:
            ValueError: more steps than positions, or a different number of features.
        """
        length, width = inputs.shape[1:]
        if length > self.max_seq_len or width != self.num_features:
            raise ValueError(
                f"cannot embed series of {length} steps and {width} features: the model supports "
                f"up to {self.max_seq_len} steps of {self.num_features} features"
            )
        given = self.positions
        rows = given.table if isinstance(given, SineTable) else given
        return self.dropout(self.features(inputs) * self.scale + rows[:length])


class SeriesBlock(nn.Module):
    """Attention and MLP with residual paths, normalised after each.

    x ─┬─ attention ─ drop ─ + ─ norm1 ─┬─ mlp ─ + ─ norm2 ─
       └──────────────────┘             └──────┘

    Args:
        norm: `batch` (mvts) or `layer` (Flowformer).
        norm_positions: steps that contribute to batch norm: `real`, or `all` as in the source,
            which requires `pad_to=max` of the data.
    """

    @takes(MLP, without=("activation_dropout",))
    def __init__(
        self,
        attention: Attention,
        *,
        norm: Norm = "batch",
        norm_positions: Annotated[NormPositions, OnlyWith(norm="batch")] = "real",
        **options: Any,
    ) -> None:
        super().__init__()
        embed_dim = options["embed_dim"]
        self.attention = attention
        self.dropout = Dropout(options["dropout"])
        self.norm1 = make_norm(embed_dim, norm, norm_positions)
        self.mlp = MLP(**options)
        self.norm2 = make_norm(embed_dim, norm, norm_positions)

    def forward(
        self, x: Tensor, key_mask: Tensor | None = None, rng: RandomKey | None = None
    ) -> Tensor:
        """Map (B, N, C) to (B, N, C)."""
        x = self.norm1(x + self.dropout(self.attention(x, key_mask=key_mask, rng=rng)), key_mask)
        x = self.norm2(x + self.mlp(x), key_mask)
        return x


class FlattenedClassifier(nn.Module):
    """Activation, dropout, zeros for padded steps, concatenation of all steps, Linear.

    A batch padded to fewer steps than `max_seq_len` is padded to `max_seq_len`.

    Args:
        num_classes: number of labels.
    """

    @checks_arguments
    def __init__(
        self,
        *,
        embed_dim: Count,
        max_seq_len: Count,
        num_classes: Count,
        dropout: Rate = 0.0,
        activation: Activation = "gelu",
    ) -> None:
        super().__init__()
        self.activation = F.gelu if activation == "gelu" else F.relu
        self.dropout = Dropout(dropout)
        self.width = max_seq_len * embed_dim
        self.output = nn.Linear(self.width, num_classes)

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        """Map (B, N, C) to logits (B, num_classes)."""
        x = self.dropout(self.activation(x))
        if key_mask is not None:
            x = torch.where(key_mask[..., None], x, 0.0)
        flat = x.flatten(1)  # (B, N · C)
        logits: Tensor = self.output(F.pad(flat, (0, max(self.width - flat.shape[1], 0))))
        return logits


def init_attention(layer: Attention) -> None:
    """Initialise the projections like `nn.MultiheadAttention`: joint Xavier weights, zero biases.

    Query, key and value weights are uniform in ±√(6 / 4C), the Xavier bound of one matrix (3C, C),
    regardless of their numbers of heads; `out_proj` keeps its weights.
    """
    bound = math.sqrt(6.0 / (4 * layer.embed_dim))
    for projection in (layer.query_proj, layer.key_proj, layer.value_proj):
        nn.init.uniform_(projection.weight, -bound, bound)
    for projection in (layer.query_proj, layer.key_proj, layer.value_proj, layer.out_proj):
        if projection.bias is not None:
            nn.init.zeros_(projection.bias)


class SeriesTransformer(nn.Module):
    """Classifier of multivariate series.

    Source: mvts with `norm=batch, attention_init=xavier`; Flowformer with `norm=layer,
    attention_init=default, final_norm=True` (its 1×1 convolutions are the MLP's linear layers).
    Departs from the source: layers are initialised independently; there, as copies of one.

    Args:
        attention: called once per layer as `attention(embed_dim, head_dim=E)`.
        head_dim: E, size of a head; independent of embed_dim and the number of heads.
        num_layers: number of blocks.
        dropout: dropout of embedding, both branches of a block, and head. Attention dropout is an
            argument of the attention.
        final_norm: a layer norm after the last block (Flowformer).
        attention_init: projections are initialised as in nn.MultiheadAttention (`xavier`, mvts) or
            nn.Linear (`default`).
        activation: activation of the MLPs and of the head.

    Raises:
        ValueError: fewer than one layer, or an unknown choice.
    """

    @takes(
        *(SeriesEmbedding, SeriesBlock, FlattenedClassifier),
        dropout=0.1,
    )
    def __init__(
        self,
        attention: AttentionFactory,
        *,
        head_dim: Count,
        num_layers: LayerCount,
        final_norm: bool = False,
        attention_init: AttentionInit = "xavier",
        **options: Any,
    ) -> None:
        super().__init__()
        self.needs_full_length = options["norm"] == "batch" and options["norm_positions"] == "all"
        self.max_seq_len: int = options["max_seq_len"]
        embed_dim: int = options["embed_dim"]
        self.embedding = SeriesEmbedding(**arguments_of(SeriesEmbedding, options))
        self.blocks = nn.ModuleList()
        for made in layer_factories(attention, num_layers):
            layer = made(embed_dim, head_dim=head_dim)
            if attention_init == "xavier":
                init_attention(layer)
            self.blocks.append(SeriesBlock(layer, **arguments_of(SeriesBlock, options)))
        self.norm = nn.LayerNorm(embed_dim) if final_norm else nn.Identity()
        self.head = FlattenedClassifier(**arguments_of(FlattenedClassifier, options))

    @property
    def num_features(self) -> int:
        """Dimensions of a series."""
        return self.embedding.num_features

    def forward(
        self, inputs: Tensor, *, key_mask: Tensor | None = None, rng: RandomKey | None = None
    ) -> Tensor:
        """Map series (B, N, F) to logits (B, num_classes).

        `key_mask` (B, N) marks real steps; `rng` is the key of attention dropout and noise.

        Raises:
            ValueError: sizes do not match.
        """
        if self.needs_full_length and inputs.shape[1] != self.max_seq_len:
            raise ValueError(
                "norm_positions=all includes padded steps, so every batch must have "
                f"{self.max_seq_len} steps, received {inputs.shape[1]}: set pad_to=max"
            )
        x = self.embedding(inputs)  # (B, N, C)
        for index, block in enumerate(self.blocks):
            x = block(x, key_mask, None if rng is None else rng.fold(index))
        return self.head(self.norm(x), key_mask)  # (B, num_classes)
