"""Oracles of the value-aware approximations: exact in other ways, and bounds.

Source: value-aware attention (Gupta and Berant, 2021), sections 2 and 3.
Kernels depart from it: no epsilon in denominators, so that weights sum to one; polynomial kernels
add 1e-12 to the square of a product.
"""

from __future__ import annotations

from itertools import combinations
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lit_probattn.analysis.approximation.greedy import Problem, first_support, grow
from lit_probattn.analysis.approximation.random_features import log_features
from lit_probattn.analysis.approximation.simplex import Support, reoptimise
from lit_probattn.attention.linear.features import FeatureMap
from lit_probattn.attention.numerics import masked_softmax

Kernel = Literal["exp", "poly", "elu"]
_MOST_KEYS = 14
Array = npt.NDArray[np.float64]


def kernel_weights(
    query: Tensor, key: Tensor, kernel: Kernel, *, allowed: Tensor | None = None, degree: int = 2
) -> Tensor:
    """Return the weights of a kernel over what may be seen, (B, H, N, L).

    Args:
        query: (B, H, N, E).
        key: (B, H, L, E).
        kernel: `exp` (exp(q · k / √E)), `poly` ((q · k)^degree) or `elu` ((elu(q) + 1) · (elu(k) +
            1), without scaling).
        allowed: bool, broadcastable to (B, H, N, L). None means all. Rows without any give zeros.
        degree: even power of `poly`.

    Raises:
        ValueError: the kernel is unknown.
    """
    if kernel == "exp":
        return masked_softmax(query @ key.mT * query.shape[-1] ** -0.5, allowed)
    if kernel == "poly":
        squares = (query @ key.mT).square() + 1e-12
        return masked_softmax(squares.log() * (degree / 2), allowed)
    if kernel != "elu":
        raise ValueError(f"kernel must be exp, poly or elu, received {kernel!r}")
    features = FeatureMap("elu")
    products = features.query(query, None) @ features.key(key, None, None).mT
    if allowed is not None:
        products = products.masked_fill(~allowed, 0.0)
    total = products.sum(-1, keepdim=True)
    return products / total.masked_fill(total == 0, 1.0)


def square_features(x: Tensor, compact: bool = True) -> Tensor:
    """Return φ with φ(q) · φ(k) = (q · k)².

    Source: value-aware attention, section 2: φ(x) = vec(x xᵀ). Compact: each pair once, off the
    diagonal times √2.

    Args:
        x: (…, E).
        compact: E (E + 1) / 2 numbers instead of E².

    Returns:
        (…, F).
    """
    outer = x[..., :, None] * x[..., None, :]
    if not compact:
        return outer.flatten(-2)
    rows, cols = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
    one = torch.ones((), dtype=x.dtype, device=x.device)
    return outer[..., rows, cols] * torch.where(rows == cols, one, (2 * one).sqrt())


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


def nnls(matrix: Array, target: Array, max_steps: int | None = None) -> Array:
    """Return argmin over x ≥ 0 of ‖matrix x − target‖ (Lawson and Hanson, 1974).

    Columns with a positive entry are linearly independent, so there are at most as many as rows.

    Args:
        matrix: (m, n).
        target: (m,).
        max_steps: most steps. None means 30 n.

    Raises:
        RuntimeError: it has not converged.
    """
    _, count = matrix.shape
    x = np.zeros(count)
    passive = np.zeros(count, dtype=bool)
    tolerance = 4 * np.finfo(float).eps * np.abs(matrix).sum(0).max()
    steps = 30 * count if max_steps is None else max_steps
    banned = np.zeros(count, dtype=bool)
    while steps > 0:
        gradient = matrix.T @ (target - matrix @ x)
        candidates = ~passive & ~banned & (gradient > tolerance)
        if not candidates.any():
            return x
        new = int(np.where(candidates, gradient, -np.inf).argmax())
        passive[new] = True
        solution = _least_squares(matrix, target, passive)
        if solution[new] <= 0:  # rounding: the column depends on the others
            passive[new], banned[new] = False, True
            continue
        banned[:] = False
        while steps > 0 and (solution[passive] <= 0).any():
            steps -= 1
            falling = passive & (solution <= 0)
            step = (x[falling] / (x[falling] - solution[falling])).min()
            x = x + step * (solution - x)
            passive &= x > 1e-15
            x[~passive] = 0.0
            solution = _least_squares(matrix, target, passive)
        x, steps = solution, steps - 1
    raise RuntimeError(f"no solution after the allowed steps for {count} columns")


def _least_squares(matrix: Array, target: Array, passive: npt.NDArray[np.bool_]) -> Array:
    solution = np.zeros(matrix.shape[1])
    solution[passive] = np.linalg.lstsq(matrix[:, passive], target, rcond=None)[0]
    return solution


def nnls_witness(value: Array, weights: Array) -> Array:
    """Return weights with at most E + 1 non-zeros and the same output, for one query; (L,).

    Values are centred and scaled, and a row of ones keeps the sum:

        minimise ‖ [(V − v̄)ᵀ / s; 1ᵀ] β − [(o − v̄) / s; 1] ‖ over β ≥ 0

    Args:
        value: values of the keys that the query sees, (L, E).
        weights: their weights, (L,), non-negative, summing to one.
    """
    centre = value.mean(0)
    spread = np.sqrt(((value - centre) ** 2).sum(1).mean()) or 1.0
    points = (value - centre) / spread
    matrix = np.concatenate([points.T, np.ones((1, len(value)))])
    target = np.append(weights @ points, 1.0)
    found = nnls(matrix, target)
    return found / found.sum()


def estimate_ratio(query: Tensor, key: Tensor, rows: Tensor) -> Tensor:
    """Return (mean of the estimates over features) / exp(q · k / √E) for pairs (…, E); (…)."""
    exponents = log_features(query, rows) + log_features(key, rows)
    exact = (query * key).sum(-1, keepdim=True) * query.shape[-1] ** -0.5
    return torch.exp(exponents - exact).mean(-1)
