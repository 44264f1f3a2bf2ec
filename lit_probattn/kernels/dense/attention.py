"""Mixtures of Gaussian keys by the fused kernels: docs/kernels.md."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from lit_probattn.kernels.dense.points import PointInputs, point_attention
from lit_probattn.kernels.runtime import NO_PAIRS, PairOptions


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
    call: dict[str, Any] = {
        **{"precision": precision.float(), "offset": None if offset is None else offset.float()},
        **{"shift": shift, "gaussian": gaussian, "equal_precision": equal_precision, "hard": hard},
        **{**NO_PAIRS, **pairs},
    }
    key = key if shift is None else key[:, :, None]
    out, _ = point_attention(*PointInputs(query, key, value, **call))
    return out
