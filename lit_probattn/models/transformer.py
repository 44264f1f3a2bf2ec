"""Encoders and decoders, (B, N, C) -> (B, N, C): stacks of attention and MLP blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, cast

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lit_probattn.attention.cache import Cache, Memory
from lit_probattn.attention.engines.table import LACKS_OF_CROSS_ATTENTION
from lit_probattn.attention.layer import Attention, AttentionFactory
from lit_probattn.attention.packing import Packing
from lit_probattn.attention.variant import first_lack
from lit_probattn.base.arguments import Count, Range, Rate, checks_arguments, takes
from lit_probattn.models.per_layer import differs_by_layer, layer_factories
from lit_probattn.randomness import Dropout, RandomKey

Activation = Literal["gelu", "relu"]
LayerCount = Annotated[int, Range(1, most=10_000)]  # rejects typos that would exhaust memory
# Separates the random draws of a block's two attentions.
_CROSS = 1


class MLP(nn.Module):
    """Two linear layers, an activation (exact GELU or ReLU) between them, dropout after each.

    Args:
        embed_dim: C, width of the residual stream.
        mlp_dim: width of the hidden layer of the MLPs.
        dropout: dropout after both linear layers, unless `activation_dropout` overrides the first.
        activation: activation of the MLPs.
        activation_dropout: dropout within the MLPs, after the activation. None means `dropout`.
    """

    @checks_arguments
    def __init__(
        self,
        *,
        embed_dim: Count,
        mlp_dim: Count,
        dropout: Rate = 0.0,
        activation: Activation = "gelu",
        activation_dropout: Rate | None = None,
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(embed_dim, mlp_dim)
        self.activation = nn.GELU() if activation == "gelu" else nn.ReLU()
        self.dropout1 = Dropout(dropout if activation_dropout is None else activation_dropout)
        self.fc2 = nn.Linear(mlp_dim, embed_dim)
        self.dropout2 = Dropout(dropout)

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

    A decoder block attends to an encoder memory between the two:

    pre:   … + ─┬─ norm_cross ─ cross_attention ─ drop ─ + ─ …
                └──────────────────────────────────────┘
    post:  … norm1 ─┬─ cross_attention ─ drop ─ + ─ norm_cross ─ …
                    └─────────────────────────┘

    Args:
        attention: the self-attention layer.
        dropout: dropout of all branches of a block.
        norm_first: pre-norm (True) or post-norm blocks.
        cross_attention: the cross-attention layer.
        norm_eps: epsilon of all layer norms.

    Raises:
        ValueError: the layer does not support cross-attention (the message gives the reason), or
            `norm_eps` is out of range.
    """

    @takes(MLP)
    def __init__(
        self,
        attention: Attention,
        *,
        norm_first: bool = True,
        cross_attention: Attention | None = None,
        norm_eps: Annotated[float, Range(above=0, below=1)] = 1e-5,
        **options: Any,
    ) -> None:
        super().__init__()
        norm = partial(nn.LayerNorm, options["embed_dim"], eps=norm_eps)
        self.norm_first = norm_first
        self.norm1 = norm()
        self.attention = attention
        self.dropout = Dropout(options["dropout"])
        self.norm_cross: nn.LayerNorm | None = None
        self.cross_attention: Attention | None = None
        if cross_attention is not None:
            _require_cross(cross_attention)
            self.norm_cross, self.cross_attention = norm(), cross_attention
        self.norm2 = norm()
        self.mlp = MLP(**options)

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
        rng: RandomKey | None = None,
        cache: Cache | None = None,
        query_mask: Tensor | None = None,
        memory: Tensor | Memory | None = None,
        memory_mask: Tensor | None = None,
        cu_seqlens: Packing | None = None,
    ) -> Tensor:
        """Map (B, N, C) to (B, N, C); `memory` is (B, S, C), or its projection by the layer."""

        def attend(*inputs: Tensor) -> Tensor:
            masks: Any = {"key_mask": key_mask, "query_mask": query_mask, "is_causal": is_causal}
            if cu_seqlens is not None:
                masks["cu_seqlens"] = cu_seqlens
            return self.dropout(self.attention(*inputs, **masks, cache=cache, rng=rng))

        def look(inputs: Tensor) -> Tensor:
            assert self.cross_attention is not None
            key = None if rng is None else rng.fold(_CROSS)
            if isinstance(memory, Memory):
                seen: Any = {"memory": memory}
            else:
                seen = {"key": memory, "key_mask": memory_mask}
            out = self.cross_attention(inputs, **seen, query_mask=query_mask, rng=key)
            return self.dropout(out)

        if self.norm_first:
            x, *inputs = self.before_attention(x)
            x = x + attend(*inputs)
            if self.norm_cross is not None:
                x = x + look(self.norm_cross(x))
            x = x + self.mlp(self.norm2(x))
        else:
            x = self.norm1(x + attend(x))
            if self.norm_cross is not None:
                x = self.norm_cross(x + look(x))
            x = self.norm2(x + self.mlp(x))
        return x

    def before_attention(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the residual input of a pre-norm block, its queries, and keys if different."""
        return x, self.norm1(x)


def _require_cross(layer: Attention) -> None:
    reason = first_lack(layer.needs(), LACKS_OF_CROSS_ATTENTION)
    if reason is not None:
        raise ValueError(f"{type(layer).__name__} does not support cross-attention: it {reason}")


class Transformer(nn.Module):
    """A stack of blocks, with a final norm if blocks are pre-norm.

    With `cross_attention` it is a decoder, whose blocks also attend to an encoder memory.

    A subclass can replace the block by another with the arguments of `Block`.

    Args:
        attention: factory of one attention layer per block from (embed_dim, head_dim); a `PerLayer`
            gives layer-specific attention.
        head_dim: E, size of a head; independent of embed_dim and the number of heads.
        num_layers: number of blocks.
        activation_checkpointing: recompute the blocks in backward instead of storing activations.
        attention_dropout: dropout of attention weights, which overrides the attention's argument;
            None keeps the attention's argument.
        attention_bias: whether attention projections have biases, which overrides the attention's
            argument; None keeps the attention's argument.
        cross_attention: factory of the cross-attention layers of decoder blocks.
        share_layers: share one block among all layers, stored and counted once. Analyses pool its
            applications.

    Raises:
        ValueError: fewer than one layer, an MLP without width, a variant that does not support
            cross-attention, an attention for a layer that does not exist, or layer-specific
            attention with shared layers.
    """

    block_class: type[Block] = Block

    @takes(Block)
    def __init__(
        self,
        attention: AttentionFactory,
        *,
        head_dim: Count,
        num_layers: LayerCount,
        activation_checkpointing: bool = False,
        attention_dropout: Rate | None = None,
        attention_bias: bool | None = None,
        cross_attention: AttentionFactory | None = None,
        share_layers: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        embed_dim = options["embed_dim"]
        if share_layers and any(map(differs_by_layer, (attention, cross_attention))):
            raise ValueError(
                "share_layers=true uses one block for all layers, which excludes attention by "
                "layers: set one attention, or share_layers=false"
            )
        given = {"bias": attention_bias, "dropout": attention_dropout}
        overrides: Any = {name: value for name, value in given.items() if value is not None}
        own, cross = layer_factories(partial(attention, **overrides), num_layers), None
        if cross_attention is not None:
            cross = layer_factories(partial(cross_attention, **overrides), num_layers)
        # Number of applications of the stored blocks.
        self.num_rounds = num_layers if share_layers else 1
        self.blocks = nn.ModuleList(
            self.block_class(
                own[number](embed_dim, head_dim=head_dim),
                cross_attention=(
                    None if cross is None else cross[number](embed_dim, head_dim=head_dim)
                ),
                **options,
            )
            for number in range(num_layers // self.num_rounds)
        )
        self.norm: nn.Module = nn.Identity()
        if options["norm_first"]:
            self.norm = nn.LayerNorm(embed_dim, eps=options["norm_eps"])
        self.activation_checkpointing = activation_checkpointing

    def forward(
        self,
        x: Tensor,
        *,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
        rng: RandomKey | None = None,
        caches: Sequence[Cache] | None = None,
        query_mask: Tensor | None = None,
        memory: Tensor | Sequence[Memory] | None = None,
        memory_mask: Tensor | None = None,
        cu_seqlens: Packing | None = None,
    ) -> Tensor:
        """Map (B, N, C) to (B, N, C).

        Args:
            key_mask: real tokens, (B, N) bool.
            rng: key of attention dropout and noise; folded with each layer's index.
            caches: keys and values of earlier tokens, one cache per layer, from `new_caches`; `x`
                follows them.
            query_mask: tokens whose outputs are needed, (B, N) bool; others do not attend, and
                M-steps do not count them. None means all.
            memory: encoder memory of a decoder, (B, S, C), or its projections by `remember`.
            memory_mask: real positions of a memory that is a tensor, (B, S) bool.
            cu_seqlens: documents of an encoder's tokens, each of which attends to itself alone.

        Raises:
            ValueError: the numbers of caches and layers differ, the caches end at different
                positions, a decoder has no memory, or documents are packed in a decoder.
        """
        layers = self.layers
        if caches is not None and len(caches) != len(layers):
            raise ValueError(
                f"received {len(caches)} caches for {len(layers)} layers: expected one per layer"
            )
        if caches is not None and len({cache.next_position for cache in caches}) > 1:
            raise ValueError(
                "the layers' caches end at different positions, as after a call that failed in "
                "the middle: start again with new_caches()"
            )
        if (memory is None) == self.is_decoder:
            raise ValueError(
                "a decoder requires an encoder memory, received None"
                if self.is_decoder
                else "received a memory, but these blocks have no cross-attention"
            )
        if cu_seqlens is not None and self.is_decoder:
            raise ValueError(
                "packed documents (cu_seqlens) are not supported by blocks with cross-attention: "
                "pad them and pass key_mask"
            )
        for index, block in enumerate(layers):
            key = None if rng is None else rng.fold(index)
            cache = None if caches is None else caches[index]
            seen = memory if memory is None or isinstance(memory, Tensor) else memory[index]
            given = (key_mask, is_causal, key, cache, query_mask, seen, memory_mask, cu_seqlens)
            if self.activation_checkpointing and self.training and caches is None:
                x = checkpoint(block, x, *given, use_reentrant=False)
            else:
                x = block(x, *given)
        return self.norm(x)

    @property
    def layers(self) -> list[Block]:
        """The blocks in order of application; a shared one is repeated."""
        return [cast(Block, block) for block in self.blocks] * self.num_rounds

    @property
    def is_decoder(self) -> bool:
        """Whether the blocks have cross-attention."""
        return cast(Block, self.blocks[0]).cross_attention is not None

    def remember(self, memory: Tensor, memory_mask: Tensor | None = None) -> list[Memory]:
        """Project an encoder memory, (B, S, C), for the cross-attention of every block."""
        layers = (cast(Attention, block.cross_attention) for block in self.layers)
        return [layer.remember(memory, key_mask=memory_mask) for layer in layers]

    def new_caches(self, capacity: int = 0) -> list[Cache]:
        """Return an empty cache per layer, with space for `capacity` positions."""
        return [block.attention.new_cache(capacity) for block in self.layers]
