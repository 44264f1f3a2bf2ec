"""One call of attention, projected and split into heads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lit_probattn.attention.cache import Cache, KVCache
from lit_probattn.attention.draws import fresh_key
from lit_probattn.attention.masks import Masks
from lit_probattn.attention.numerics import compute_dtype
from lit_probattn.attention.packing import Packing
from lit_probattn.base.graphs import Graph, is_symbol, is_transformed, written
from lit_probattn.base.memory import device_type
from lit_probattn.randomness import AttentionDropout, RandomKey


@dataclass(frozen=True)
class HeadLayout:
    """How many heads the projections make, and of which size.

    Args:
        query: query heads: H; G in FiSH.
        key: key heads: H_kv; G in FiSH.
        value: value heads: H_kv; H in FiSH, G where its linear form has global values.
        out: heads of masks, bias and output: H.
        head_dim: E, size of a query or key head.
        value_head_dim: E_v, size of a value head.
        keys_per_head: keys of a position in each key head: K in MGK and MLK; 1 with shifted keys.
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


@dataclass(frozen=True)
class HeadCall:
    """One call of attention, projected and split into heads.

    Args:
        query: (B, H_q, N, E), rotated if positions are.
        key: as it is stored: (B, H_k, L, E), or (B, H_k, K, L, E) with K keys per head. The K keys
            may also come as further heads, (B, H_k·K, L, E), the keys of one head side by side.
        value: (B, H_v, L, E_v).
        masks: what each query may see, over all L keys.
        scale: factor on the products of queries and keys. None means 1/√E.
        dropout: attention dropout of this call.
        rng: names the draw of a variant's noise. None leaves the choice to the variant.
        cache: memory that query, key and value come from, the new tokens included.
        query_mask: real queries, (B, N) bool, for the M-step. None means all.
        first_query: position of the first query, where it does not follow from the cache.
        first_key: position of the first key, where the keys are a part of those that the masks are
            for. None means they are all.
        num_terms: how many of these keys, the first, have their terms β in the cache.
        fused: whether the engine is kernels of ours, so that the normal form may be one, too.
        packing: documents of the tokens, each of which attends to itself alone. None means that a
            row is one. Other masks than `key_mask` and `is_causal` are refused beside it.
        side: what a variant's hooks read of each query beside its heads, (B, …, N, S).
        on: type of device that the call is an outline for; None means that of the tensors.
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
    first_query: int | None = None
    first_key: int | None = None
    num_terms: int = 0
    fused: bool = False
    packing: Packing | None = None
    side: Tensor | None = None
    on: str | None = None

    @property
    def heads(self) -> tuple[Tensor, Tensor, Tensor, Masks, AttentionDropout | None]:
        """Query, key, value, masks and dropout."""
        return self.query, self.key, self.value, self.masks, self.dropout

    def precise(self) -> HeadCall:
        """Return it with the heads in the dtype of scores and sums, at least float32."""
        dtype = compute_dtype(self.query)
        query, key, value = (x.to(dtype) for x in (self.query, self.key, self.value))
        side = None if self.side is None else self.side.to(dtype)
        return replace(self, query=query, key=key, value=value, side=side)

    @property
    def first_row(self) -> int:
        """Position of the first query among all tokens, which noise is keyed by."""
        if self.first_query is not None:
            return self.first_query
        return 0 if self.cache is None else self.masks.num_keys - self.masks.num_queries

    def refuse_documents(self, what: str) -> None:
        """Refuse packed documents where only one row at a time can be looked at.

        Raises:
            NotImplementedError: the call is packed; the message begins with `what`.
        """
        if self.packing is not None:
            raise NotImplementedError(
                f"{what} of packed documents are not computed: ask for those of each document"
            )

    def scale_ratio(self) -> float:
        """Return `scale` in units of 1/√E; 1 where it is not given."""
        return 1.0 if self.scale is None else self.scale * self.query.shape[-1] ** 0.5

    # ------------------------------------------------------------------ what the choice depends on
    @property
    def device(self) -> str:
        """Type of device, `cpu` or `cuda`."""
        return self.on or device_type(self.query.device)

    @property
    def num_keys(self) -> int:
        """L."""
        return self.value.shape[2]

    @property
    def num_scores(self) -> int:
        """Entries of one map per head, B · H · N · L."""
        heads = max(self.query.shape[1], self.value.shape[1])
        return self.query.shape[0] * heads * self.query.shape[2] * self.num_keys

    @property
    def bias_needs_grad(self) -> bool:
        """Whether an additive bias needs a gradient."""
        bias = self.masks.bias
        return bias is not None and bias.requires_grad and torch.is_grad_enabled()

    @property
    def graph(self) -> Graph | None:
        """Who records the call into a graph, if anybody does."""
        return written()

    @property
    def is_dynamic(self) -> bool:
        """Whether a graph of the call is for any number of positions: nothing can be counted."""
        return is_symbol(self.masks.num_queries) or is_symbol(self.masks.num_keys)

    def features(self) -> list[str]:
        """Return what the call needs that not every engine has; see `backends.Engine.lacks`."""
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
    """Return a call that has sizes and no numbers, for a choice of backend on some device."""
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
    """Refuse a call whose heads are not those of a layout.

    Args:
        call: the call.
        layout: number and sizes of heads.
        name: of the variant, for messages.
        has_components: whether K keys of a head may come in a dimension of their own where K = 1.

    Raises:
        ValueError: it says what is expected instead.
    """
    keys = layout.keys_per_head
    for kind, tensor, count, size in (
        ("query", call.query, layout.query, layout.head_dim),
        ("key", call.key, layout.key, layout.head_dim),
        ("value", call.value, layout.value, layout.value_head_dim),
    ):
        found = tuple(tensor.shape[1:-2])
        if kind == "key":  # with several keys per head, side by side or in a dimension
            whole = keys > 1 or has_components
            right = found == (count * keys,) or (whole and found == (count, keys))
            wanted = f"{count} x {keys}" if len(found) > 1 else f"{count * keys}"
        else:
            right, wanted = found == (count,), f"{count}"
        if not right:
            given = " x ".join(map(str, found))
            raise ValueError(
                f"{kind} has {given} heads, expected {wanted}: {name} attention here takes "
                f"{layout.query} query, {layout.key} key with {keys} keys each, {layout.value} "
                "value heads"
            )
        if tensor.shape[-1] != size:
            raise ValueError(f"{kind} has heads of size {tensor.shape[-1]}, expected {size}")


def check_components(layout: HeadLayout, num_components: int, shifted: bool) -> None:
    """Check that a layout has K keys per head, or one that is shifted K times.

    Raises:
        ValueError: it has another number.
    """
    expected = 1 if shifted else num_components
    if layout.keys_per_head != expected:
        raise ValueError(
            f"the layout has keys_per_head={layout.keys_per_head}, expected {expected} with "
            f"num_components={num_components} and shifted_keys={shifted}"
        )


def key_or_fresh(rng: RandomKey | None) -> RandomKey:
    """Return the key, or one from torch's generator where a call names none."""
    return fresh_key() if rng is None else rng


def with_dropout(call: HeadCall, p: float) -> HeadCall:
    """Return the call with every weight dropped with probability `p`.

    The draw is the call's, or from torch's generator, so that checkpointing repeats it.
    """
    if not p:
        return call
    return replace(call, dropout=AttentionDropout(p, key_or_fresh(call.rng)))
