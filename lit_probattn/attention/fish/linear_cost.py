"""Operation counts of linear FiSH without a causal mask; feature maps are not counted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from lit_probattn.attention.fish.cost import projection_flops


def linear_fish_macs(
    *,
    seq_len: int,
    embed_dim: int,
    key_embed_dim: int,
    head_dim: int,
    value_dim: int,
    num_heads: int,
    num_global_heads: int,
    mode: str,
    widths: Sequence[int],
    noise: bool,
) -> int:
    """Return multiply-adds in matrix products of one layer.

    Source: FiSH specification b.5 for kv_global. key_global mixes N keys instead of one state, and
    score_global reads states of width G·E. key_global mixes the noise too.
    """
    n, e, e_v, h, g = seq_len, head_dim, value_dim, num_heads, num_global_heads
    query_heads = g if mode == "score_global" else h
    value_heads = g if mode == "kv_global" else h
    macs = n * embed_dim * (query_heads * e + h * e_v)
    macs += n * key_embed_dim * (g * e + value_heads * e_v)
    if mode == "kv_global":
        mixing = sum(a * b for a, b in pairwise(widths))
        macs += n * g * e * e_v + mixing * e * e_v + n * h * e * e_v
    elif mode == "key_global":
        macs += n * h * g * e + 2 * n * h * e * e_v
        macs += h * g * e * e_v if noise else 0
    else:
        macs += 2 * n * h * g * e * e_v
    if mode == "score_global":
        return macs + n * h * g * e
    return macs + n * h * e + h * g * e


def linear_fish_flops(
    *,
    seq_len: int,
    embed_dim: int,
    key_embed_dim: int,
    head_dim: int,
    value_dim: int,
    num_heads: int,
    num_global_heads: int,
    mode: str,
    widths: Sequence[int],
    noise: bool,
    bias: bool,
) -> int:
    """Return multiplications and additions by the convention of appendix D.

    The paper has no formula for linear FiSH; these are its parts: projections, states, key sums,
    noise, mixing, reading, normaliser and its division.
    """
    n, e, e_v, h, g = seq_len, head_dim, value_dim, num_heads, num_global_heads
    query_heads = g if mode == "score_global" else h
    value_heads = g if mode == "kv_global" else h
    flops = projection_flops(n, embed_dim, query_heads * e)
    flops += projection_flops(n, key_embed_dim, g * e + value_heads * e_v)
    flops += projection_flops(n, h * e_v, embed_dim)
    cells, width = e * e_v, e
    if mode == "kv_global":
        hidden = sum(widths[1:-1])
        mixing = sum(b * (2 * a - 1) for a, b in pairwise(widths)) + hidden
        mixing += sum(widths[1:]) if bias else 0
        flops += g * cells * (2 * n - 1) + mixing * cells + (g * cells if noise else 0)
    elif mode == "key_global":
        flops += n * h * e * (2 * g - 1) + h * cells * (2 * n - 1)
        flops += h * cells * 2 * g if noise else 0
    else:
        width = g * e
        flops += n * h * width + h * width * e_v * (2 * n - 1)
        flops += h * width * e_v if noise else 0
    flops += n * h * e_v * (2 * width - 1)
    flops += g * e * (n - 1) + n * h * (2 * width - 1) + n * h * e_v
    return flops + (n * h * width if mode == "score_global" else h * e * (2 * g - 1))
