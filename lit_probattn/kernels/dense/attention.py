"""Softmax attention and mixtures of Gaussian keys in one kernel each; the terms of their scores.

s_ijr = τ_r query_i · key_j + row_ir + col_jr
    row_ir = τ_r query_i · b_r [− (τ_r − τ_0) ‖query_i‖² / 2]
    col_jr = offset_jr [− τ_r ‖key_j + b_r‖² / 2]               (brackets: Gaussian scores)

With equal τ the sum over components factorises, and a pair costs one exponential: docs/kernels.md.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from lit_probattn.kernels.dense.operators import MixtureInputs, mixture_attention
from lit_probattn.kernels.runtime import NO_PAIRS, PairOptions


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
    """Return −(τ_r − τ_0) ‖query_i‖² / 2, (B, H, K, N): −τ_r ‖q‖²/2 but for a row's constant.

    Args:
        squares: ‖query‖², (B, H, N).
        precision: τ, (H_key, K), H_key a divisor of H.
    """
    precision = precision.float()
    difference = (precision - precision[:, :1].detach()) / -2.0
    return _grouped(difference, squares.shape[1])[None, :, :, None] * squares[:, :, None]


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


def _grouped(rows: Tensor, num_heads: int) -> Tensor:
    """Repeat per-head rows for the heads that share them."""
    groups = num_heads // rows.shape[0]
    return rows if groups == 1 else rows.repeat_interleave(groups, 0)


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
    **pairs: Unpack[PairOptions],
) -> Tensor:
    """Return softmax(scale · query · key + key_bias + bias) @ value, zero where nothing is seen.

    Source: MGK, ICML 2022, Eq. (1).
    Departs from the source: nothing.

    Args:
        query: (B, H, N, E).
        key: (B, H_kv, L, E).
        value: (B, H_kv, L, E_v).
        scale: factor on query · key; positive.
        key_bias: one score per key, (B, H_kv, L), or None.
        pairs: see `PairOptions`.
    """
    key_term = None if key_bias is None else key_bias[:, :, None]
    terms = {"scales": None, "row_bias": None, "key_bias": key_term, "scale": scale}
    call: dict[str, Any] = {**terms, "hard": False, "equal_scales": True, **NO_PAIRS, **pairs}
    out, _ = mixture_attention(*MixtureInputs(query, key[:, :, None], value, **call))
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
    shift: Tensor | None = None,
    **pairs: Unpack[PairOptions],
) -> Tensor:
    """Return attention with one score per pair and component, and one product with the values.

    Source: MGK, ICML 2022, Eq. (7); hard E-step and shifted keys, section 2.3, with τ = 1/σ²:
        attn_weights[i, j] ∝ Σ_r exp(s_ijr)      or      ∝ max_r exp(s_ijr)
        gaussian:  s_ijr = offset_jr − τ_r ‖query[i] − key[j, r]‖² / 2
        otherwise: s_ijr = offset_jr + τ_r query[i] · key[j, r]
        with shift: key[j, r] = key[j] + shift[r]; all components share the product query · key
    Departs from the source: nothing; a constant of the row is dropped. The factorisation for
    shifted keys is ours.

    Args:
        query: (B, H, N, E).
        key: (B, H_key, K, L, E), H_key a divisor of H; (B, H_key, L, E) with `shift`.
        value: (B, H_kv, L, E_v), H_kv a divisor of H_key.
        precision: τ, (H_key, K).
        offset: log-prior and normalising terms, (H_key, K, 1 or L), or None.
        gaussian: which score.
        equal_precision: τ is the same for all components of a head and needs no gradient.
        hard: maximum over components instead of the sum.
        shift: b_r, (H_key, K, E), or None.
        pairs: see `PairOptions`.
    """
    precision = precision.float()
    row_bias = None
    key_bias = None if offset is None else offset.float()
    if gaussian:
        query, key = centred(query, key)
    has_row_terms = gaussian and not equal_precision and precision.shape[1] > 1
    if shift is not None or has_row_terms:
        squares, products = point_terms(query, shift)
        if shift is not None:
            row_bias = _grouped(precision, query.shape[1])[None, :, :, None] * products
        if has_row_terms:
            differences = gaussian_row_terms(squares, precision)
            row_bias = differences if row_bias is None else row_bias + differences
    if gaussian:
        points = key.flatten(1, 2) if shift is None else key
        distance, products = point_terms(points, shift)
        if shift is None:
            distance = distance.unflatten(1, key.shape[1:3])
        else:
            shift_squares = shift.float().square().sum(-1)[None, :, :, None]
            distance = distance[:, :, None] + 2.0 * products + shift_squares
        norm_term = precision[None, :, :, None] * distance / -2.0
        key_bias = norm_term if key_bias is None else key_bias + norm_term
    elif shift is not None and key_bias is None:
        key_bias = query.new_zeros((), dtype=torch.float32)
    if key_bias is not None:
        key_bias = key_bias.expand(key.shape[0], *precision.shape, key.shape[-2])
    key = key if shift is None else key[:, :, None]
    terms = {"scales": precision, "row_bias": row_bias, "key_bias": key_bias, "scale": 1.0}
    call: dict[str, Any] = {
        **terms,
        "hard": hard,
        "equal_scales": equal_precision,
        **NO_PAIRS,
        **pairs,
    }
    out, _ = mixture_attention(*MixtureInputs(query, key, value, **call))
    return out
