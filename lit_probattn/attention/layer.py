"""Attention layers: projections, heads, rotary positions and cache around a variant's core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from lit_probattn.attention.backends import Backend
from lit_probattn.attention.cache import Cache, Memory
from lit_probattn.attention.call import HeadCall, HeadLayout, with_dropout
from lit_probattn.attention.core import Core
from lit_probattn.attention.cost.counting import Cost, Sizes
from lit_probattn.attention.cost.own import of_scores
from lit_probattn.attention.engines.table import LACKS_OF_CROSS_ATTENTION
from lit_probattn.attention.masks import check_query_mask, make_masks
from lit_probattn.attention.own.derived import DerivedCore, OwnVariant, takes_positions
from lit_probattn.attention.packing import (
    Packing,
    nested_like,
    packing_of,
    refuse_beside_documents,
    tokens_of_nested,
)
from lit_probattn.attention.rotary import Rotary
from lit_probattn.attention.variant import first_lack
from lit_probattn.base.arguments import Count, Options, Rate, WholeNumber, by_name
from lit_probattn.base.graphs import reject_nested
from lit_probattn.base.torch_internals import RenamingModule
from lit_probattn.randomness import RandomKey


def _what_is_missing(cls: type) -> str:
    return (
        f"{cls.__name__} has neither reference_scores nor a core: define reference_scores(self, "
        "query, key), which returns the scores (batch, heads, queries, keys), or name core_class"
    )


@dataclass(frozen=True)
class LayerOptions(Options):
    """Arguments of every attention layer.

    Args:
        embed_dim: C, input and output width.
        num_heads: H, query heads.
        head_dim: E, size of one head. None means C / H.
        num_kv_heads: key/value heads, each shared by a group of consecutive query heads. None means
            H, 1 is multi-query attention.
        key_embed_dim: width of `key` and `value` in cross-attention. None means C.
        value_head_dim: size of a value head. None means E.
        bias: whether the four projections have biases.
        dropout: probability of dropping an attention weight in training, in [0, 1).
        backend: implementation to use; see `lit_probattn.attention.backends`.
        rotary_dim: dimensions of a head that rotary positions rotate; 0 disables rotary positions.
    """

    embed_dim: Count
    num_heads: Count
    _: KW_ONLY
    head_dim: Count | None = None
    num_kv_heads: Count | None = None
    key_embed_dim: Count | None = None
    value_head_dim: Count | None = None
    bias: bool = True
    dropout: Rate = 0.0
    backend: Backend = "auto"
    rotary_dim: WholeNumber = 0


class Attention(RenamingModule):
    """Multi-head attention with an independent head size; base class of every variant.

    `attention(query, key=None, value=None, *, key_mask, attn_mask, is_causal, bias, cache, rng,
    memory, query_mask, cu_seqlens, cu_seqlens_k)` maps (B, N, C) to (B, N, C).
    `key=None` means self-attention, `value=None` means value = key. Masks follow
    `lit_probattn.attention.masks`.

    A variant either defines `reference_scores`, from which everything else is derived, and
    optionally `normalise`, `mix_weights` and `query_side` if it is more than a softmax of scores;
    or it sets `core_class` and defines `head_layout` and `cost`. Any variant may transform its head
    outputs in `gate`. Additional arguments are fields of a subclass of `LayerOptions`
    (`base/arguments.py`, `by_name`), or the constructor declares them and passes on the common
    arguments.

    Rows of `query_proj`, `key_proj` and `value_proj` are ordered by head, then by component (if a
    mixture projects K keys), then by dimension; columns of `out_proj` by head, then by dimension.
    State dicts of other libraries: `lit_probattn.convert.layer_names`.

    The arguments are the fields of `LayerOptions`; `options` contains their values.

    Raises:
        ValueError: a size is not positive, `head_dim` is None and H does not divide C,
            `num_kv_heads` does not divide `num_heads`, `dropout` is outside [0, 1), or `backend` is
            unknown.
        TypeError: the argument is unknown; the message names the most similar one.
    """

    core: Core
    options: LayerOptions
    # The class that holds the variant's parameters; None if the core is derived or built elsewhere.
    core_class: ClassVar[type[Core] | None] = None
    # Whether each of the `reference_scores` depends only on its query, key and positions, and a row
    # of weights only on its query.
    pairwise: ClassVar[bool] = True
    # Whether `normalise` reads scores of other heads; `mix_weights` does.
    mixes_heads: ClassVar[bool] = False

    @by_name(LayerOptions)
    def __init__(self, options: LayerOptions) -> None:
        self.build(options)

    def build(self, options: LayerOptions) -> None:
        """Create projections and core; constructors call it with their options."""
        super().__init__()
        self.options = options
        embed_dim, num_heads, head_dim = options.embed_dim, options.num_heads, options.head_dim
        dropout, bias = options.dropout, options.bias
        if head_dim is None:
            if embed_dim % num_heads:
                raise ValueError(
                    "num_heads must divide embed_dim if head_dim is not set, received "
                    f"embed_dim={embed_dim} and num_heads={num_heads}"
                )
            head_dim = embed_dim // num_heads
        self.embed_dim, self.head_dim, self.num_heads = embed_dim, head_dim, num_heads
        self.num_kv_heads = _given(options.num_kv_heads, num_heads)
        self.key_embed_dim = _given(options.key_embed_dim, embed_dim)
        self.value_head_dim = _given(options.value_head_dim, head_dim)
        if num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads, received num_kv_heads={self.num_kv_heads} "
                f"and num_heads={num_heads}"
            )
        self.dropout, self.use_bias = dropout, bias
        self._backend: Backend = options.backend
        self.rotary = Rotary(options.rotary_dim, head_dim) if options.rotary_dim else None
        heads = self.layout = self.head_layout()
        self.query_proj = nn.Linear(embed_dim, heads.query * head_dim, bias=bias)
        self.key_proj = nn.Linear(self.key_embed_dim, self.key_width, bias=bias)
        self.value_proj = nn.Linear(
            self.key_embed_dim, heads.value * self.value_head_dim, bias=bias
        )
        self.out_proj = nn.Linear(heads.projected * self.value_head_dim, embed_dim, bias=bias)
        if self._gives_scores():
            self.core = DerivedCore(heads, options.backend, self._own_variant())
        elif self.core_class is not None:
            alone = [name for name in self.hooks() if name != "gate"]
            if alone:
                raise TypeError(
                    f"{type(self).__name__} defines {', '.join(alone)} and a core, which does not "
                    "use hooks: define reference_scores too"
                )
            self.core = self.make_core(self.core_class)

    # ------------------------------------------------------------------ the variant's part
    def head_layout(self) -> HeadLayout:
        """Return the heads of the projections; called before these are created."""
        h, h_kv = self.num_heads, self.num_kv_heads
        return HeadLayout(h, h_kv, h_kv, h, self.head_dim, self.value_head_dim)

    def make_core(self, core: type[Core]) -> Core:
        """Return the core of this class, for the layer's heads and options."""
        return core(self.layout, self._backend, self.options)

    def reference_scores(self, query: Tensor, key: Tensor, *positions: Tensor) -> Tensor:
        """Return the scores before mask and softmax, (B, H, N, L), of a variant without a core.

        If scores depend on positions, define it with two more arguments: `reference_scores(self,
        query, key, query_positions, key_positions)`. Decoding continues after the cached positions.

        Args:
            query: (B, H, N, E), in at least float32.
            key: (B, H, L, E), in at least float32; shared key heads are repeated.
            positions: positions of the queries, (N,), and of the keys, (L,), if declared.
        """
        raise NotImplementedError(_what_is_missing(type(self)))

    def normalise(self, scores: Tensor, *beside: Any, **named: Any) -> Tensor:
        """Return the weights of scores, (B, M, N, L), of a variant without a core.

        A subclass defines it as `normalise(self, scores, query, key, side)`; trailing arguments may
        be omitted. Weights of masked pairs are set to zero afterwards.

        Args:
            scores: (B, M, N, L) with the bias, in at least float32. Masked pairs have the lowest
                number, `torch.finfo(scores.dtype).min`; fully masked rows are zeros.
            beside: query and key as in `reference_scores`, and the output of `query_side`, if it is
                defined.
            named: unused.
        """
        return torch.softmax(scores, -1)

    def mix_weights(self, weights: Tensor, *beside: Any, **named: Any) -> Tensor:
        """Return weights mixed over heads, (B, M, N, L) -> (B, H, N, L), of a variant without core.

        H is `head_layout().out`. The other arguments are the same as in `normalise`. Weights of
        pairs that are masked in all heads are set to zero afterwards.
        """
        return weights

    def query_side(self, x: Tensor) -> Tensor | None:
        """Return features of each query's token for hooks, (B, …, N, S).

        Args:
            x: the input of the layer, (B, N, C).
        """
        return None

    def gate(self, out: Tensor, x: Tensor) -> Tensor:
        """Return the heads that the output projection reads, (B, `head_layout().gated`, N, E_v).

        Args:
            out: outputs of all heads, (B, H, N, E_v).
            x: the input of the layer, (B, N, C).
        """
        return out

    @classmethod
    def hooks(cls) -> tuple[str, ...]:
        """Return the names of the hooks that the class defines, without `reference_scores`."""
        names = "normalise", "mix_weights", "query_side", "gate"
        return tuple(name for name in names if getattr(cls, name) is not getattr(Attention, name))

    @classmethod
    def _gives_scores(cls) -> bool:
        return cls.reference_scores is not Attention.reference_scores

    def _own_variant(self) -> OwnVariant:
        defined = self.hooks()
        return OwnVariant(
            self.reference_scores,
            type(self).__name__,
            self.pairwise,
            takes_positions(self.reference_scores),
            self.normalise if "normalise" in defined else None,
            self.mix_weights if "mix_weights" in defined else None,
            self.mixes_heads or "mix_weights" in defined,
            "query_side" in defined,
            self.layout.out,
        )

    def cost(self, seq_len: int) -> Cost:
        """Return the analytic cost of self-attention over `seq_len` tokens.

        Derived from `reference_scores` if that is defined; otherwise the variant defines it with a
        formula, for example of `lit_probattn.attention.cost`.

        Raises:
            NotImplementedError: neither is defined, or the heads are not plain.
        """
        if not hasattr(self, "core"):
            raise NotImplementedError(_what_is_missing(type(self)))
        if not self._gives_scores():
            raise NotImplementedError(
                f"{type(self).__name__} has its own core: also define cost(seq_len), which returns "
                "lit_probattn.attention.Cost"
            )
        return of_scores(self.sizes(seq_len), self)

    def __getattr__(self, name: str) -> Any:
        """Raise an error that names the missing definition if there is no core."""
        if name == "core" and "core" not in vars(self).get("_modules", {}):
            raise AttributeError(_what_is_missing(type(self)))
        return super().__getattr__(name)

    def sizes(self, seq_len: int) -> Sizes:
        """Return the sizes that cost formulas depend on, for `seq_len` tokens of self-attention."""
        widths = self.embed_dim, self.key_embed_dim
        return Sizes(seq_len, *widths, self.layout, self.count_parameters())

    # ------------------------------------------------------------------ properties
    @property
    def backend(self) -> Backend:
        """The selected implementation; can be set."""
        return self.core.backend if hasattr(self, "core") else self._backend

    @backend.setter
    def backend(self, name: Backend) -> None:
        self.core.backend = name

    @property
    def key_width(self) -> int:
        """Output width of `key_proj`."""
        return self.layout.key * self.layout.keys_per_head * self.head_dim

    def count_parameters(self) -> int:
        """Return the number of parameters."""
        return sum(p.numel() for p in self.parameters())

    def new_cache(self, capacity: int = 0) -> Cache:
        """Return an empty decoding cache that reserves space for `capacity` positions."""
        return self.core.new_cache(capacity)

    def needs(self) -> dict[str, str]:
        """Return the features that the layer needs in its current mode, with their options.

        Rotary positions, and the needs of the variant; see `Variant.needs`.
        """
        turned = {} if self.rotary is None else {"rotary": f"rotary_dim={self.rotary.rotary_dim}"}
        return turned | self.core.needs()

    # ------------------------------------------------------------------ the call
    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        bias: Tensor | None = None,
        cache: Cache | None = None,
        rng: RandomKey | None = None,
        memory: Memory | None = None,
        query_mask: Tensor | None = None,
        cu_seqlens: Tensor | Packing | None = None,
        cu_seqlens_k: Tensor | None = None,
    ) -> Tensor:
        """Compute attention.

        Args:
            query: (B, N, C).
            key: (B, L, C_k). None means self-attention, or the keys of `memory`.
            value: (B, L, C_k). None means `key`.
            key_mask: real keys, (B, L) bool; with a cache, of the new tokens.
            attn_mask: allowed pairs, bool, (N, L) or broadcastable to (B, H, N, L).
            is_causal: bottom-right aligned causal mask.
            bias: added to the scores, (N, L) or broadcastable to (B, H, N, L).
            cache: decoding cache from `new_cache`; the new tokens are appended.
            rng: identifies the draws of attention dropout and of a variant's noise. None draws a
                new key from torch's generator.
            memory: keys, values and their mask, from `remember`.
            query_mask: queries whose outputs are needed, (B, N) bool. The outputs of others are
                finite, but have no meaning: a backend may skip them. An M-step does not count them.
                None computes all; an M-step then counts `key_mask` in self-attention, else all.
            cu_seqlens: bounds of packed documents over the B · N tokens, (D + 1,) integers, or a
                `Packing` of them, built once per batch for all layers. Each document attends only
                to itself, and its positions start at 0; `rng.sample_ids` contains one id per
                document, (D,). Nested (jagged) tensors are also packed documents.
            cu_seqlens_k: bounds of the documents' keys in cross-attention.

        Returns:
            (B, N, C); nested if `query` is.

        Raises:
            ValueError: sizes do not match; the message contains both.
            NotImplementedError: the requested backend does not support the call.

            After these and other exceptions, also of hooks, the cache and the memory are unchanged.
        """
        if query.is_nested:
            given: dict[str, Any] = {"key_mask": key_mask, "query_mask": query_mask, "cache": cache}
            refuse_beside_documents(cu_seqlens=cu_seqlens, **given)
            tokens, documents = tokens_of_nested(query, key, value)
            pairs: dict[str, Any] = {"attn_mask": attn_mask, "bias": bias, "memory": memory}
            out = self(*tokens, is_causal=is_causal, rng=rng, cu_seqlens=documents, **pairs)
            return nested_like(query, out)
        if query_mask is not None:
            check_query_mask(query_mask, query)
        packing = None
        if cu_seqlens is not None or cu_seqlens_k is not None:
            packing = packing_of(cu_seqlens, cu_seqlens_k)
            others = {"cache": cache, "memory": memory, "attn_mask": attn_mask, "bias": bias}
            refuse_beside_documents(**others)
        masks: dict[str, Any] = {"attn_mask": attn_mask, "is_causal": is_causal, "bias": bias}
        named = {"key": key, "value": value, "key_mask": key_mask, "cache": cache}
        given = {"memory": memory, "query_mask": query_mask, "rng": rng, "packing": packing}
        if cache is None:  # torch.compile cannot continue a function that breaks inside `try`
            return self._attend(query, named, masks, **given)
        before = cache.attributes()
        try:
            return self._attend(query, named, masks, **given)
        except BaseException:  # also KeyboardInterrupt
            cache.restore(before)
            raise

    def _attend(
        self,
        query: Tensor,
        named: Mapping[str, Any],
        masks: Mapping[str, Any],
        *,
        memory: Memory | None,
        query_mask: Tensor | None,
        rng: RandomKey | None,
        packing: Packing | None,
    ) -> Tensor:
        """Return the output (B, N, C) for the keys in `named`, or those of `memory`."""
        if memory is None:
            call = self.call(query, **named, rng=rng, packing=packing, **masks)
        else:
            call = self._recall(query, memory, named, rng=rng, **masks)
        if query_mask is not None:
            call = replace(call, query_mask=query_mask, output_mask=query_mask)
        call = with_dropout(call, self.dropout if self.training else 0.0)
        heads = self.gate(self.core(call), query)
        result: Tensor = self.out_proj(heads.transpose(1, 2).flatten(2))
        if memory is not None:
            memory.num_read += query.shape[1]
        return result

    if TYPE_CHECKING:
        __call__ = forward  # nn.Module's says Any

    def call(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        cache: Cache | None = None,
        rng: RandomKey | None = None,
        packing: Packing | None = None,
        **pairs: Any,
    ) -> HeadCall:
        """Return the projected call that the core computes, without dropout; also for analysis.

        Inputs are checked, projected, split into heads, rotated, and appended to the cache. The
        arguments have the same meaning as in `forward`; `pairs` are attn_mask, is_causal and bias.
        """
        if cache is not None:
            self.core.check(pairs.get("bias"), cache)  # before tokens are appended
        if key is None and value is not None:
            raise ValueError("received value without key; pass both, or neither for self-attention")
        # Keys of self-attention are the queries' tokens; a cache contains earlier keys as well.
        of_self = key is None
        query_mask = key_mask if of_self and cache is None else None
        key = query if key is None else key
        value = key if value is None else value
        _check_input("query", query, self.embed_dim)
        _check_input("key", key, self.key_embed_dim)
        _check_input("value", value, self.key_embed_dim)
        if key.shape[1] != value.shape[1]:
            raise ValueError(
                f"key has {key.shape[1]} positions and value {value.shape[1]}: expected the same"
            )
        if query.shape[0] != key.shape[0]:
            raise ValueError(
                f"query has batch size {query.shape[0]} and key {key.shape[0]}: expected the same"
            )
        q = split_heads(self.query_proj(query), self.layout.query)
        k = split_heads(self.key_proj(key), self.layout.key, self.layout.keys_per_head)
        v = split_heads(self.project_values(value, of_self=of_self), self.layout.value)
        if packing is not None:
            if of_self and not packing.is_self:
                raise ValueError("received cu_seqlens_k without key: bounds of keys need keys")
            packing.check(q.shape[0], q.shape[2], v.shape[2])
        first = 0 if cache is None else cache.next_position
        if self.rotary is not None:
            at: tuple[int | Tensor, int | Tensor] = first + k.shape[-2] - q.shape[-2], first
            if packing is not None:
                at = packing.positions(q.shape[0], q.device)
            q, k = self.rotary(q, at[0]), self.rotary(k, at[1])
        if cache is not None:
            if key_mask is not None and key_mask.shape != key.shape[:2]:
                raise ValueError(
                    f"key_mask has shape {tuple(key_mask.shape)}; with a cache it covers the "
                    f"{key.shape[1]} new tokens: expected {tuple(key.shape[:2])}"
                )
            k, v, key_mask = cache.append(k, v, key_mask)
        masks = make_masks(
            *(q.shape[0], self.layout.out, q.shape[2], v.shape[2]), key_mask=key_mask, **pairs
        )
        said: dict[str, Any] = {"cache": cache, "query_mask": query_mask, "packing": packing}
        return HeadCall(q, k, v, masks, rng=rng, side=self.query_side(query), **said)

    def project_values(self, value: Tensor, *, of_self: bool) -> Tensor:
        """Return values before they are split; `of_self`: the values are the queries' tokens."""
        projected: Tensor = self.value_proj(value)
        return projected

    def remember(
        self, key: Tensor, value: Tensor | None = None, *, key_mask: Tensor | None = None
    ) -> Memory:
        """Project keys and values once for many calls; without gradients.

        Args:
            key: (B, L, C_k).
            value: (B, L, C_k). None means `key`.
            key_mask: real keys, (B, L) bool.

        Raises:
            ValueError: sizes do not match, or the layer needs one of `LACKS_OF_CROSS_ATTENTION`.
        """
        reason = first_lack(self.needs(), LACKS_OF_CROSS_ATTENTION)
        if reason is not None:
            raise ValueError(f"{type(self).__name__} {reason}")
        cache = self.new_cache(key.shape[1])
        no_query = key.new_empty(key.shape[0], 0, self.embed_dim)
        with torch.no_grad():
            self.core.absorb(self.call(no_query, key, value, key_mask=key_mask, cache=cache))
        return Memory(cache)

    def _recall(
        self,
        query: Tensor,
        memory: Memory,
        given: Mapping[str, Any],
        *,
        rng: RandomKey | None,
        **pairs: Any,
    ) -> HeadCall:
        """Return the call of queries that read an encoder memory."""
        named = [name for name, item in given.items() if item is not None]
        named += ["is_causal"] if pairs["is_causal"] else []
        if named:
            raise ValueError(f"memory contains all keys to attend to; received also {named[0]}")
        self.core.check(pairs["bias"], memory.cache)
        _check_input("query", query, self.embed_dim)
        k, v, key_mask = memory.cache.read()
        if query.shape[0] != v.shape[0]:
            raise ValueError(
                f"query has batch size {query.shape[0]} and the memory {v.shape[0]}: expected the "
                "same"
            )
        q = split_heads(self.query_proj(query), self.layout.query)
        sizes = (q.shape[0], self.layout.out, q.shape[2], v.shape[2])
        masks, first = make_masks(*sizes, key_mask=key_mask, **pairs), memory.num_read
        side, cache = self.query_side(query), memory.cache
        return HeadCall(q, k, v, masks, rng=rng, cache=cache, first_query=first, side=side)

    def weights(self, query: Tensor, key: Tensor | None = None, **masks: Any) -> Tensor:
        """Return the attention weights (B, H, N, L) by the equation, without dropout; for analysis.

        Draws in the current mode (noise, random features) are the same as in a call with the same
        `rng`.
        """
        packing = packing_of(masks.pop("cu_seqlens", None), masks.pop("cu_seqlens_k", None))
        if packing is not None:
            refuse_beside_documents(**{n: masks.get(n) for n in ("cache", "attn_mask", "bias")})
        return self.core.weights(self.call(query, key, packing=packing, **masks))

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        return (
            f"embed_dim={self.embed_dim}, head_dim={self.head_dim}, num_heads={self.num_heads}, "
            f"num_kv_heads={self.num_kv_heads}, dropout={self.dropout}, backend={self.backend!r}"
        )


