"""A call with the conventions of `scaled_dot_product_attention`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lit_probattn.attention.call import HeadCall, HeadLayout, with_dropout
from lit_probattn.attention.masks import make_masks
from lit_probattn.base.graphs import reject_nested
from lit_probattn.randomness import RandomKey


@dataclass(frozen=True)
class Common:
    """Common arguments of all functions except heads; see `lit_probattn.functional`."""

    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    rng: RandomKey | None = None


def split_mask(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Split a mask of `scaled_dot_product_attention` into allowed pairs and a bias.

    A boolean mask is True where a pair may attend. Floats are added; -inf and the lowest value of
    the dtype mask a pair. No value is read on the host, so that devices do not synchronise and
    compiled graphs do not break.
    """
    if mask is None or mask.dtype == torch.bool:
        return mask, None
    if not mask.is_floating_point():
        raise ValueError(f"attn_mask has dtype {mask.dtype}, expected bool or floating point")
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


def make_call(
    query: Tensor, key: Tensor, value: Tensor, num_heads: int, common: Common
) -> HeadCall:
    """Return the call for an output with `num_heads` heads.

    Raises:
        ValueError: the probability is outside [0, 1), or the mask does not match.
    """
    if not 0.0 <= common.dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1), received {common.dropout_p}")
    num_queries, num_keys = query.shape[2], value.shape[2]
    pairs, bias = split_mask(common.attn_mask)
    keys: Tensor | None = None
    if pairs is not None and bias is None and _hides_keys(pairs, num_keys):
        keys, pairs = pairs[:, 0, 0].expand(query.shape[0], -1), None
    is_causal = common.is_causal
    if is_causal and num_queries != num_keys:
        # torch aligns at the first query and key; this package's masks align at the last.
        causal = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril()
        pairs, is_causal = causal if pairs is None else pairs & causal, False
    masks = make_masks(
        *(query.shape[0], num_heads, num_queries, num_keys),
        key_mask=keys,
        attn_mask=pairs,
        is_causal=is_causal,
        bias=None if bias is None else bias.to(query.dtype),
    )
    key, value = key.to(query.dtype), value.to(query.dtype)  # which differ only under autocast
    call = HeadCall(query, key, value, masks, scale=common.scale, rng=common.rng)
    return with_dropout(call, common.dropout_p)


def _hides_keys(pairs: Tensor, num_keys: int) -> bool:
    return pairs.dim() == 4 and pairs.shape[1:] == (1, 1, num_keys)


def components_of(key_shift: Tensor) -> int:
    """Return K of shifts (K, E) or (H, K, E); `by_head` refuses other shapes.

    Raises:
        ValueError: the tensor has one dimension, or none.
    """
    if key_shift.dim() < 2:
        raise ValueError(
            f"key_shift has shape {tuple(key_shift.shape)}, expected (components, size) or "
            "(heads, components, size)"
        )
    return key_shift.shape[-2]


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
