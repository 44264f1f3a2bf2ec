"""A call with the conventions of `scaled_dot_product_attention`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lit_probattn.attention.backends import Backend, attend
from lit_probattn.attention.call import HeadCall, HeadLayout, with_dropout
from lit_probattn.attention.engines.documents import attend_to_documents
from lit_probattn.attention.masks import Masks, make_masks
from lit_probattn.attention.packing import Packing, packing_of, refuse_beside_documents
from lit_probattn.attention.variant import Variant
from lit_probattn.base.graphs import reject_nested
from lit_probattn.randomness import RandomKey


def attend_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
    variant_of: Callable[[HeadCall], Variant],
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    backend: Backend,
    rng: RandomKey | None,
    cu_seqlens: Tensor | Packing | None,
    cu_seqlens_k: Tensor | None,
    *,
    has_scores: bool = True,
) -> Tensor:
    """Return attention of heads, (B, H, N, E_v); see `lit_probattn.functional`.

    Args:
        num_heads: H.
        variant_of: returns the variant of a call; a packed call is one for each group of documents.
        has_scores: whether the variant has scores before a softmax.

    Raises:
        ValueError: the probability is outside [0, 1), the mask or the bounds of documents do not
            match, or there are both.
    """
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), received {dropout_p}")
    packing = packing_of(cu_seqlens, cu_seqlens_k)
    if packing is not None:
        refuse_beside_documents(attn_mask=attn_mask)
        packing.check(query.shape[0], query.shape[2], value.shape[2])

    def compute(call: HeadCall) -> Tensor:
        call = replace(call, masks=_aligned_first(call.masks, query.device))
        call = with_dropout(call, dropout_p)
        return attend(call, variant_of(call), backend)

    key, value = key.to(query.dtype), value.to(query.dtype)  # which differ only under autocast
    given: dict[str, Any] = {"mask": attn_mask, "is_causal": is_causal, "packing": packing}
    call = head_call(query, key, value, num_heads, scale=scale, rng=rng, **given)
    if packing is None:
        return compute(call)
    return attend_to_documents(compute, call, num_heads, pads=True, has_scores=has_scores)


def head_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_heads: int,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    rng: RandomKey | None = None,
    packing: Packing | None = None,
    look: bool = False,
) -> HeadCall:
    """Return a call with the masks of another library.

    Args:
        query: (B, H_q, N, E).
        key: (B, H_kv·K, L, E), with the components of a head adjacent, or (B, H_kv, K, L, E).
        value: (B, H_kv, L, E_v).
        num_heads: H, heads of the output.
        mask: mask in the form of `split_mask`, broadcastable to (B, H, N, L).
        bias: added to the scores, broadcastable to (B, H, N, L).
        is_causal: query i attends to keys up to i + L − N.
        scale: factor on products. None means 1/√E.
        rng: identifies draws.
        packing: documents, each of which attends only to itself.
        look: whether to read the values of masks: zeros are no bias, and equal rows are a mask of
            keys.
    """
    allowed, added = split_mask(mask)
    if added is not None and not (look and is_zero(added)):
        bias = added if bias is None else bias + added
    if bias is not None:
        bias = bias.to(query.dtype)
    keys, batch_size = None, query.shape[0]
    if allowed is not None and allowed.dim() == 4 and allowed.shape[-1] == value.shape[2]:
        first = allowed[:, :1, :1]
        is_of_keys = first.shape == allowed.shape or (look and bool((allowed == first).all()))
        if is_of_keys and first.shape[0] in (1, batch_size):
            keys, allowed = first[:, 0, 0].expand(batch_size, -1), None
    sizes = (batch_size, num_heads, query.shape[2], value.shape[2])
    masks = make_masks(*sizes, key_mask=keys, attn_mask=allowed, bias=bias, is_causal=is_causal)
    return HeadCall(query, key, value, masks, scale=scale, rng=rng, packing=packing)


def is_zero(added: Tensor) -> bool:
    """Whether floats that are added to scores are constant zeros."""
    return not added.requires_grad and not bool(added.any())


def _aligned_first(masks: Masks, device: torch.device) -> Masks:
    """Align a causal mask at the first query and key, as torch does; masks align at the last."""
    sizes = masks.num_queries, masks.num_keys
    if not masks.is_causal or sizes[0] == sizes[1]:
        return masks
    causal = torch.ones(1, 1, *sizes, dtype=torch.bool, device=device).tril()
    pairs = causal if masks.attn_mask is None else masks.attn_mask & causal
    return replace(masks, attn_mask=pairs, is_causal=False)


def split_mask(mask: Tensor | None, name: str = "attn_mask") -> tuple[Tensor | None, Tensor | None]:
    """Split a mask of `scaled_dot_product_attention` into allowed pairs and a bias.

    A boolean mask is True where a pair may attend. Floats are added; -inf and the lowest value of
    the dtype mask a pair. No value is read on the host, so that devices do not synchronise and
    compiled graphs do not break.
    """
    if mask is None or mask.dtype == torch.bool:
        return mask, None
    if not mask.is_floating_point():
        raise ValueError(f"{name} has dtype {mask.dtype}, expected bool or floating point")
    hidden = mask <= torch.finfo(mask.dtype).min
    return ~hidden, mask.masked_fill(hidden, 0.0)


def layout_of(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool = False, keys_per_head: int = 1
) -> HeadLayout:
    """Return the heads of a call whose queries have as many heads as the output.

    Args:
        query: (B, H, N, E).
        key: (B, H_kv, L, E), or (B, H_kv, K, L, E) with K keys per head.
        value: (B, H_kv, L, E_v).
        enable_gqa: whether H_kv may be a divisor of H.
        keys_per_head: K.

    Raises:
        ValueError: the shapes do not match.
    """
    check_heads(query, key, value, keys_per_head)
    heads, kv = query.shape[1], key.shape[1]
    if value.shape[1] != kv:
        raise ValueError(f"key has {kv} heads and value {value.shape[1]}: expected the same")
    if heads != kv and not enable_gqa:
        raise ValueError(
            f"query has {heads} heads and key {kv}: expected the same, or enable_gqa=True"
        )
    if heads % kv:
        raise ValueError(f"query has {heads} heads, expected a multiple of the key's {kv}")
    return HeadLayout(heads, kv, kv, heads, query.shape[3], value.shape[3], keys_per_head)


def check_heads(query: Tensor, key: Tensor, value: Tensor, keys_per_head: int = 1) -> None:
    """Check the rules of all variants: dtypes, dimensions, batch, positions, head size.

    Raises:
        ValueError: dtypes or shapes do not match.
        NotImplementedError: a tensor is nested.
    """
    mixed = torch.is_autocast_enabled(query.device.type) if query.device.type != "meta" else False
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not tensor.is_floating_point():
            raise ValueError(f"{name} has dtype {tensor.dtype}, expected floating-point numbers")
        if tensor.dtype != query.dtype and not mixed:
            raise ValueError(
                f"{name} has dtype {tensor.dtype} and query {query.dtype}: expected the same"
            )
    dims = 4 if keys_per_head == 1 and key.dim() != 5 else 5
    wanted = "(B, heads, positions, size)"
    for name, tensor, count in (("query", query, 4), ("key", key, dims), ("value", value, 4)):
        reject_nested(name, tensor)
        if tensor.dim() != count:
            form = wanted if count == 4 else "(B, heads, components, positions, size)"
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {form}")
        if tensor.shape[1] == 0 or (tensor.shape[-1] == 0 and name != "value"):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, expected at least one head and one "
                "feature"
            )
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        raise ValueError(
            f"query, key and value have batch sizes {query.shape[0]}, {key.shape[0]} and "
            f"{value.shape[0]}: expected the same"
        )
    if key.shape[-2] != value.shape[2]:
        raise ValueError(
            f"key has {key.shape[-2]} positions and value {value.shape[2]}: expected the same"
        )
    if query.shape[3] != key.shape[-1]:
        raise ValueError(
            f"query has heads of size {query.shape[3]} and key of {key.shape[-1]}: expected the "
            "same"
        )


def mixture_of(
    query: Tensor,
    key: Tensor | Sequence[Tensor],
    value: Tensor,
    key_shift: Tensor | None,
    enable_gqa: bool,
) -> tuple[HeadLayout, Tensor, Tensor | None, int]:
    """Return heads, keys, shifts (H_kv, K, E) and K of a call whose keys are mixtures.

    Keys are (B, H_kv, K, L, E), K tensors (B, H_kv, L, E), or with shifts one key, (B, H_kv, L, E).

    Raises:
        ValueError: the shapes do not match.
    """
    if not isinstance(key, Tensor):
        key = torch.stack(tuple(key), 2)
    if key_shift is not None and key_shift.dim() < 2:
        raise ValueError(
            f"key_shift has shape {tuple(key_shift.shape)}, expected (components, size) or "
            "(heads, components, size)"
        )
    if key.dim() != (5 if key_shift is None else 4):
        raise ValueError(
            f"key has shape {tuple(key.shape)}, expected (B, heads, components, positions, size), "
            "a sequence of keys, or key_shift with one key (B, heads, positions, size)"
        )
    count = key.shape[2] if key_shift is None else key_shift.shape[-2]
    layout = layout_of(query, key, value, enable_gqa, count if key_shift is None else 1)
    if key_shift is not None:
        key_shift = by_head("key_shift", key_shift, layout.key, count, layout.head_dim)
        key_shift = key_shift.expand(layout.key, -1, -1)
    return layout, key, key_shift, count


def by_component(
    name: str, values: Tensor, num_heads: int, count: int, call: HeadCall, is_packed: bool
) -> Tensor:
    """Return values (K,), (H, K) or (H, K, L) as (H, K, 1 or L) for the keys of a call.

    The call may be that of a group of packed documents, whose values begin anew in each document.

    Raises:
        ValueError: the tensor has another shape.
    """
    if values.dim() != 3:
        return by_head(name, values, num_heads, count).expand(num_heads, -1)[..., None]
    values = values[..., : call.num_keys] if is_packed else values
    return by_head(name, values, num_heads, count, call.num_keys).expand(num_heads, -1, -1)


def by_head(name: str, tensor: Tensor, num_heads: int, *rest: int) -> Tensor:
    """Return a parameter as (heads, …), with one head if it has the shape (…).

    Args:
        name: name for messages.
        tensor: (…), (1, …) or (H, …).
        num_heads: H.
        rest: sizes of the dimensions after the heads.

    Raises:
        ValueError: the tensor has another shape.
    """
    shape = tuple(tensor.shape)
    if shape == rest:
        return tensor[None]
    if shape not in ((1, *rest), (num_heads, *rest)):
        raise ValueError(f"{name} has shape {shape}, expected {rest} or {(num_heads, *rest)}")
    return tensor
