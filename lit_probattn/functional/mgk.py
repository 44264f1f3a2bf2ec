"""Per-head attention to keys that are mixtures of Gaussians."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_probattn.attention.backends import Backend
from lit_probattn.attention.call import HeadCall, check_scale
from lit_probattn.attention.mgk.functions import MGK, Score
from lit_probattn.attention.packing import Packing
from lit_probattn.base.arguments import check_argument
from lit_probattn.functional.call import attend_heads, by_component, by_head, mixture_of
from lit_probattn.randomness import RandomKey


def mgk_attention(
    query: Tensor,
    key: Tensor | Sequence[Tensor],
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    log_prior: Tensor | None = None,
    variance: Tensor | None = None,
    key_shift: Tensor | None = None,
    score: Score = "gaussian",
    hard: bool = False,
    include_log_det: bool = False,
    backend: Backend = "auto",
    rng: RandomKey | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Compute attention to keys that are mixtures of K Gaussians (MGK), or K shifted keys (sMGK).

    Source: MGK, ICML 2022, Eq. (7); hard E-step, section 2.3; Table 10 (shared keys):
        attn_weights[i, j] ∝ Σ_r π_r exp(−‖query[i] − key[j, r]‖² / (2 σ²_r))
    score = dot: query[i] · key[j, r] / σ²_r in the exponential; hard: max_r instead of Σ_r;
    shifted keys: key[j, r] = key[j] + b_r.
    Departs from the source: sums of exponentials in log space.

    Args:
        query: (B, H, N, E).
        key: (B, H_kv, K, L, E), or K tensors (B, H_kv, L, E); with `key_shift` one key,
            (B, H_kv, L, E).
        value: (B, H_kv, L, E_v).
        scale: 1/σ² of all components, if `variance` is None. None means 1/√E.
        log_prior: log π, (K,), (H_kv, K) or (H_kv, K, L). None means equal priors. -inf for all
            components of a key has no defined gradient: use `attn_mask`.
        variance: σ², positive, (K,) or (H_kv, K).
        key_shift: b, (K, E) or (H_kv, K, E).
        score: `gaussian` or `dot`.
        hard: use the largest component instead of the sum; the paper then has no prior.
        include_log_det: add −(E/2) log σ²_r, the exact Gaussian density.

    For other arguments and errors see `lit_probattn.functional`.

    Returns:
        (B, H, N, E_v).
    """
    check_argument("score", score, Score)
    layout, key, shift, components = mixture_of(query, key, value, key_shift, enable_gqa)
    if variance is not None and scale is not None:
        raise ValueError(f"variance and scale={scale} both set 1/σ²: pass one of them")
    check_scale(scale)
    equal = variance is None or components == 1
    if variance is None:
        factor = layout.head_dim**-0.5 if scale is None else scale
        shape, exact = (1, components), torch.float64
        variance = torch.full(shape, 1.0 / factor, dtype=exact, device=query.device)
    else:
        variance = by_head("variance", variance, layout.key, components)
    sigma2 = variance.expand(layout.key, -1)

    def variant(call: HeadCall) -> MGK:
        prior = log_prior
        if prior is not None:
            sizes = layout.key, components, call, cu_seqlens is not None
            prior = by_component("log_prior", prior, *sizes)
        return MGK(prior, sigma2, score, include_log_det, equal, hard, shift)

    given = attn_mask, dropout_p, is_causal, None, backend, rng, cu_seqlens, cu_seqlens_k
    return attend_heads(query, key, value, layout.out, variant, *given)
