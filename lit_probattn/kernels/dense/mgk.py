"""Attention to keys that are Gaussian mixtures, in one kernel: soft and hard."""

from __future__ import annotations

from torch import Tensor

from lit_probattn.kernels.dense.operators import mixture_attention
from lit_probattn.kernels.dense.terms import centred, gaussian_row_terms, point_terms


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
