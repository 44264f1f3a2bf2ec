"""The prior update of MGK's released code, for comparison with results made by it."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from lit_probattn.attention.functional import compute_dtype
from lit_probattn.attention.masks import Masks
from lit_probattn.attention.mgk.functions import component_scores

EMCodeParity = Literal["none", "lra", "lm"]
_DENSITY_EPS = 1e-6
_COUNT_EPS = 1e-6


@torch.no_grad()
def code_parity_sums(
    query: Tensor,
    key: Tensor,
    *,
    masks: Masks,
    query_mask: Tensor | None,
    log_prior: Tensor,
    variance: Tensor,
    code: EMCodeParity,
) -> tuple[Tensor, Tensor]:
    """Return numerator and denominator of the released code's priors, both (H, 2, L) float64.

    Source: released code of MGK, ICML 2022, two components, priors per head and key position:
        γ_ij = π_j1 e^{g_ij1} / (π_j1 e^{g_ij1} + π_j2 e^{g_ij2} + 1e-6)
        lra:  π_j1 = Σ_i γ_ij / (Σ_i 1 + 1e-6)   over real queries and keys
        lm:   π_j1 = Σ_i γ_ij / Σ_i 1            over all pairs, hidden ones included
        π_j2 = 1 − π_j1
    The 1e-6 is added to a density that is not normalised, so far queries move mass to component 2.

    Args:
        query: (B, H, N, E).
        key: (B, H, 2, L, E).
        masks: of the call; `lra` reads the key mask.
        query_mask: real queries, (B, N). None means all.
        log_prior: (H, 2, 1 or L).
        variance: σ², (H, 2).
        code: which of the two.
    """
    dtype = compute_dtype(query)
    heads, num_keys = query.shape[1], key.shape[3]
    first = torch.zeros(heads, num_keys, dtype=torch.float64, device=query.device)
    count = torch.zeros_like(first)
    for sample in range(query.shape[0]):
        scores = component_scores(
            query[sample : sample + 1].to(dtype),
            key[sample : sample + 1].to(dtype),
            log_prior=log_prior.to(dtype),
            variance=variance.to(dtype),
            score="gaussian",
            include_log_det=False,
        )[0]  # (H, 2, N, L)
        eps = scores.new_full((), math.log(_DENSITY_EPS))
        total = torch.logaddexp(scores.logsumexp(1), eps)
        share = torch.exp(scores[:, 0] - total).to(torch.float64)  # (H, N, L)
        pairs = torch.ones_like(share[0])
        if code == "lra":
            if query_mask is not None:
                pairs = pairs * query_mask[sample, :, None]
            if masks.key_mask is not None:
                pairs = pairs * masks.key_mask[sample, None]
        first += (share * pairs).sum(1)
        count += pairs.sum(0)
    if code == "lra":
        count = torch.where(count > 0, count + _COUNT_EPS, 0.0)
    return torch.stack([first, count - first], 1), count[:, None].expand(-1, 2, -1)
