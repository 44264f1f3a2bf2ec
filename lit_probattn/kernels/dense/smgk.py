"""Attention to shifted keys key_j + b_r with one product per pair for any number of components.

    s_ijr = τ_r query_i · key_j + row_ir + col_jr
    row_ir = τ_r query_i · b_r [− (τ_r − τ_0) ‖query_i‖² / 2]
    col_jr = offset_jr [− τ_r ‖key_j + b_r‖² / 2]               (brackets: Gaussian scores)

With equal τ the sum over components factorises, and a pair costs one exponential: docs/kernels.md.
"""

from __future__ import annotations

from torch import Tensor

from lit_probattn.kernels.dense.operators import mixture_attention
from lit_probattn.kernels.dense.terms import centred, gaussian_row_terms, point_terms


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
