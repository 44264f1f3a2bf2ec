"""Setting B of the mixtures of keys: sums of responsibilities, and when a layer gathers them."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from lit_probattn.attention.functional import autocast_off, compute_dtype, masked_softmax
from lit_probattn.attention.masks import Masks
from lit_probattn.attention.mgk.functions import Score, component_scores
from lit_probattn.attention.mgk.priors import EStep, MixturePrior, MixtureVariance


@torch.no_grad()
def responsibility_sums(
    query: Tensor,
    key: Tensor,
    *,
    masks: Masks,
    query_mask: Tensor | None,
    log_prior: Tensor,
    variance: Tensor,
    score: Score,
    include_log_det: bool,
    weighting: Literal["uniform", "posterior"],
    block_scores: int = 1 << 21,
) -> tuple[Tensor, Tensor]:
    """Sum responsibilities γ_ijr = exp(s_ijr − logsumexp_r s_ijr) over queries and batch.

    Source: MGK, ICML 2022, Eq. (8) and the M-step below it:
        uniform:    N_jr = Σ_i γ_ijr,          over Σ_i 1
        posterior:  N_jr = Σ_i A_ij γ_ijr,     over Σ_i A_ij
    Departs from the source: only pairs that the masks allow and queries that are real count; the
    posterior weighting is an option of ours.

    Args:
        query: (B, H, N, E).
        key: (B, H_key, K, L, E).
        masks: what each query may see.
        query_mask: real queries, (B, N) bool. None means all.
        log_prior: (H_prior, K, 1 or L).
        variance: (H_prior, K).
        score: kind of score.
        include_log_det: see `component_scores`.
        weighting: weight of a pair.
        block_scores: scores per block of queries.

    Returns:
        Numerator and denominator, both (H_prior, K, L) float64.
    """
    dtype = compute_dtype(query)
    query, key, variance = query.to(dtype), key.to(dtype), variance.to(dtype)
    batch, heads, num_queries, _ = query.shape
    components, num_keys, prior_heads = key.shape[2], key.shape[3], variance.shape[0]
    shape = (prior_heads, components, num_keys)
    numerator = torch.zeros(shape, dtype=torch.float64, device=query.device)
    denominator = torch.zeros_like(numerator)
    step = max(1, block_scores // (batch * heads * components * num_keys))
    for start in range(0, num_queries, step):
        rows = range(start, min(start + step, num_queries))
        cols = range(num_keys)
        scores = component_scores(
            query[:, :, rows.start : rows.stop],
            key,
            log_prior=log_prior,
            variance=variance,
            score=score,
            include_log_det=include_log_det,
        )
        pairs = torch.ones(batch, heads, len(rows), num_keys, dtype=dtype, device=query.device)
        allowed = masks.allowed(rows, cols, query.device)
        if weighting == "posterior":
            total = scores.logsumexp(2)
            bias = masks.bias_block(rows, cols)
            pairs = masked_softmax(total if bias is None else total + bias, allowed)
        elif allowed is not None:
            pairs = pairs * allowed
        if query_mask is not None:
            pairs = pairs * query_mask[:, None, rows.start : rows.stop, None]
        weighted = (scores.softmax(2) * pairs[:, :, None]).to(torch.float64).sum((0, 3))
        counts = pairs.to(torch.float64).sum((0, 2))[:, None].expand_as(weighted)
        grouped = (prior_heads, heads // prior_heads)
        numerator += weighted.unflatten(0, grouped).sum(1)
        denominator += counts.unflatten(0, grouped).sum(1)
    return numerator, denominator


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


class MStepPriors:
    """The part of a mixture layer that follows the M-step; mixed into its class.

    A training forward adds responsibilities; the task sums them over ranks and applies them once
    per optimiser step, so micro-batches and ranks together make one M-step.
    """

    prior: MixturePrior | None
    variance: MixtureVariance
    e_step: EStep
    score: Score
    include_log_det: bool
    em_weighting: Literal["uniform", "posterior"]
    em_code_parity: EMCodeParity

    @property
    def observes(self) -> bool:
        """Whether training calls are to be seen: setting B only."""
        return self.prior is not None and self.prior.by_m_step

    def observe(self, query: Tensor, key: Tensor, masks: Masks, query_mask: Tensor | None) -> None:
        """Add this pass's responsibilities; a recomputation inside backward adds nothing."""
        if self.prior is None or not self.prior.by_m_step or in_backward():
            return
        if self.em_code_parity != "none":
            with autocast_off(query):
                sums = code_parity_sums(
                    query.detach(),
                    key.detach(),
                    masks=masks,
                    query_mask=query_mask,
                    log_prior=self.prior(key.shape[3]),
                    variance=self.variance(),
                    code=self.em_code_parity,
                )
            self.prior.accumulate(*sums)
            return
        with autocast_off(query):
            numerator, denominator = responsibility_sums(
                query.detach(),
                key.detach(),
                masks=masks,
                query_mask=query_mask,
                log_prior=self.prior(key.shape[3]),
                variance=self.variance(),
                score=self.score,
                include_log_det=self.include_log_det,
                weighting=self.em_weighting,
            )
        self.prior.accumulate(numerator, denominator)

    def prior_statistics(self) -> Tensor | None:
        """Return numerator and denominator since the last update, (2, *prior shape), or None."""
        if self.prior is None or not self.prior.by_m_step or self.em_code_parity != "none":
            return None
        return self.prior.statistics()

    def apply_prior_update(self, statistics: Tensor) -> None:
        """Replace the priors by an M-step over `statistics` (summed over ranks by the caller)."""
        if self.prior is None or not self.prior.by_m_step:
            raise ValueError(f"e_step={self.e_step} has no M-step; only e_step=soft updates priors")
        self.prior.apply_statistics(statistics)


def in_backward() -> bool:
    """Whether this runs inside a backward pass, as recomputation of checkpoints does."""
    return torch._C._current_graph_task_id() != -1
