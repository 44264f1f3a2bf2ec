"""From dot products to Gaussians while a model is trained: the weight of keys' norms goes to 0."""

from __future__ import annotations

from torch import nn

from lit_probattn.attention.mgk.layer import MGKCore


def annealed_cores(model: nn.Module) -> list[MGKCore]:
    """Return the cores of a model whose norms have a weight."""
    cores = [part for part in model.modules() if isinstance(part, MGKCore)]
    return [core for core in cores if core.key_norm_weight is not None]


def check_annealing(model: nn.Module, steps: int) -> None:
    """Check that a model has what is to be annealed.

    Raises:
        ValueError: no layer has norms with a weight.
    """
    if not annealed_cores(model):
        raise ValueError(
            f"norm_annealing_steps {steps} has nothing to anneal: give the attention, MGK or sMGK "
            f"with Gaussian scores, key_norm_weight 1.0 (`lit-probattn convert … --anneal` writes "
            "it), or leave norm_annealing_steps out"
        )


def share_left(step: int, steps: int) -> float:
    """Return 1 − step / steps, and 0 from `steps` on."""
    return max(0.0, 1.0 - step / steps)


def anneal_norms(model: nn.Module, step: int, steps: int) -> float:
    """Set the weight λ of keys' norms after `step` optimiser steps; return the largest.

    Source: extension of ours of MGK, ICML 2022: λ falls in a straight line from what the layer was
    made with, to 0 after `steps`.
    """
    share, weights = share_left(step, steps), [0.0]
    for core in annealed_cores(model):
        weights.append((core.start_norm_weight or 0.0) * share)
        core.set_norm_weight(weights[-1])
    return max(weights)
