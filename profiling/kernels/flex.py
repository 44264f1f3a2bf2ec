"""Soft MGK by PyTorch's FlexAttention over the expanded keys: a second, independent fused route.

The K·L keys of all components attend as ordinary keys, position major; the score is changed inside
the kernel,

    s_i(jr) = τ_r query_i · key_jr − (τ_r − τ_0) ‖query_i‖² / 2 + β_jr,

so it costs as many products with values as with keys, where our own kernel needs one. It takes
neither the hard E-step (a maximum is not a sum over keys) nor attention dropout. It is not a
backend of the layers: tests and benchmarks use it to check and to compare. On the CPU it has no
backward.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


@lru_cache
def _compiled(*sizes: int) -> Callable[..., Tensor]:
    """Return FlexAttention compiled for calls of one size.

    One function for all would reach the compiler's limit of recompilations after some sizes, from
    which on it runs without being fused.
    """
    torch.compiler.reset()
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)
    return compiled


def mgk_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    precision: Tensor,
    offset: Tensor | None,
    gaussian: bool,
    equal_precision: bool,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Return soft `mgk_attention`, whose arguments these are; grouped heads are a ValueError."""
    batch, heads, components, length, _ = key.shape
    if heads != query.shape[1]:
        raise ValueError(f"expected {query.shape[1]} key heads, received {heads}")
    precision = precision.float()
    offsets = torch.zeros((), device=key.device) if offset is None else offset.float()
    offsets = offsets.expand(batch, heads, components, length)
    rows = query.new_zeros(1, 1, components, query.shape[2], dtype=torch.float32)
    rows = rows.expand(batch, heads, -1, -1)
    if gaussian:
        centre = key.detach().float().mean((2, 3))[:, :, None]
        query = (query - centre).to(query.dtype)
        key = (key - centre[:, :, None]).to(key.dtype)
        norms = key.float().square().sum(-1)
        offsets = offsets - precision[None, :, :, None] * norms / 2.0
        if not equal_precision:
            difference = (precision - precision[:, :1].detach()) / -2.0
            rows = difference[None, :, :, None] * query.float().square().sum(-1)[:, :, None]
    shift = length - query.shape[2]

    def score(dot: Tensor, b: Tensor, h: Tensor, i: Tensor, at: Tensor) -> Tensor:
        j, r = at // components, at % components
        return dot * precision[h, r] + rows[b, h, r, i] + offsets[b, h, r, j]

    def visible(b: Tensor, h: Tensor, i: Tensor, at: Tensor) -> Tensor:
        j = at // components
        seen = j <= i + shift if is_causal else j >= 0
        return seen if key_mask is None else seen & key_mask[b, j]

    mask = None
    if is_causal or key_mask is not None:
        mask = create_block_mask(
            *(visible, batch, heads, query.shape[2], components * length), device=str(key.device)
        )
    sizes = (*query.shape, *key.shape[1:], value.shape[-1])
    run: Any = _compiled(*sizes) if query.device.type == "cuda" else flex_attention
    flat = key.transpose(2, 3).flatten(2, 3)
    out: Tensor = run(
        *(query, flat, value.repeat_interleave(components, 2), score, mask), scale=1.0
    )
    return out
