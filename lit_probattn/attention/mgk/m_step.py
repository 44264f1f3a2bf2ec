"""Setting B of the mixtures of keys: what a layer gathers for the M-step, and when."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lit_probattn.attention.functional import autocast_off
from lit_probattn.attention.masks import Masks
from lit_probattn.attention.mgk.em_parity import EMCodeParity, code_parity_sums
from lit_probattn.attention.mgk.functions import Score
from lit_probattn.attention.mgk.priors import EStep, MixturePrior, MixtureVariance
from lit_probattn.attention.mgk.responsibilities import responsibility_sums


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
