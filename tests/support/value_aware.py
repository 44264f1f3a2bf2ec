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
    products = features.query(query, None) @ features.key(key, None)[0].mT
    if allowed is not None:
        products = products.masked_fill(~allowed, 0.0)
    total = products.sum(-1, keepdim=True)
    return products / total.masked_fill(total == 0, 1.0)


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
