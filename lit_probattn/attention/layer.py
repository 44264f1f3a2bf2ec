"""What all attention layers share. Over 300 lines: one class, its call and a variant's hooks.

Projections, heads, masks, dropout, cache and the choice of a backend.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lit_probattn.attention.backends import (
    AUTO_RULES,
    BACKENDS,
    AutoRule,
    Backend,
    Call,
    choose_backend,
    kernel_refusal,
)
from lit_probattn.attention.cache import Cache, KVCache, merge_partials, partial_attention
from lit_probattn.attention.functional import autocast_off, compute_dtype
from lit_probattn.attention.functional import reference_output as reference_output
from lit_probattn.attention.functional import reference_weights as reference_weights
from lit_probattn.attention.masks import Masks, make_masks
from lit_probattn.attention.rotary import Rotary
from lit_probattn.randomness import AttentionDropout, RandomKey

# Computes (B, H, N, E_v) from query (B, H, N, E), key, value, masks, dropout and the variant's own
# arguments, in the dtype of query.
BackendFunction = Callable[..., Tensor]

# With a cache, calls with at most this many new tokens read it part by part.
STEP_QUERIES = 16


@dataclass(frozen=True)
class Cost:
    """Analytic cost of one attention layer on one sequence, forward.

    Args:
        paper_flops: multiplications plus additions by the paper's counting rule, for the paper's
            layer (no biases; output projection included).
        macs: multiply-adds in matrix products of what the reference runs.
        num_parameters: parameters of this layer, biases included.
    """

    paper_flops: int
    macs: int
    num_parameters: int


class Attention(nn.Module):
    """Multi-head attention with a head size of its own; base of every variant.

    Calling it: `attention(query, key=None, value=None, *, key_mask, attn_mask, is_causal, bias,
    cache, rng)` maps (B, N, C) to (B, N, C). `key=None` means self-attention, `value=None` means
    value = key. Masks follow `lit_probattn.attention.masks`.

    Args:
        embed_dim: C, input and output width.
        head_dim: E, size of one head. Independent of `embed_dim` and `num_heads`.
        num_heads: H, query heads.
        num_kv_heads: key/value heads; consecutive groups of query heads share one. None means H,
            1 is multi-query attention.
        key_embed_dim: width of `key` and `value` in cross-attention. None means C.
        value_head_dim: E_v, size of a value head. None means E.
        bias: whether the four projections have biases.
        dropout: probability of dropping an attention weight in training, in [0, 1).
        backend: who computes it; see `lit_probattn.attention.backends`.
        rotary_dim: entries of a head that rotary positions turn; 0 for no rotary positions.
        rotary_base: base of the angles.

    Raises:
        ValueError: a size is not positive, `num_kv_heads` does not divide `num_heads`, `dropout`
            is outside [0, 1), or `backend` is unknown.
    """

    variant: ClassVar[str]
    backends: ClassVar[Mapping[str, BackendFunction]]
    # What `auto` chooses on each type of device.
    auto_rules: ClassVar[Mapping[str, AutoRule]] = AUTO_RULES
    # Score tensors per head that the reference stores; for the choice of backend.
    score_maps: int = 1
    # Whether `cached_scores` exists: short calls with a cache then read it part by part.
    steps_over_cache: ClassVar[bool] = False
    # Added to the sum of exponentials of every row (released language-modelling code: 1e-6).
    row_eps: float = 0.0

    def __init__(
        self,
        embed_dim: int,
        head_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        key_embed_dim: int | None = None,
        value_head_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        backend: Backend = "auto",
        rotary_dim: int = 0,
        rotary_base: float = 10000.0,
    ) -> None:
        super().__init__()
        self.embed_dim, self.head_dim, self.num_heads = embed_dim, head_dim, num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.key_embed_dim = embed_dim if key_embed_dim is None else key_embed_dim
        self.value_head_dim = head_dim if value_head_dim is None else value_head_dim
        for name in (
            *("embed_dim", "head_dim", "num_heads", "num_kv_heads"),
            *("key_embed_dim", "value_head_dim"),
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, received {getattr(self, name)}")
        if num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads, received num_kv_heads={self.num_kv_heads} "
                f"and num_heads={num_heads}"
            )
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), received {dropout}")
        if backend not in BACKENDS:
            raise ValueError(f"unknown backend {backend!r}; expected one of {', '.join(BACKENDS)}")
        self.dropout, self.backend, self.use_bias = dropout, backend, bias
        self.rotary = Rotary(rotary_dim, head_dim, rotary_base) if rotary_dim else None
        inner = self.num_value_heads * self.value_head_dim
        self.query_proj = nn.Linear(embed_dim, self.num_query_heads * head_dim, bias=bias)
        self.key_proj = nn.Linear(self.key_embed_dim, self.key_width, bias=bias)
        self.value_proj = nn.Linear(self.key_embed_dim, inner, bias=bias)
        self.out_proj = nn.Linear(num_heads * self.value_head_dim, embed_dim, bias=bias)

    @property
    def num_query_heads(self) -> int:
        """Heads that queries are projected to."""
        return self.num_heads

    @property
    def num_value_heads(self) -> int:
        """Heads that values are projected to."""
        return self.num_kv_heads

    @property
    def key_width(self) -> int:
        """Output width of `key_proj`."""
        return self.num_kv_heads * self.head_dim

    # ------------------------------------------------------------------ the variant's part
    def split_keys(self, key: Tensor) -> Tensor:
        """Split projected keys into what the cache stores: (B, L, width) -> (B, H_kv, …, L, E)."""
        return _split_heads(key, self.num_kv_heads)

    def expand_keys(self, key: Tensor) -> Tensor:
        """Turn stored keys into the keys that scores see."""
        return key

    def keys_for(self, backend: str, key: Tensor) -> Tensor:
        """Turn stored keys into what a backend takes; `expand_keys` unless it does better."""
        return self.expand_keys(key)

    @abstractmethod
    def score_arguments(self, num_keys: int) -> dict[str, Any]:
        """Return the variant's own arguments of its backend functions, for L keys."""

    def random_arguments(self, rng: RandomKey | None, first_row: int) -> dict[str, Any]:
        """Return what a variant draws for one call, as arguments of its backend functions.

        Args:
            rng: names the draw; None leaves the choice to the variant.
            first_row: position of the first query among all tokens (0 without a cache).
        """
        return {}

    @abstractmethod
    def reference_scores(self, query: Tensor, key: Tensor, **arguments: Any) -> Tensor:
        """Return the scores before mask and softmax, (B, H, N, L), by the equation."""

    @abstractmethod
    def cost(self, seq_len: int) -> Cost:
        """Return the analytic cost of self-attention over `seq_len` tokens."""

    def unsupported(self, backend: str, call: Call) -> str | None:
        """Say why a backend cannot serve a call ("cannot …"), or None if it can."""
        if backend == "sdpa" and call.dropout:
            return "cannot draw the counter-based attention dropout"
        if backend == "sdpa" and call.bias_needs_grad:
            return "cannot give a gradient to the additive bias without storing all scores"
        if backend == "triton":
            sizes = (self.head_dim, self.value_head_dim)
            return kernel_refusal(self.variant, call, *sizes, bias_gradient=True)
        return None

    @property
    def observes(self) -> bool:
        """Whether `observe` wants to see training calls."""
        return False

    def observe(self, query: Tensor, key: Tensor, masks: Masks, query_mask: Tensor | None) -> None:
        """Hook in training mode, before the output is computed; setting B gathers its sums here."""

    # ------------------------------------------------------------------ decoding
    def new_cache(self, capacity: int = 0) -> Cache:
        """Return an empty memory for decoding, with room for `capacity` positions."""
        return KVCache(capacity, store_offsets=True)

    def key_offset(self, key: Tensor, first_position: int) -> Tensor | None:
        """Return what stored keys add to their scores, for the cache to keep; (B, …, L) or None."""
        return None

    def cached_scores(
        self, query: Tensor, key: Tensor, offset: Tensor | None, cols: range, num_keys: int
    ) -> Tensor:
        """Return the scores of a part of the cache, (B, H, N, len(cols)).

        Args:
            query: (B, H, N, E) in the compute dtype.
            key: stored keys of the part, in the compute dtype.
            offset: stored offsets of the part, if the cache keeps them.
            cols: positions of the part.
            num_keys: positions in the whole cache.
        """
        raise NotImplementedError(f"{self.variant} does not read a cache in parts")

    def run(
        self,
        backend: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        masks: Masks,
        dropout: AttentionDropout | None,
        arguments: dict[str, Any],
        cache: Cache | None,
    ) -> Tensor:
        """Compute the heads' outputs, (B, H, N, E_v), by the chosen backend."""
        return self.backends[backend](query, key, value, masks=masks, dropout=dropout, **arguments)

    def _reads_parts(self, cache: Cache | None, num_queries: int) -> bool:
        """Whether this call reads the cache part by part instead of through a backend."""
        return (
            self.steps_over_cache
            and isinstance(cache, KVCache)
            and self.backend == "auto"
            and not self.training
            and num_queries <= STEP_QUERIES
        )

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
    ) -> Tensor:
        """Attend.

        Args:
            query: (B, N, C).
            key: (B, L, C_k). None means self-attention.
            value: (B, L, C_k). None means `key`.
            key_mask: real keys, (B, L) bool; with a cache, of the new tokens.
            attn_mask: allowed pairs, bool, (N, L) or broadcastable to (B, H, N, L).
            is_causal: bottom-right aligned causal mask.
            bias: added to the scores, (N, L) or broadcastable to (B, H, N, L).
            cache: memory of earlier tokens, from `new_cache`; the new ones are appended.
            rng: names the draw of attention dropout and of a variant's noise. None draws a fresh
                one from torch's generator.

        Returns:
            (B, N, C).

        Raises:
            ValueError: sizes do not fit; the message gives both.
            NotImplementedError: the requested backend cannot serve the call.
        """
        is_self = key is None
        q, k, v, masks = self._prepare(
            query, key, value, key_mask, attn_mask, is_causal, bias, cache
        )
        if isinstance(cache, KVCache) and self._reads_parts(cache, q.shape[2]):
            with autocast_off(q):
                out = attend_to_cache(self, q, cache, masks)
            stepped: Tensor = self.out_proj(out.to(q.dtype).transpose(1, 2).flatten(2))
            return stepped
        dropout = self._dropout(rng)
        call = Call(
            device=q.device.type,
            dtype=q.dtype,
            num_scores=q.shape[0] * self.num_heads * q.shape[2] * v.shape[2] * self.score_maps,
            dropout=dropout is not None,
            bias_needs_grad=bias is not None and bias.requires_grad and torch.is_grad_enabled(),
            attn_mask=attn_mask is not None,
            recurrent=cache is not None and not isinstance(cache, KVCache),
        )
        name = choose_backend(
            self.variant, self.backend, self.backends, self.unsupported, call, self.auto_rules
        )
        if self.training and self.observes:
            token_mask = key_mask if is_self and cache is None else None
            self.observe(q, self.expand_keys(k), masks, token_mask)
        k = self.keys_for(name, k)
        with autocast_off(q):
            arguments = self.score_arguments(v.shape[2])
            first_row = 0 if cache is None else v.shape[2] - q.shape[2]
            arguments.update(self.random_arguments(rng, first_row))
            out = self.run(
                name, q, k, v, masks=masks, dropout=dropout, arguments=arguments, cache=cache
            )
        result: Tensor = self.out_proj(out.to(q.dtype).transpose(1, 2).flatten(2))
        return result

    def weights(
        self,
        query: Tensor,
        key: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return the maps (B, H, N, L) by the reference, without dropout; for analysis."""
        call = {"key_mask": key_mask, "attn_mask": attn_mask, "is_causal": is_causal, "bias": bias}
        q, k, masks = self.project(query, key, **call)
        with autocast_off(q):
            scores = self.reference_scores(q, k, **self.score_arguments(masks.num_keys))
            return reference_weights(scores, masks, self.row_eps)

    def project(
        self, query: Tensor, key: Tensor | None = None, **call: Any
    ) -> tuple[Tensor, Tensor, Masks]:
        """Return queries, the keys that scores see, and the masks of a call; for analysis.

        Args:
            query: (B, N, C).
            key: (B, L, C_k). None means self-attention.
            call: key_mask, attn_mask, is_causal and bias as in `forward`.

        Returns:
            query (B, H_q, N, E) and key (B, H_kv, …, L, E) in at least float32, and the masks.
        """
        key_mask, attn_mask, bias = (call.get(name) for name in ("key_mask", "attn_mask", "bias"))
        is_causal = bool(call.get("is_causal", False))
        q, k, _, masks = self._prepare(query, key, None, key_mask, attn_mask, is_causal, bias, None)
        with autocast_off(q):
            return q.to(compute_dtype(q)), self.expand_keys(k).to(compute_dtype(q)), masks

    def _prepare(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        bias: Tensor | None,
        cache: Cache | None,
    ) -> tuple[Tensor, Tensor, Tensor, Masks]:
        """Check the inputs, project them, split heads, append to the cache, build the masks.

        The keys are those that a cache stores; `expand_keys` makes of them what scores see.
        """
        if key is None and value is not None:
            raise ValueError("value is given without key; pass both, or neither for self-attention")
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
        q = _split_heads(self.query_proj(query), self.num_query_heads)
        k = self.split_keys(self.key_proj(key))
        v = _split_heads(self.value_proj(value), self.num_value_heads)
        first = 0 if cache is None else cache.length
        if self.rotary is not None:
            k = self.rotary(k, first)
            q = self.rotary(q, first + k.shape[-2] - q.shape[-2])
        if cache is not None:
            if key_mask is not None and key_mask.shape != key.shape[:2]:
                raise ValueError(
                    f"key_mask has shape {tuple(key_mask.shape)}; with a cache it covers the "
                    f"{key.shape[1]} new tokens: expected {tuple(key.shape[:2])}"
                )
            offset = self.key_offset(k, first) if cache.store_offsets else None
            k, v, key_mask = cache.append(k, v, key_mask, offset)
        masks = make_masks(
            *(q.shape[0], self.num_heads, q.shape[2], v.shape[2]),
            key_mask=key_mask,
            attn_mask=attn_mask,
            is_causal=is_causal,
            bias=bias,
        )
        return q, k, v, masks

    def _dropout(self, rng: RandomKey | None) -> AttentionDropout | None:
        if not self.training or self.dropout == 0.0:
            return None
        if rng is None:
            rng = RandomKey(int(torch.randint(2**62, (1,))))
        return AttentionDropout(self.dropout, rng)

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        return (
            f"embed_dim={self.embed_dim}, head_dim={self.head_dim}, num_heads={self.num_heads}, "
            f"num_kv_heads={self.num_kv_heads}, dropout={self.dropout}, backend={self.backend!r}"
        )


AttentionFactory = Callable[[int, int], Attention]


def _split_heads(projected: Tensor, num_heads: int) -> Tensor:
    """(B, N, H·E) -> (B, H, N, E)."""
    return projected.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def _check_input(name: str, tensor: Tensor, width: int) -> None:
    if tensor.dim() != 3 or tensor.shape[-1] != width:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, expected (batch, positions, {width})"
        )


def attend_to_cache(layer: Attention, query: Tensor, cache: KVCache, masks: Masks) -> Tensor:
    """Attend from a few new queries to everything cached, part by part.

    Args:
        layer: gives the scores of a part through `cached_scores`.
        query: (B, H, N, E).
        cache: what was appended, the new tokens included.
        masks: over all cached positions.

    Returns:
        (B, H, N, E_v), in at least float32.
    """
    dtype = compute_dtype(query)
    query, rows = query.to(dtype), masks.all_rows
    outputs, normalisers = [], []
    for cols in cache.parts():
        key, value, offset = cache.part(cols)
        scores = layer.cached_scores(query, key.to(dtype), offset, cols, cache.length)
        bias = masks.bias_block(rows, cols)
        if bias is not None:
            scores = scores + bias
        allowed = masks.allowed(rows, cols, query.device)
        output, normaliser = partial_attention(scores, value.to(dtype), allowed)
        outputs.append(output)
        normalisers.append(normaliser)
    if layer.row_eps:
        outputs.append(torch.zeros_like(outputs[0]))
        normalisers.append(torch.full_like(normalisers[0], math.log(layer.row_eps)))
    return merge_partials(outputs, normalisers)[0]
