"""From linear attention, its mixtures and linear FiSH to the fused kernels over chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_probattn.attention.backends import AUTO_RULES, AutoRule, Call
from lit_probattn.attention.blockwise import Block
from lit_probattn.attention.fish.linear import LinearFiSHForm, normalise
from lit_probattn.attention.fish.mixing import MixingValues, map_heads
from lit_probattn.attention.fish.scores import ScoreNoise
from lit_probattn.attention.functional import compute_dtype
from lit_probattn.attention.fused import kernel_refusal
from lit_probattn.attention.linear.functions import LinearForm, drop_values, finish, mix_keys
from lit_probattn.attention.masks import Masks
from lit_probattn.randomness import AttentionDropout

MOST_FEATURES = 128
# The chunkwise forms have no N x N work to save by storing.
CHUNK_RULES = {
    kind: AutoRule((*(("triton",) if kind == "cuda" else ()), "blockwise", "reference"))
    for kind in AUTO_RULES
}


def linear_refusal(family: str, call: Call, num_features: int, value_dim: int) -> str | None:
    """Say why the fused kernels cannot serve a call ("cannot …"), or None if they can."""
    if call.attn_mask:
        return "cannot apply attn_mask, because it forms no pairs"
    if num_features > MOST_FEATURES:
        return f"cannot hold states of {num_features} features: at most {MOST_FEATURES}"
    return kernel_refusal(family, call, num_features, value_dim)


def linear_fish_refusal(layer: Any, call: Call) -> str | None:
    """Say why no kernel can serve a call of a linear FiSH layer ("cannot …"), or None."""
    if layer.lfish_mode != "kv_global":
        return f"cannot read lfish_mode={layer.lfish_mode}: it has kernels for kv_global"
    if len(layer.mixing.widths) > 2:
        return "cannot mix states through a ReLU (mixer=mlp), which every position needs anew"
    return linear_refusal("linear_fish", call, layer.head_dim, layer.value_head_dim)


def linear_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    masks: Masks,
    dropout: AttentionDropout | None,
    form: LinearForm,
    projection: Tensor | None,
    prior: Tensor | None,
) -> Tensor:
    """Return `linear_blockwise` by fused kernels, (B, H, N, E_v) float32.

    Features and their mixtures are computed in float32 and rounded to the dtype of `query`, in
    which the products within chunks run; sums and states are float32.
    """
    from lit_probattn.kernels.linear.attention import read_sources

    dtype, features, low = compute_dtype(query), form.features, query.dtype
    query, key = query.to(dtype), key.to(dtype)
    projection = None if projection is None else projection.to(dtype)
    if prior is not None and form.mix == "before":
        key, prior = mix_keys(key, prior), None
    scale = features.key_scale(key, projection, masks.key_mask)
    if prior is None:
        cols = features.key(key, projection, scale)
    else:
        cols = features.key(key, projection, None if scale is None else scale[:, :, None])
        cols = mix_keys(cols, prior)
    rows = features.query(query, projection)
    rows, cols, value = _rounded(rows, cols, value, masks, dropout, low)
    num, den = read_sources(
        rows, cols, value, has_totals=form.denominator == "sum", is_causal=masks.is_causal
    )
    return finish(num, den, query.shape[-1], form, masks)


def linear_fish_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    masks: Masks,
    dropout: AttentionDropout | None,
    form: LinearFiSHForm,
    mixing: MixingValues,
    norm_mix: Tensor,
    noise: ScoreNoise | None = None,
    **_: Any,
) -> Tensor:
    """Return `linear_fish_blockwise` for global keys and values and a linear mixing, float32.

    The kernels mix numerators with p and denominators with r while they read; noise, the same for
    all positions, is one more state that every head reads.
    """
    from lit_probattn.kernels.linear.attention import read_sources

    dtype, low = compute_dtype(query), query.dtype
    rows = form.features.query(query.to(dtype), None)
    cols = form.features.key(key.to(dtype), None, None)
    mixing = mixing.to(dtype)
    first = mixing.weights[0]
    features, cols, value = _rounded(rows, cols, value, masks, dropout, low)
    num, den = read_sources(
        *(features, cols, value),
        weight=first,
        norm_weight=norm_mix.to(dtype),
        is_causal=masks.is_causal,
    )
    assert den is not None
    if noise is not None:
        assert mixing.noise_scale is not None
        block = Block(range(cols.shape[-1]), range(value.shape[-1]))
        drawn = noise.draw(rows, block, cols.shape[1]) * mixing.noise_scale[:, None, None]
        num = num + rows @ map_heads(first, drawn)
    return normalise(num, den, form)


def _rounded(
    rows: Tensor,
    cols: Tensor,
    value: Tensor,
    masks: Masks,
    dropout: AttentionDropout | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Drop values, zero masked keys, and round to the kernels' dtype."""
    if masks.key_mask is not None:
        cols = cols.masked_fill(~masks.key_mask[:, None, :, None], 0.0)
    value = drop_values(value, dropout)
    return rows.to(dtype), cols.to(dtype), value.to(dtype)
