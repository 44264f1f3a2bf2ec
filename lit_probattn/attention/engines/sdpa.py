"""PyTorch's fused attention with this package's masks and several keys per position.

It computes the exact reductions of variants to softmax attention over `keys_per_position` · L keys.
Keys are interleaved (position major), so a causal block may attend to a prefix of them, and the
largest mask is one block of queries by the keys, never N x (keys_per_position · N).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.masks import Masks
from lit_probattn.attention.numerics import repeat_heads
from lit_probattn.attention.variant import Scores
from lit_probattn.base.graphs import (
    is_symbol,
    reject_second_derivative,
    written,
)

# Attends from some queries to the first keys: (rows, cols, mask, is_causal); with cols = 0, the
# rows are fully masked.
_Attend = Callable[[Tensor, int, Tensor | None, bool], Tensor]

# Queries per call if masks are built block by block.
_BLOCK_ROWS = 256
# Head size below which PyTorch's CPU kernel is slower.
LEAST_SIZE = 16


def by_sdpa(call: HeadCall, scores: Scores) -> Tensor:
    """Attend by one softmax over K·L keys, with PyTorch's fused attention.

    Exact for the sum over components: Σ_r exp(t_ijr) v_j is a sum over the pairs (j, r), each with
    a separate key and the value of its position.
    """
    query, key = scores.as_dots()
    components, value = key.shape[2], call.value
    if components == 1:
        key = key[:, :, 0]
    else:
        key = key.transpose(2, 3).flatten(2, 3)
        value = repeat_heads(value, key.shape[1]).repeat_interleave(components, 2)
    return fused_attention(
        *(query, key, value),
        masks=call.masks,
        scale=scores.scale,
        keys_per_position=components,
    )


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    masks: Masks,
    scale: float,
    keys_per_position: int = 1,
) -> Tensor:
    """Attend by `scaled_dot_product_attention`, (B, H, N, E_v); fully masked rows give zeros.

    Args:
        query: (B, H, N, E), or (B, 1, N, E) for all heads.
        key: (B, H_kv or 1, L · keys_per_position, E), position major.
        value: (B, H_kv, L · keys_per_position, E_v).
        masks: over the L positions; all keys of a position share its mask and bias.
        scale: factor on query·key.
        keys_per_position: K.
    """
    value_dim = value.shape[-1]
    # Equal sizes: otherwise PyTorch's CPU path silently materialises the scores.
    size = _kernel_size(max(query.shape[-1], value_dim), query.device)
    query, key, value = (_pad_to(x, size) for x in (query, key, value))
    if query.shape[1] != key.shape[1] and query.device.type == "cuda" and masks.has_pair_mask:
        key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    query, key = (  # expand tensors that all heads share
        x.expand(-1, value.shape[1], -1, -1) if x.shape[1] == 1 else x for x in (query, key)
    )
    grouped = query.shape[1] != key.shape[1]

    def attend(rows: Tensor, cols: int, mask: Tensor | None, is_causal: bool) -> Tensor:
        if cols == 0:
            return rows * 0.0
        return F.scaled_dot_product_attention(
            rows,
            key[..., : cols * keys_per_position, :],
            value[..., : cols * keys_per_position, :],
            attn_mask=mask,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=bool(grouped),  # tracing turns sizes into tensors
        )

    out = _masked(attend, query, masks, keys_per_position)
    if out.requires_grad and written() is None:
        out.register_hook(lambda _: reject_second_derivative())
    return out[..., :value_dim]


def _masked(attend: _Attend, query: Tensor, masks: Masks, keys_per_position: int) -> Tensor:
    """Attend with masks that PyTorch's kernels support, in blocks of queries if necessary."""
    num_queries, num_keys = masks.num_queries, masks.num_keys
    plain = masks.bias is None and masks.attn_mask is None and masks.key_mask is None
    if plain and not masks.is_causal:
        return attend(query, num_keys, None, False)
    if plain and keys_per_position == 1 and num_queries == num_keys:
        return attend(query, num_keys, None, True)
    whole = masks.bias is None and masks.attn_mask is None and not masks.is_causal
    if whole or is_symbol(num_queries) or is_symbol(num_keys):  # a loop would count blocks
        mask = _block_mask(masks, masks.all_rows, query, keys_per_position)
        return attend(query, num_keys, mask, False)
    parts = []
    shared = _causal_mask(masks, query, keys_per_position) if plain else None
    for start in range(0, num_queries, _BLOCK_ROWS):
        rows = range(start, min(start + _BLOCK_ROWS, num_queries))
        block = query[..., rows.start : rows.stop, :]
        cols = len(masks.visible_keys(rows))
        if cols == 0:
            mask = None
        elif shared is None:
            mask = _block_mask(masks, rows, query, keys_per_position)
        else:  # its last rows and last columns
            mask = shared[-len(rows) :, (num_keys - cols) * keys_per_position :]
        parts.append(attend(block, cols, mask, False))
    return torch.cat(parts, -2)


def _block_mask(masks: Masks, rows: range, query: Tensor, keys_per_position: int) -> Tensor | None:
    """Return the mask of these rows for `scaled_dot_product_attention`: bool, or masked bias."""
    cols = masks.visible_keys(rows)
    mask = masks.allowed(rows, cols, query.device)
    bias = masks.bias_block(rows, cols)
    if bias is not None:
        bias = bias.to(query.dtype)
        mask = bias if mask is None else torch.where(mask, bias, float("-inf"))
    if mask is None:
        return None
    mask = mask.expand(*mask.shape[:-1], cols.stop - cols.start)
    return mask if keys_per_position == 1 else mask.repeat_interleave(keys_per_position, -1)


def _causal_mask(masks: Masks, query: Tensor, keys_per_position: int) -> Tensor | None:
    """Return a mask that all blocks of rows slice, if only later keys are masked.

    Counted from its last row and its last key, every block has the same triangle. Backward saves
    the masks of all blocks: slices of one mask are O(N), separate masks O(N²).
    """
    if query.device.type == "cuda":
        return None  # its kernels require aligned masks
    rows = min(_BLOCK_ROWS, masks.num_queries)
    width = max(masks.num_keys, rows)
    hidden = torch.full((rows, width), float("-inf"), dtype=query.dtype, device=query.device)
    mask = hidden.triu(width - rows + 1)[:, width - masks.num_keys :]
    return mask.repeat_interleave(keys_per_position, -1)


def _kernel_size(size: int, device: torch.device) -> int:
    """Return the head size to pad to: multiples of 8 on CUDA, at least 16 on a CPU.

    The CPU kernel is slower for sizes 8 to 15 than for 16; above 16 padding never pays off.
    """
    return -(-size // 8) * 8 if device.type == "cuda" else max(size, LEAST_SIZE)


def _pad_to(tensor: Tensor, size: int) -> Tensor:
    return tensor if tensor.shape[-1] == size else F.pad(tensor, (0, size - tensor.shape[-1]))
