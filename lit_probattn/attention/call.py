"""One call of attention, projected and split into heads."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lit_probattn.attention.cache import Cache, KVCache
from lit_probattn.attention.draws import fresh_key, philox_words
from lit_probattn.attention.masks import Masks
from lit_probattn.attention.numerics import compute_dtype
from lit_probattn.attention.packing import Packing
from lit_probattn.base.graphs import Graph, is_symbol, is_transformed, written
from lit_probattn.base.memory import device_type
from lit_probattn.randomness import STREAM_DROPOUT, AttentionDropout, RandomKey


@dataclass(frozen=True)
class HeadLayout:
    """Number and size of the heads that the projections produce.

    Args:
        query: query heads: H; G in FiSH.
        key: key heads: H_kv; G in FiSH.
        value: value heads: H_kv; H in FiSH, G in its linear form with global values.
        out: heads of masks, bias and output: H.
        head_dim: E, size of a query or key head.
        value_head_dim: E_v, size of a value head.
        keys_per_head: keys per position and key head: K in MGK and MLK; 1 with shifted keys.
        gated: heads after the layer's `gate`, which the output projection reads. None means `out`.
    """

    query: int
    key: int
    value: int
    out: int
    head_dim: int
    value_head_dim: int
    keys_per_head: int = 1
    gated: int | None = None

    @property
    def projected(self) -> int:
        """Heads that the output projection reads."""
        return self.out if self.gated is None else self.gated


def check_scale(scale: float | None) -> None:
    """Raise a ValueError unless a scale is positive and finite: kernels would return NaN."""
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, received {scale}")


@dataclass(frozen=True)
class HeadCall:
    """One call of attention, projected and split into heads.

    Args:
        query: (B, H_q, N, E), rotated if the layer has rotary positions.
        key: keys as stored: (B, H_k, L, E), or (B, H_k, K, L, E) with K keys per head. The K keys
            may also be heads, (B, H_k·K, L, E), with the keys of one head adjacent.
        value: (B, H_v, L, E_v).
        masks: allowed pairs of all L keys.
        scale: factor on the products of queries and keys, positive. None means 1/√E.
        dropout: attention dropout of this call.
        rng: identifies the draw of a variant's noise. With None the variant chooses.
        cache: decoding cache that key and value come from, including the new tokens.
        query_mask: real queries, (B, N) bool, for the M-step. None means all.
        output_mask: queries whose output is needed, (B, N) bool; that of others is not used, and an
            engine may skip it. None means all.
        first_query: position of the first query, if it does not follow from the cache.
        first_key: position of the first key, if the keys are a part of the keys of the masks. None
            means all keys.
        num_terms: number of leading keys whose terms β are in the cache.
        fused: whether the engine is one of this package's kernels, so that the normal form may use
            kernels as well.
        packing: documents of the tokens, each of which attends only to itself. None means that each
            row is one document. Only the masks `key_mask` and `is_causal` are supported with it.
        side: features of each query for the hooks of a variant, (B, …, N, S).
        on: device type of an outline; None means the device of the tensors.

    Raises:
        ValueError: `scale` is not positive and finite.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    masks: Masks
    scale: float | None = None
    dropout: AttentionDropout | None = None
    rng: RandomKey | None = None
    cache: Cache | None = None
    query_mask: Tensor | None = None
    output_mask: Tensor | None = None
    first_query: int | None = None
    first_key: int | None = None
    num_terms: int = 0
    fused: bool = False
    packing: Packing | None = None
    side: Tensor | None = None
    on: str | None = None

    def __post_init__(self) -> None:
        """Check the scale."""
        check_scale(self.scale)

    @property
    def heads(self) -> tuple[Tensor, Tensor, Tensor, Masks, AttentionDropout | None]:
        """Query, key, value, masks and dropout."""
        return self.query, self.key, self.value, self.masks, self.dropout

    def precise(self) -> HeadCall:
        """Return the call with heads in the dtype of scores and sums, at least float32."""
        dtype = compute_dtype(self.query)
        query, key, value = (x.to(dtype) for x in (self.query, self.key, self.value))
        side = None if self.side is None else self.side.to(dtype)
        return replace(self, query=query, key=key, value=value, side=side)

    @property
    def first_row(self) -> int:
        """Position of the first query among all tokens, which identifies its noise."""
        if self.first_query is not None:
            return self.first_query
        return 0 if self.cache is None else self.masks.num_keys - self.masks.num_queries

    def refuse_documents(self, what: str) -> None:
        """Raise if the call is packed, for functions that process one row at a time.

        Raises:
            NotImplementedError: the call is packed; the message starts with `what`.
        """
        if self.packing is not None:
            raise NotImplementedError(
                f"{what} of packed documents are not supported: call it for each document"
            )

    def scale_ratio(self) -> float:
        """Return `scale` in units of 1/√E; 1 if it is None."""
        return 1.0 if self.scale is None else self.scale * self.query.shape[-1] ** 0.5

    # ------------------------------------------------------------------ inputs of backend selection
    @property
    def device(self) -> str:
        """Device type, `cpu` or `cuda`."""
        return self.on or device_type(self.query.device)

    @property
    def num_keys(self) -> int:
        """L."""
        return self.value.shape[2]

    @property
    def num_scores(self) -> int:
        """Number of scores, B · H · N · L."""
        heads = max(self.query.shape[1], self.value.shape[1])
        return self.query.shape[0] * heads * self.query.shape[2] * self.num_keys

    @property
    def bias_needs_grad(self) -> bool:
        """Whether an additive bias needs a gradient."""
        bias = self.masks.bias
        return bias is not None and bias.requires_grad and torch.is_grad_enabled()

    @property
    def graph(self) -> Graph | None:
        """The kind of graph that records the call, or None."""
        return written()

    @property
    def is_dynamic(self) -> bool:
        """Whether a graph of the call is for a dynamic number of positions."""
        return is_symbol(self.masks.num_queries) or is_symbol(self.masks.num_keys)

    def features(self) -> list[str]:
        """Return the needed features that not every engine has; see `Engine.lacks`."""
        cache = self.cache
        found = {
            "transform": is_transformed(),
            "exported": self.graph == "exported",
            "dynamic": self.is_dynamic,
            "dropout": self.dropout is not None,
            "bias gradient": self.bias_needs_grad,
            "pair mask": self.masks.attn_mask is not None,
            "state": cache is not None and not isinstance(cache, KVCache),
        }
        return [name for name, needed in found.items() if needed]


