"""Softmax attention and mixtures of Gaussian keys in one kernel each; the terms of their scores.

s_ijr = τ_r query_i · key_j + row_ir + col_jr
    row_ir = τ_r query_i · b_r [− (τ_r − τ_0) ‖query_i‖² / 2]
    col_jr = offset_jr [− τ_r ‖key_j + b_r‖² / 2]               (brackets: Gaussian scores)

With equal τ the sum over components factorises, and a pair costs one exponential: docs/kernels.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_probattn.kernels.dense.operators import mixture_attention


def centred(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Move query and key by the mean key of each head, in the dtype that they have.

    Distances do not change, and norms lose fewer digits; norms are to be taken of the results.

    Args:
        query: (B, H, N, E).
        key: (B, H_key, …, L, E), H_key a divisor of H.
    """
    dims = tuple(range(2, key.dim() - 1))
    centre = key.detach().mean(dims, keepdim=True, dtype=torch.float32)
    moved_key = (key - centre).to(key.dtype)
    centre = centre.flatten(2, -2)
    if centre.shape[1] != query.shape[1]:
        centre = centre.repeat_interleave(query.shape[1] // centre.shape[1], 1)
    return (query - centre).to(query.dtype), moved_key


def gaussian_row_terms(squares: Tensor, precision: Tensor) -> Tensor:
    """Return −(τ_r − τ_0) ‖query_i‖² / 2, which differs by a constant of the row from −τ_r ‖q‖²/2.

    Args:
        squares: ‖query‖², (B, H, N).
        precision: τ, (H_key, K), H_key a divisor of H.

    Returns:
        (B, H, K, N).
    """
    precision = precision.float()
    difference = (precision - precision[:, :1].detach()) / -2.0
    difference = difference.repeat_interleave(squares.shape[1] // precision.shape[0], 0)
    return difference[None, :, :, None] * squares[:, :, None]


class _PointTerms(torch.autograd.Function):
    """Norms and products with shifts; saves its inputs only, in the precision that they have."""

    @staticmethod
    def forward(ctx: Any, points: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(points, shift)
        wide = points.float()
        squares = wide.square().sum(-1)
        if shift is None:
            products = squares.new_empty(0)
            ctx.mark_non_differentiable(products)
            return squares, products
        return squares, _grouped(shift.float(), points.shape[1]) @ wide.mT

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_squares: Tensor, grad_products: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        points, shift = ctx.saved_tensors
        grad = points.float() * (2.0 * grad_squares[..., None])
        grad_shift = None
        if shift is not None:
            heads = points.shape[1]
            grad += grad_products.mT @ _grouped(shift.float(), heads)
            per_head = (grad_products @ points.float()).sum(0)
            grad_shift = per_head.unflatten(0, (shift.shape[0], -1)).sum(1).to(shift.dtype)
        return grad.to(points.dtype), grad_shift


def _grouped(shift: Tensor, num_heads: int) -> Tensor:
    groups = num_heads // shift.shape[0]
    return shift if groups == 1 else shift.repeat_interleave(groups, 0)


def point_terms(points: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return squared norms and products with shifts, in float32.

    Args:
        points: queries or keys, (B, H, N, E).
        shift: b_r, (H_shift, K, E), H_shift a divisor of H; None means no products.

    Returns:
        ‖point‖² (B, H, N) and b_r · point (B, H, K, N); the latter empty without shifts.
    """
    squares, products = _PointTerms.apply(points, shift)
    return squares, products


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    key_bias: Tensor | None = None,
    bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    pair_mask: Tensor | None = None,
    draw: Tensor | None = None,
    threshold: int = 0,
    is_causal: bool = False,
) -> Tensor:
    """Return softmax(scale · query · key + key_bias + bias) @ value.

    Source: MGK, ICML 2022, Eq. (1).
    Departs from the source: nothing.

    Args:
        query: (B, H, N, E).
        key: (B, H_kv, L, E).
        value: (B, H_kv, L, E_v).
        scale: factor on query · key; positive.
        key_bias: one score per key, (B, H_kv, L), or None.
        bias: additive, 4-dimensional, broadcastable to (B, H, N, L), or None.
        key_mask: real keys, (B, L) bool, or None.
        pair_mask: allowed pairs, 4-dimensional bool, broadcastable, or None.
        draw: words of attention dropout, see `runtime.draw_tensor`; None means no dropout.
        threshold: `AttentionDropout.threshold`.
        is_causal: bottom-right aligned causal mask.

    Returns:
        (B, H, N, E_v) in the dtype of `query`; rows that see nothing are zero.
    """
    key_term = None if key_bias is None else key_bias[:, :, None]
    out, _ = mixture_attention(
        *(query, key[:, :, None], value, None, None, key_term, bias, key_mask, pair_mask, draw),
        *(scale, is_causal, False, True, threshold),
    )
    return out


def mgk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    precision: Tensor,
    offset: Tensor | None,
    gaussian: bool,
    equal_precision: bool,
    hard: bool,
    bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    pair_mask: Tensor | None = None,
    draw: Tensor | None = None,
    threshold: int = 0,
    is_causal: bool = False,
) -> Tensor:
    """Return attention with K component tiles per key tile and one product with the values.

    Source: MGK, ICML 2022, Eq. (7); hard E-step, section 2.3, with τ = 1/σ²:
        attn_weights[i, j] ∝ Σ_r exp(s_ijr)      or      ∝ max_r exp(s_ijr)
        gaussian:  s_ijr = offset_jr − τ_r ‖query[i] − key[j, r]‖² / 2
        otherwise: s_ijr = offset_jr + τ_r query[i] · key[j, r]
    Departs from the source: nothing; a constant of the row is dropped.

    Args:
        query: (B, H, N, E).
        key: (B, H_key, K, L, E), H_key a divisor of H.
        value: (B, H_kv, L, E_v), H_kv a divisor of H_key.
        precision: τ, (H_key, K).
        offset: log-prior and normalising terms, (H_key, K, 1 or L), or None.
        gaussian: which score.
        equal_precision: τ is the same for all components of a head and needs no gradient.
        hard: maximum over components instead of the sum.
        bias: see `softmax_attention`, as are the other arguments.

    Returns:
        (B, H, N, E_v) in the dtype of `query`.
    """
    row_bias, key_bias = None, None
    if offset is not None:
        key_bias = offset.float()[None].expand(key.shape[0], -1, -1, key.shape[3])
    if gaussian:
        query, key = centred(query, key)
        norms, _ = point_terms(key.flatten(1, 2), None)
        norm_term = precision.float()[None, :, :, None] * norms.unflatten(1, key.shape[1:3]) / -2.0
        key_bias = norm_term if key_bias is None else key_bias + norm_term
        if not equal_precision and key.shape[2] > 1:
            squares, _ = point_terms(query, None)
            row_bias = gaussian_row_terms(squares, precision)
    out, _ = mixture_attention(
        *(query, key, value, precision, row_bias, key_bias, bias, key_mask, pair_mask, draw),
        *(1.0, is_causal, hard, equal_precision, threshold),
    )
    return out


def shifted_mgk_attention(
    query: Tensor,
    key: Tensor,
    shift: Tensor,
    value: Tensor,
    *,
    precision: Tensor,
    offset: Tensor | None,
    gaussian: bool,
    equal_precision: bool,
    hard: bool,
    bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    pair_mask: Tensor | None = None,
    draw: Tensor | None = None,
    threshold: int = 0,
    is_causal: bool = False,
) -> Tensor:
    """Return `mgk_attention` with key[j, r] = key[j] + shift[r].

    Source: MGK, ICML 2022, section 2.3 (key shifting); the factorisation is ours.
    Departs from the source: nothing; a constant of the row is dropped.

    Args:
        query: (B, H, N, E).
        key: (B, H_key, L, E), H_key a divisor of H.
        shift: b_r, (H_key, K, E).
        value: (B, H_kv, L, E_v), H_kv a divisor of H_key.
        precision: τ, (H_key, K).
        offset: log-prior and normalising terms, (H_key, K, 1 or L), or None.
        gaussian: see `mgk_attention`, as are the other arguments.

    Returns:
        (B, H, N, E_v) in the dtype of `query`.
    """
    batch, length, heads = key.shape[0], key.shape[2], query.shape[1]
    precision = precision.float()
    groups = heads // precision.shape[0]
    per_row = precision.repeat_interleave(groups, 0)[None, :, :, None]
    if gaussian:
        query, key = centred(query, key)
    squares, products = point_terms(query, shift)
    row_bias = per_row * products
    if gaussian and not equal_precision:
        row_bias = row_bias + gaussian_row_terms(squares, precision)
    sizes = (batch, precision.shape[0], precision.shape[1], length)
    key_bias = query.new_zeros((), dtype=precision.dtype) if offset is None else offset.float()
    if gaussian:
        squares, products = point_terms(key, shift)
        shift_squares = shift.float().square().sum(-1)[None, :, :, None]
        distance = squares[:, :, None] + 2.0 * products + shift_squares
        key_bias = key_bias - precision[None, :, :, None] * distance / 2.0
    out, _ = mixture_attention(
        *(query, key[:, :, None], value, precision, row_bias, key_bias.expand(sizes), bias),
        *(key_mask, pair_mask, draw, 1.0, is_causal, hard, equal_precision, threshold),
    )
    return out