# Names of the projections in the state dict of a layer.
PROJECTIONS = ("query_proj", "key_proj", "value_proj", "out_proj")


class AttentionFactory(Protocol):
    """Creates one attention layer: a variant whose other arguments are fixed.

    The caller sets the arguments named here, so the configuration of a variant cannot.
    """

    def __call__(
        self, embed_dim: int, *, head_dim: int | None = None, **overrides: Any
    ) -> Attention:
        """Return a layer; `overrides` may set `num_heads` if stages have different heads."""


# As a type, not as text: jsonargparse parses this module whenever it evaluates the text.
AttentionFactory.__call__.__annotations__["return"] = Attention


def _given(size: int | None, otherwise: int) -> int:
    return otherwise if size is None else size


def split_heads(projected: Tensor, num_heads: int, keys_per_head: int = 1) -> Tensor:
    """(B, N, H·E) -> (B, H, N, E), or (B, N, H·K·E) -> (B, H, K, N, E) with K keys per head."""
    if keys_per_head == 1:
        return projected.unflatten(-1, (num_heads, -1)).transpose(1, 2)
    return projected.unflatten(-1, (num_heads, keys_per_head, -1)).permute(0, 2, 3, 1, 4)


def _check_input(name: str, tensor: Tensor, width: int) -> None:
    reject_nested(name, tensor)
    if tensor.dim() != 3 or tensor.shape[-1] != width:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, expected (batch, positions, {width})"
        )