def outline(
    layout: HeadLayout,
    batch_size: int,
    num_queries: int,
    num_keys: int,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    dropout: bool = False,
) -> HeadCall:
    """Return a call with sizes and without data, for the choice of a backend."""
    components = (layout.keys_per_head,) if layout.keys_per_head > 1 else ()

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    return HeadCall(
        empty(batch_size, layout.query, num_queries, layout.head_dim),
        empty(batch_size, layout.key, *components, num_keys, layout.head_dim),
        empty(batch_size, layout.value, num_keys, layout.value_head_dim),
        Masks(num_queries, num_keys),
        dropout=AttentionDropout(0.1, RandomKey(0)) if dropout else None,
        rng=RandomKey(0),
        on=device,
    )


def check_heads(call: HeadCall, layout: HeadLayout, name: str, has_components: bool) -> None:
    """Raise if the heads of a call do not match a layout.

    Args:
        call: the call.
        layout: number and sizes of heads.
        name: name of the variant, for messages.
        has_components: whether keys may have a separate dimension of K components if K = 1.

    Raises:
        ValueError: the heads do not match; the message contains the expected heads.
    """
    keys = layout.keys_per_head
    for kind, tensor, count, size in (
        ("query", call.query, layout.query, layout.head_dim),
        ("key", call.key, layout.key, layout.head_dim),
        ("value", call.value, layout.value, layout.value_head_dim),
    ):
        found = tuple(tensor.shape[1:-2])
        if kind == "key":  # several keys per head are adjacent heads, or a separate dimension
            whole = keys > 1 or has_components
            right = found == (count * keys,) or (whole and found == (count, keys))
            wanted = f"{count} x {keys}" if len(found) > 1 else f"{count * keys}"
        else:
            right, wanted = found == (count,), f"{count}"
        if not right:
            given = " x ".join(map(str, found))
            raise ValueError(
                f"{kind} has {given} heads, expected {wanted}: this {name} attention has "
                f"{layout.query} query, {layout.key} key with {keys} keys each, {layout.value} "
                "value heads"
            )
        if tensor.shape[-1] != size:
            raise ValueError(f"{kind} has heads of size {tensor.shape[-1]}, expected {size}")


def check_components(layout: HeadLayout, num_components: int, shifted: bool) -> None:
    """Check that a layout has K keys per head, or one key that is shifted K times.

    Raises:
        ValueError: `keys_per_head` has another value.
    """
    expected = 1 if shifted else num_components
    if layout.keys_per_head != expected:
        raise ValueError(
            f"the layout has keys_per_head={layout.keys_per_head}, expected {expected} with "
            f"num_components={num_components} and shifted_keys={shifted}"
        )


def key_or_fresh(rng: RandomKey | None) -> RandomKey:
    """Return the key, or a new one from torch's generator if a call has none."""
    return fresh_key() if rng is None else rng


def with_dropout(call: HeadCall, p: float) -> HeadCall:
    """Return the call with attention dropout of probability `p`.

    The draw uses the call's key, or one from torch's generator, so that checkpointing repeats it.
    """
    if not p:
        return call
    return replace(call, dropout=AttentionDropout(p, key_or_fresh(call.rng)))


def pair_arguments(call: HeadCall) -> dict[str, Any]:
    """Return masks, bias and dropout as arguments of the kernels."""
    masks, dropout, draw = call.masks, call.dropout, None
    if dropout is not None:
        sizes = len(call.query), call.query.device
        draw = philox_words(dropout.key, STREAM_DROPOUT, *sizes)
    return {
        "bias": masks.bias,
        "key_mask": masks.key_mask,
        "query_mask": call.output_mask,
        "pair_mask": masks.attn_mask,
        "is_causal": masks.is_causal,
        "draw": draw,
        "threshold": 0 if dropout is None else dropout.threshold,
    }
