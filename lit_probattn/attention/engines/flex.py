"""PyTorch's FlexAttention on scores in normal form, over K·L keys, position major.

    score(i, (j, r)) = c_r q_i · k_jr + a_ir + β_jr

is computed from the product inside its kernel, so no term needs an additional coordinate. The
products with values are repeated for each component. On a CPU it has no backward, and is not fused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.masks import Masks
from lit_probattn.attention.numerics import repeat_heads
from lit_probattn.attention.variant import Scores

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@lru_cache
def _compiled(*sizes: int) -> Callable[..., Tensor]:
    """Return FlexAttention compiled for calls of one size.

    A single compiled function would reach the limit of recompilations after some sizes, and then
    run unfused.
    """
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)
    return compiled


def by_flex(call: HeadCall, scores: Scores) -> Tensor:
    """Attend by FlexAttention, (B, H, N, E_v): sums of components, and of maps without noise."""
    from torch.nn.attention.flex_attention import flex_attention

    value, scale = call.value, scores.scale
    query, key, coef = scores.query, scores.key, scores.coef
    if scores.reduce == "sum":
        query, key = scores.as_dots()
        coef = None
    heads, components = max(query.shape[1], value.shape[1]), scores.num_components
    if scores.reduce == "sum":
        components = 1
    query = query.expand(-1, heads, -1, -1)
    key_heads = max(key.shape[1], value.shape[1])
    key = repeat_heads(key, key_heads).expand(-1, -1, components, -1, -1)
    value, group = repeat_heads(value, key_heads), heads // key_heads
    row, col = scores.row, None if scores.col is None else repeat_heads(scores.col, key_heads)
    coef = None if coef is None else coef.repeat_interleave(key_heads // len(coef), 0)
    bias = call.masks.bias
    bias = None if bias is None else bias.expand(len(query), heads, -1, -1)

    def change(dot: Tensor, b: Tensor, h: Tensor, i: Tensor, at: Tensor) -> Tensor:
        j, r = at // components, at % components
        if coef is not None:
            dot = dot * coef[h // group, r]
        if row is not None:
            dot = dot + row[b, h, i, r]
        if col is not None:
            dot = dot + col[b, h // group, r, j]
        return dot if bias is None else dot + bias[b, h, i, j]

    flat = key.transpose(2, 3).flatten(2, 3)
    values = value.repeat_interleave(components, 2)
    if not torch.is_grad_enabled():  # on a CPU it checks the tensors, not the mode
        query, flat, values = query.detach(), flat.detach(), values.detach()
    sizes = (*query.shape, *key.shape[1:], value.shape[-1])
    run: Any = _compiled(*sizes) if query.device.type == "cuda" else flex_attention
    mask = _block_mask(call.masks, len(query), heads, components, query.device)
    out: Tensor = run(*(query, flat, values, change, mask), scale=scale, enable_gqa=group > 1)
    return out


def _block_mask(
    masks: Masks, batch: int, heads: int, components: int, device: torch.device
) -> BlockMask | None:
    if not masks.has_pair_mask:
        return None
    from torch.nn.attention.flex_attention import create_block_mask

    key_mask, pairs, offset = masks.key_mask, masks.attn_mask, masks.causal_offset
    if pairs is not None:
        pairs = pairs.expand(batch, heads, -1, -1)

    def visible(b: Tensor, h: Tensor, i: Tensor, at: Tensor) -> Tensor:
        j = at // components
        seen = j <= i + offset if masks.is_causal else j >= 0
        if key_mask is not None:
            seen = seen & key_mask[b, j]
        return seen if pairs is None else seen & pairs[b, h, i, j]

    sizes = (masks.num_queries, components * masks.num_keys)
    return create_block_mask(visible, batch, heads, *sizes, device=str(device))


def missing_gpu(call: HeadCall, variant: Any) -> str | None:
    """Return why FlexAttention is unsupported: off CUDA it has no backward and is not fused."""
    return None if call.device == "cuda" else f"cannot run on {call.device}: it is for CUDA"
