"""Per-head attention to keys that are mixtures of Gaussians."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_probattn.attention.backends import Backend, attend
from lit_probattn.attention.call import check_scale
from lit_probattn.attention.mgk.functions import MGK, Score
from lit_probattn.attention.packing import Packing
from lit_probattn.base.arguments import check_argument
from lit_probattn.functional.call import Common, by_head, components_of, layout_of, make_call
from lit_probattn.functional.documents import takes_documents
from lit_probattn.randomness import RandomKey


@takes_documents("log_prior")
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
        log_prior: log π, (K,), (H_kv, K) or (H_kv, K, L). None means equal priors.
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
    if not isinstance(key, Tensor):
        key = torch.stack(tuple(key), 2)
    if key_shift is None:
        if key.dim() != 5:
            raise ValueError(
                f"key has shape {tuple(key.shape)}, expected (B, heads, components, positions, "
                "size), a sequence of keys, or key_shift with one key"
            )
        components = keys = key.shape[2]
    else:
        components, keys = components_of(key_shift), 1
        if key.dim() != 4:
            raise ValueError(
                f"key has shape {tuple(key.shape)}; with key_shift expected one key, (B, heads, "
                "positions, size)"
            )
    layout = layout_of(query, key, value, enable_gqa, keys)
    kv, size = layout.key, layout.head_dim
    if variance is not None and scale is not None:
        raise ValueError(f"variance and scale={scale} both set 1/σ²: pass one of them")
    check_scale(scale)
    equal = variance is None or components == 1
    if variance is None:
        factor = size**-0.5 if scale is None else scale
        shape, exact = (1, components), torch.float64
        variance = torch.full(shape, 1.0 / factor, dtype=exact, device=query.device)
    else:
        variance = by_head("variance", variance, kv, components)
    if key_shift is not None:
        key_shift = by_head("key_shift", key_shift, kv, components, size).expand(kv, -1, -1)
    variant = MGK(
        log_prior=_prior(log_prior, kv, components, value.shape[2]),
        variance=variance.expand(kv, -1),
        score=score,
        include_log_det=include_log_det,
        equal_variance=equal,
        hard=hard,
        key_shift=key_shift,
    )
    common = Common(attn_mask, dropout_p, is_causal, None, rng)
    return attend(make_call(query, key, value, layout.out, common), variant, backend)


def _prior(log_prior: Tensor | None, heads: int, components: int, length: int) -> Tensor | None:
    """Return log π as (H_kv, K, 1 or L)."""
    if log_prior is None:
        return None
    if log_prior.dim() == 3:
        return by_head("log_prior", log_prior, heads, components, length).expand(heads, -1, -1)
    return by_head("log_prior", log_prior, heads, components).expand(heads, -1)[..., None]
