"""Linear attention over chunks in fused kernels: several sources of keys and values per head."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_probattn.kernels.linear.operators import linear_forward


def read_sources(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    weight: Tensor | None = None,
    norm_weight: Tensor | None = None,
    has_totals: bool = True,
    is_causal: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return numerators and denominators of linear attention and of linear FiSH.

        num[h, i] = Σ_s p[h, s] Σ_j (query[h, i] · key[s, j]) value[s, j]
        den[h, i] = Σ_s r[h, s] Σ_j  query[h, i] · key[s, j]

    Source: MGK, ICML 2022, section 2.5, with key features Σ_r π_r φ(k_r) (one source per head);
    FiSH, NeurIPS 2022, appendix A.6 (global states mixed by p).
    Departs from the source: see `LinearAttention`, `MLKAttention`, `LinearFiSHAttention`.

    Args:
        query: features, (B, H, N, E).
        key: features, (B, S, L, E), zero where masked.
        value: (B, S, L, D).
        weight: p, (H, S). None: H/S neighbouring heads read one source each.
        norm_weight: r, (H, S); given with `weight` if `has_totals`.
        has_totals: whether denominators are wanted.
        is_causal: query i reads the keys j ≤ i + L − N, else all.

    Returns:
        num (B, H, N, D) and den (B, H, N, 1) or None, float32.

    Raises:
        ValueError: `norm_weight` is missing or superfluous.
    """
    if has_totals and (weight is None) != (norm_weight is None):
        raise ValueError(
            "weight and norm_weight are given together, received "
            f"weight={'None' if weight is None else 'a tensor'} and "
            f"norm_weight={'None' if norm_weight is None else 'a tensor'}"
        )
    num_queries, offset = query.shape[2], key.shape[2] - query.shape[2]
    state = total = None
    if is_causal and offset > 0:  # every query sees the first `offset` keys
        state, total = _sums(key[:, :, :offset], value[:, :, :offset])
        key, value = key[:, :, offset:], value[:, :, offset:]
    elif is_causal and offset < 0:  # the first queries see nothing
        query = query[:, :, -offset:]
    elif offset:  # zeros add nothing
        length = max(num_queries, key.shape[2])
        query, key, value = (F.pad(x, (0, 0, 0, length - x.shape[2])) for x in (query, key, value))
    num, den, _, _ = linear_forward(
        *(query, key, value, weight, norm_weight if has_totals else None),
        *(state, total if has_totals else None, has_totals, is_causal),
    )
    den = den[..., None] if has_totals else None
    if is_causal and offset < 0:
        num = F.pad(num, (0, 0, -offset, 0))
        den = None if den is None else F.pad(den, (0, 0, -offset, 0))
    elif offset:
        num = num[:, :, :num_queries]
        den = None if den is None else den[:, :, :num_queries]
    return num, den


def _sums(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return Σ_j key_j value_jᵀ and Σ_j key_j in float32."""
    key = key.to(torch.float32)
    return key.mT @ value.to(torch.float32), key.sum(-2)
