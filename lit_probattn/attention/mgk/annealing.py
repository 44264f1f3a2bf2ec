"""Annealing from dot products to Gaussian scores in training: the weight of key norms goes to 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from lit_probattn.base.arguments import Count, Options, Range, checks_arguments

_NAME = "key_norm_weight"  # name of the option, and of the buffer in state dicts


@dataclass(frozen=True, kw_only=True)
class NormOptions(Options):
    """The option of Gaussian scores that start as dot products.

    Args:
        key_norm_weight: λ in [0, 1] of Gaussian scores, which adds λ ‖key[j, r]‖² / (2 σ²_r) to
            log π: 1 starts with the dot product, and training with `norm_annealing_steps` reduces
            it to 0, the Gaussian. Checkpoints store its value. None is the Gaussian from the start.
    """

    key_norm_weight: Annotated[float, Range(0, most=1)] | None = None

    def check_norms(self, score: str) -> None:
        """Raise a ValueError if there is λ, but the scores contain no norms."""
        weight = self.key_norm_weight
        if weight is not None and score != "gaussian":
            raise ValueError(
                f"{_NAME}={weight:g} is for score=gaussian, received score={score}: remove it, the "
                "dot product has no norms"
            )


DOT_PRODUCTS = NormOptions(key_norm_weight=1.0)  # all of the norms is added back


class KeyNorms(nn.Module):
    """The weight λ of a core's key norms, (): a buffer; None for the Gaussian."""

    start_norm_weight: float | None = None
    key_norm_weight: Tensor | None

    def keep_norms(self, options: NormOptions) -> None:
        """Register the buffer."""
        weight = self.start_norm_weight = options.key_norm_weight
        self.register_buffer(_NAME, None if weight is None else torch.tensor(float(weight)))

    def set_norm_weight(self, weight: float) -> None:
        """Set λ; training anneals it.

        Raises:
            ValueError: the layer has no λ.
        """
        if self.key_norm_weight is None:
            raise ValueError(f"the layer has no {_NAME}: build it with one")
        self.key_norm_weight.fill_(weight)

    def drop_annealed(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Remove a weight that was annealed to 0 from a state dict, if this core has none.

        Raises:
            ValueError: the annealing was not complete.
        """
        name = f"{prefix}{_NAME}"
        if self.key_norm_weight is None and name in state_dict:
            weight = float(state_dict[name])
            if weight:
                raise ValueError(
                    f"{name} is {weight:.3g}, so these weights are not of a plain Gaussian layer: "
                    f"build it with {_NAME}, or train to the end of the annealing"
                )
            del state_dict[name]


def annealed_cores(model: nn.Module) -> list[KeyNorms]:
    """Return the cores of a model whose key norms have a weight."""
    cores = [part for part in model.modules() if isinstance(part, KeyNorms)]
    return [core for core in cores if core.key_norm_weight is not None]


class NormAnnealing:
    """Anneals the weight λ of key norms to 0 in training.

    Source: this package's extension of MGK, ICML 2022: λ decreases linearly from its initial value
    to 0 over these steps.

    Args:
        norm_annealing_steps: optimiser steps in which attention with `key_norm_weight` changes from
            dot products to Gaussians; the weight is a function of the step. None leaves the weight
            unchanged.
    """

    @checks_arguments
    def __init__(self, *, norm_annealing_steps: Count | None = None) -> None:
        self.steps = norm_annealing_steps

    def check(self, model: nn.Module) -> None:
        """Check that a model has a weight to anneal.

        Raises:
            ValueError: no layer has a weight of key norms.
        """
        if self.steps is not None and not annealed_cores(model):
            raise ValueError(
                f"norm_annealing_steps {self.steps} has nothing to anneal: set {_NAME} to 1.0 "
                "for MGK or sMGK with Gaussian scores (`lit-probattn convert … --anneal` does), or "
                "remove norm_annealing_steps"
            )

    def set_step(self, model: nn.Module, step: int) -> dict[str, float]:
        """Set λ after `step` optimiser steps; return the largest λ, for logging."""
        if self.steps is None:
            return {}
        share, weights = max(0.0, 1.0 - step / self.steps), [0.0]
        for core in annealed_cores(model):
            weights.append((core.start_norm_weight or 0.0) * share)
            core.set_norm_weight(weights[-1])
        return {"norm_weight": max(weights)}
