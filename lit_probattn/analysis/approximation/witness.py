"""Carathéodory's theorem as programs: the same output from at most E + 1 values.

Source: value-aware attention (Gupta and Berant, 2021), section 3: for r ≥ E + 1 (E the size of a
value) the optimal value-aware approximation is exact. `nnls_witness` is the slow, plain way for
one query; `eliminate` does all queries of a head together in a fixed number of steps.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lit_probattn.analysis.approximation.greedy import Problem, first_support, grow
from lit_probattn.analysis.approximation.simplex import Support, reoptimise

_MOST_KEYS = 14
# Smaller entries of a null vector, beside its largest, are rounding.
_LEAST_PIVOT = 1e-9
Array = npt.NDArray[np.float64]


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


def eliminate(value: Tensor, weights: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Return weights with at most E + 1 non-zeros per query and the same outputs.

    Every step takes the least of the remaining weights, finds directions in the null space of
    their points (1, v), and moves along each until a weight is zero; sum and mean stay.

    Args:
        value: (L, E), shared by all queries.
        weights: (N, L), non-negative; rows sum to one.
        allowed: keys that a query may use, bool, broadcastable to (N, L). None means all.

    Returns:
        (N, L).
    """
    num_kept = value.shape[1] + 1
    num_keys = value.shape[0]
    if num_keys <= num_kept:
        return weights
    points = _points(value)
    order = weights.argsort(-1)
    beta = weights.gather(-1, order)
    if allowed is not None:
        # A hidden key becomes a second copy of the heaviest key, which may carry any weight.
        hidden = ~allowed.expand_as(weights).gather(-1, order)
        order = torch.where(hidden, order[:, -1:], order)
    index, load = order[:, :num_kept], beta[:, :num_kept]
    for start in range(num_kept, num_keys, num_kept):
        stop = min(start + num_kept, num_keys)
        index = torch.cat([index, order[:, start:stop]], -1)
        load = torch.cat([load, beta[:, start:stop]], -1)
        load, live = _eliminate_buffer(points[index], load, num_kept)
        place = live.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, :num_kept]
        index, load = index.gather(-1, place), load.gather(-1, place)
    return torch.zeros_like(weights).scatter_add(-1, index, load)


def _points(value: Tensor) -> Tensor:
    """Centred and scaled values with a one behind, (L, E + 1)."""
    centred = value - value.mean(0)
    spread = centred.square().sum(-1).mean().sqrt().clamp_min(torch.finfo(value.dtype).tiny)
    return torch.cat([centred / spread, torch.ones_like(value[:, :1])], -1)


def _eliminate_buffer(points: Tensor, load: Tensor, num_kept: int) -> tuple[Tensor, Tensor]:
    """Bring (N, K) loads of points (N, K, m) to at most m non-zeros.

    Returns:
        The loads, and which slots were not eliminated (m of them), both (N, K).
    """
    null = torch.linalg.qr(points, mode="complete").Q[..., num_kept:]  # (N, K, K − m)
    live = torch.ones_like(load, dtype=torch.bool)
    for _ in range(null.shape[-1]):
        u, null = null[..., 0], null[..., 1:]
        sizes = u.abs() * live
        usable = sizes > sizes.amax(-1, keepdim=True) * _LEAST_PIVOT
        up, rising = _ratio_test(load, u, usable & (u > 0))
        down, falling = _ratio_test(load, -u, usable & (u < 0))
        larger = u.gather(-1, rising).abs() >= u.gather(-1, falling).abs()
        larger = larger & up.isfinite() | ~down.isfinite()
        pivot, step = torch.where(larger, rising, falling), torch.where(larger, up, -down)
        step = torch.where(step.isfinite(), step, 0.0)
        load = (load - step * u).clamp_min(0.0).scatter(-1, pivot, 0.0)
        live = live.scatter(-1, pivot, False)
        rows = pivot[..., None].expand(-1, -1, null.shape[-1])
        share = null.gather(-2, rows) / u.gather(-1, pivot)[..., None]
        null = (null - u[..., None] * share).scatter(-2, rows, 0.0)
    return load, live


def _ratio_test(load: Tensor, u: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
    """Return the longest step along −u without a negative load, and its pivot; (N, 1) each.

    Of several slots that become zero at once, the pivot is the one with the largest entry.
    """
    ratio = torch.where(usable, load / u, float("inf"))
    step = ratio.amin(-1, keepdim=True)
    ties = usable & (ratio <= step * (1.0 + 1e-9))
    return step, torch.where(ties, u, -1.0).argmax(-1, keepdim=True)
