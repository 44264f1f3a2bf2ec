"""Scores of cached keys that are Gaussian mixtures: one product per key where shifts allow it.

With τ = 1/σ²:

    s_ijr = τ_r query[i] · key[j, r] − (τ_r / 2) ‖query[i]‖² + β_jr
    β_jr = log π_jr − (τ_r / 2) ‖key[j, r]‖² [− (E / 2) log σ²_r]

and for shifted keys query · (key + b_r) = query · key + query · b_r, whatever the number of
components.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_probattn.attention.functional import compute_dtype, grouped_scores


def key_offsets(
    key: Tensor,
    *,
    log_prior: Tensor | None,
    variance: Tensor,
    gaussian: bool,
    include_log_det: bool,
) -> Tensor:
    """Return β_jr, (B, H_key, K, L), in at least float32.

    Args:
        key: every component's keys, (B, H_key, K, L, E), as they are stored (rounded).
        log_prior: log π of these keys, (H_key, K, 1 or L). None means no prior.
        variance: σ², (H_key, K).
        gaussian: whether the score has the norm of the key.
        include_log_det: whether the determinant counts.
    """
    dtype = compute_dtype(key)
    precision = 1.0 / variance.to(dtype)[:, :, None]
    beta = torch.zeros(key.shape[:-1], dtype=dtype, device=key.device)
    if gaussian:
        beta = beta - key.to(dtype).square().sum(-1) * precision / 2.0
    if log_prior is not None:
        beta = beta + log_prior.to(dtype)
    if include_log_det:
        beta = beta + (key.shape[-1] / 2.0) * precision.log()
    return beta


def mixture_scores(
    query: Tensor,
    key: Tensor,
    *,
    shift: Tensor | None,
    offset: Tensor,
    variance: Tensor,
    subtract_query_norm: bool,
    hard: bool,
) -> Tensor:
    """Return logsumexp_r s_ijr, or max_r s_ijr when hard; (B, H, N, L).

    Args:
        query: (B, H, N, E).
        key: (B, H_kv, L, E) with shifts, else (B, H_key, K, L, E).
        shift: b_r, (H_prior, K, E). None means that `key` has all components.
        offset: β_jr, (B, H_prior, K, L).
        variance: σ², (H_prior, K).
        subtract_query_norm: whether −(τ_r / 2) ‖query‖² counts.
        hard: maximum instead of sum over components.
    """
    heads = query.shape[1]
    precision = 1.0 / _to_heads(variance.to(query.dtype), heads)  # (H, K)
    shared = grouped_scores(query, key) if shift is not None else None
    norms = query.square().sum(-1, keepdim=True) / 2.0
    total: Tensor | None = None
    for r in range(precision.shape[1]):
        if shared is not None and shift is not None:
            b = _to_heads(shift[:, r].to(query.dtype), heads)  # (H, E)
            product = shared + query @ b[None, :, :, None]
        else:
            product = grouped_scores(query, key[:, :, r])
        if subtract_query_norm:
            product = product - norms
        beta = _to_heads(offset[:, :, r].transpose(0, 1), heads).transpose(0, 1)
        score = product * precision[None, :, r, None, None] + beta[:, :, None]
        if total is None:
            total = score
        else:
            total = torch.maximum(total, score) if hard else torch.logaddexp(total, score)
    assert total is not None
    return total


def _to_heads(parameter: Tensor, num_heads: int) -> Tensor:
    """Repeat a parameter of key/value heads for grouped query heads: (H_kv, …) -> (H, …)."""
    groups = num_heads // parameter.shape[0]
    return parameter if groups == 1 else parameter.repeat_interleave(groups, 0)
