"""From dot products to Gaussians while a model is trained: the weight of keys' norms goes to 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_NAME = "key_norm_weight"  # of the option, and of the buffer in state dicts


@dataclass(frozen=True, kw_only=True)
class NormOptions:
    """The option of Gaussian scores that start as dot products.

    Args:
        key_norm_weight: λ in [0, 1], of Gaussian scores: log π gains λ ‖key[j, r]‖² / (2 σ²_r), so
            that 1 starts at the dot product; training with `norm_annealing_steps` takes it to 0,
            the Gaussian. Checkpoints hold its value. None is the Gaussian from the beginning.
    """

    key_norm_weight: float | None = None

    @property
    def start_norm_weight(self) -> float | None:
        """λ at the start of training."""
        return self.key_norm_weight

    def check_norms(self, score: str) -> None:
        """Raise a ValueError where λ is out of range, or the scores have no norms."""
        weight = self.start_norm_weight
        if weight is None:
            return
        if score != "gaussian":
            raise ValueError(
                f"{_NAME}={weight:g} is for score=gaussian, received score={score}: leave it out, "
                "the dot product has no norms"
            )
        if not 0.0 <= weight <= 1.0:
            raise ValueError(f"{_NAME} must be in [0, 1], received {weight}")


DOT_PRODUCTS = NormOptions(key_norm_weight=1.0)  # where all of the norms are put back


class KeyNorms(nn.Module):
    """The weight λ of a core's key norms: a buffer, where the core is made with one."""

    start_norm_weight: float | None = None
    key_norm_weight: Tensor | None

    def keep_norms(self, options: NormOptions) -> None:
        """Make the buffer."""
        weight = self.start_norm_weight = options.start_norm_weight
        self.register_buffer(_NAME, None if weight is None else torch.tensor(float(weight)))

    @property
    def norm_weight(self) -> Tensor | None:
        """λ, (); None for the Gaussian."""
        return self.key_norm_weight

    def set_norm_weight(self, weight: float) -> None:
        """Set λ; for training, which anneals it.

        Raises:
            ValueError: the layer was made without it.
        """
        if self.norm_weight is None:
            raise ValueError(f"a layer without {_NAME} has no norms to weigh")
        self.norm_weight.fill_(weight)

    def refuse_norms(self, option: str) -> None:
        """Raise a ValueError if norms have a weight, for which an option has no place."""
        if self.norm_weight is not None:
            raise ValueError(f"{option} has no place for {_NAME}: leave one of them out")

    def drop_annealed(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Take a weight out of a state dict that has been annealed to 0, if there is none here.

        Raises:
            ValueError: it was not annealed to the end.
        """
        name = f"{prefix}{_NAME}"
        if self.norm_weight is None and name in state_dict:
            weight = float(state_dict[name])
            if weight:
                raise ValueError(
                    f"{name} is {weight:.3g}, so these weights are not of a plain Gaussian layer: "
                    f"build it with {_NAME}, or train to the end of the annealing"
                )
            del state_dict[name]


def annealed_cores(model: nn.Module) -> list[KeyNorms]:
    """Return the cores of a model whose norms have a weight."""
    cores = [part for part in model.modules() if isinstance(part, KeyNorms)]
    return [core for core in cores if core.norm_weight is not None]


class NormAnnealing:
    """Takes the weight λ of keys' norms to 0 while a model is trained.

    Source: extension of ours of MGK, ICML 2022: λ falls in a straight line from what the layer was
    made with, to 0 after these steps.

    Args:
        norm_annealing_steps: optimiser steps in which attention with `key_norm_weight` goes from
            dot products to Gaussians; its weight follows from the step. None leaves it alone.

    Raises:
        ValueError: it is below 1.
    """

    def __init__(self, *, norm_annealing_steps: int | None = None) -> None:
        if norm_annealing_steps is not None and norm_annealing_steps < 1:
            raise ValueError(
                f"norm_annealing_steps must be at least 1, received {norm_annealing_steps}"
            )
        self.steps = norm_annealing_steps

    def check(self, model: nn.Module) -> None:
        """Check that a model has what is to be annealed.

        Raises:
            ValueError: no layer has norms with a weight.
        """
        if self.steps is not None and not annealed_cores(model):
            raise ValueError(
                f"norm_annealing_steps {self.steps} has nothing to anneal: give the attention, MGK "
                f"or sMGK with Gaussian scores, {_NAME} 1.0 (`lit-probattn convert … --anneal` "
                "writes it), or leave norm_annealing_steps out"
            )

    def set_step(self, model: nn.Module, step: int) -> dict[str, float]:
        """Set λ after `step` optimiser steps; return the largest, to be logged."""
        if self.steps is None:
            return {}
        share, weights = max(0.0, 1.0 - step / self.steps), [0.0]
        for core in annealed_cores(model):
            weights.append((core.start_norm_weight or 0.0) * share)
            core.set_norm_weight(weights[-1])
        return {"norm_weight": max(weights)}
