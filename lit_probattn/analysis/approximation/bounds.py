"""Bounds of the error of r values, for tests and reports: variance, herding, one lower bound.

`value` (L, E) are the values that one query sees, `weights` (L,) its attention weights.
"""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor

from lit_probattn.analysis.approximation.greedy import Problem, first_support, grow
from lit_probattn.analysis.approximation.simplex import Support, reoptimise

_MOST_KEYS = 14


def variance(value: Tensor, weights: Tensor) -> Tensor:
    """Return Var_α = Σ α_i ‖v_i − o‖²; optimal-v-aware-r has squared error ≤ Var_α / r; ()."""
    return (weights * (value - weights @ value).square().sum(-1)).sum()


def herding(value: Tensor, weights: Tensor, num_kept: int) -> Tensor:
    """Return the average of r values (some maybe twice) with squared error ≤ Var_α / r; (E,).

    e = 0; r times: take the i that minimises ‖e + v_i − o‖, then e ← e + v_i − o.
    """
    output = weights @ value
    shifted = value - output
    total = torch.zeros_like(output)
    for _ in range(num_kept):
        total = total + shifted[(total + shifted).square().sum(-1).argmin()]
    return output + total / num_kept


def hull_distance(point: Tensor, value: Tensor) -> Tensor:
    """Return the distance of points (N, E) from the convex hull of `value` (L, E); (N,)."""
    value, point = value.double(), point.double()
    allowed = torch.ones(1, len(point), len(value), dtype=torch.bool)
    problem = Problem(value[None], allowed.double() / len(value), allowed, point[None])
    support = first_support(problem, min(len(value), value.shape[1] + 2))
    grow(problem, support, support.index.shape[-1], "lmo")
    return problem.error(support)[0].sqrt()


def lower_bound(value: Tensor, weights: Tensor, num_kept: int) -> Tensor:
    """Return LB_1, a lower bound of the error of optimal-v-aware-r; ().

        LB_1 = (1 − 1/r) · min_i dist((o − v_i / r) / (1 − 1/r), conv(V))

    The largest weight of the optimum is at least 1/r. It is zero as soon as some α_i ≥ 1/r.
    """
    output = weights @ value
    if num_kept == 1:
        return (value - output).norm(dim=-1).min()
    rest = 1.0 - 1.0 / num_kept
    return rest * hull_distance((output - value / num_kept) / rest, value).min()


def enumerate_optimum(value: Tensor, weights: Tensor, num_kept: int) -> Tensor:
    """Return the error of optimal-v-aware-r by trying every set of r values; ().

    Raises:
        ValueError: more than 14 values.
    """
    num_keys = len(value)
    if num_keys > _MOST_KEYS:
        raise ValueError(f"enumeration is for at most {_MOST_KEYS} values, received {num_keys}")
    sets = torch.tensor(list(combinations(range(num_keys), min(num_kept, num_keys))))[None]
    live = torch.ones_like(sets, dtype=torch.bool)
    output = (weights @ value).double().expand(1, sets.shape[1], -1)
    support = Support(sets, live.double() / sets.shape[-1], live)
    reoptimise(support, value[None].double(), output)
    return (support.output(value[None].double()) - output).norm(dim=-1).min()
