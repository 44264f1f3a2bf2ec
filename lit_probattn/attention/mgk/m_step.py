"""The M-step of setting B: sums of responsibilities over blocks of queries."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lit_probattn.attention.engines.loop import block_ranges
from lit_probattn.attention.masks import Masks
from lit_probattn.attention.mgk.functions import MGK, component_scores
from lit_probattn.attention.numerics import (
    biased,
    compute_dtype,
    masked_softmax,
    repeat_rows,
)


class ResponsibilitySums(NamedTuple):
    """Sums over queries and batch, float64.

    Args:
        numerator: numerator of the priors, (H_prior, K, L).
        denominator: denominator of the priors, (H_prior, K, L).
        squares: Σ_ij w_ij γ_ijr ‖query[i] − key[j, r]‖² for the variances, (H_prior, K), with the
            weights of `numerator`. None if not requested.
    """

    numerator: Tensor
    denominator: Tensor
    squares: Tensor | None


@torch.no_grad()
def responsibility_sums(
    query: Tensor,
    key: Tensor,
    arguments: MGK,
    *,
    masks: Masks,
    query_mask: Tensor | None,
    weighting: Literal["uniform", "posterior"],
    with_squares: bool = False,
    block_scores: int = 1 << 21,
) -> ResponsibilitySums:
    """Sum responsibilities γ_ijr = exp(s_ijr − logsumexp_r s_ijr) over queries and batch.

    Source: MGK, ICML 2022, Eq. (8) and the M-step below it:
        uniform:    N_jr = Σ_i γ_ijr,          over Σ_i 1
        posterior:  N_jr = Σ_i A_ij γ_ijr,     over Σ_i A_ij
    Departs from the source: only allowed pairs with real queries count; the posterior weighting is
    this package's option.

    Args:
        query: (B, H, N, E).
        key: (B, H_key, K, L, E).
        arguments: prior, variances and kind of score; see `component_scores`.
        masks: allowed pairs.
        query_mask: real queries, (B, N) bool. None means all.
        weighting: weight of a pair.
        with_squares: whether to sum squared distances as well; requires Gaussian scores without
            `norm_weight`.
        block_scores: scores per block of queries.
    """
    dtype = compute_dtype(query)
    query, key, variance = query.to(dtype), key.to(dtype), arguments.variance.to(dtype)
    arguments = replace(arguments, variance=variance)
    batch, heads, num_queries, _ = query.shape
    components, num_keys, prior_heads = key.shape[2], key.shape[3], variance.shape[0]
    shape = (prior_heads, components, num_keys)
    numerator = torch.zeros(shape, dtype=torch.float64, device=query.device)
    denominator = torch.zeros_like(numerator)
    squares = torch.zeros_like(numerator[..., 0]) if with_squares else None
    step = max(1, block_scores // max(1, batch * heads * components * num_keys))
    for rows in block_ranges(num_queries, step):
        cols = range(num_keys)
        scores = component_scores(query[:, :, rows.start : rows.stop], key, arguments)
        pairs = torch.ones(batch, heads, len(rows), num_keys, dtype=dtype, device=query.device)
        allowed = masks.allowed(rows, cols, query.device)
        if weighting == "posterior":
            pairs = masked_softmax(biased(scores.logsumexp(2), masks, rows, cols), allowed)
        elif allowed is not None:
            pairs = pairs * allowed
        if query_mask is not None:
            pairs = pairs * query_mask[:, None, rows.start : rows.stop, None]
        joint = scores.softmax(2) * pairs[:, :, None]  # (B, H, K, n, L)
        weighted = joint.to(torch.float64).sum((0, 3))
        counts = pairs.to(torch.float64).sum((0, 2))[:, None].expand_as(weighted)
        grouped = (prior_heads, heads // prior_heads)
        numerator += weighted.unflatten(0, grouped).sum(1)
        denominator += counts.unflatten(0, grouped).sum(1)
        if squares is not None:
            distances = _squared_distances(scores, arguments, query.shape[-1])
            moments = (joint * distances).to(torch.float64).sum((0, 3, 4))
            squares += moments.unflatten(0, grouped).sum(1)
    return ResponsibilitySums(numerator, denominator, squares)


def _squared_distances(scores: Tensor, arguments: MGK, head_dim: int) -> Tensor:
    """Return ‖query[i] − key[j, r]‖² from Gaussian scores, (B, H, K, N, L), without a product."""
    heads = scores.shape[1]
    sigma2 = repeat_rows(arguments.variance, heads)[None, :, :, None, None]
    if arguments.log_prior is not None:
        prior = repeat_rows(arguments.log_prior.to(scores.dtype), heads)
        scores = scores - prior[None, :, :, None, :]
    if arguments.include_log_det:
        scores = scores + (head_dim / 2.0) * sigma2.log()
    return (-2.0 * sigma2 * scores).clamp_min(0.0)
