"""Carathéodory's theorem as a program: the same output from at most E + 1 values.

Source: value-aware attention (Gupta and Berant, 2021), section 3: for r ≥ E + 1 (E the size of a
value) the optimal value-aware approximation is exact. All queries of a head are processed together
in a fixed number of steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Entries of a null vector below this share of its largest are rounding errors.
_LEAST_PIVOT = 1e-9


def eliminate(value: Tensor, weights: Tensor, allowed: Tensor | None = None) -> Tensor:
    """Return weights with at most E + 1 non-zeros per query and the same outputs.

    Each step selects the smallest remaining weights, computes directions in the null space of their
    points (1, v), and moves along each until a weight is zero; sum and mean do not change.

    Args:
        value: (L, E), shared by all queries.
        weights: (N, L), non-negative; rows sum to one, before and after.
        allowed: allowed keys, bool, broadcastable to (N, L). None means all.
    """
    num_kept = value.shape[1] + 1
    num_keys = value.shape[0]
    if num_keys <= num_kept:
        return weights
    points = _points(value)
    order = weights.argsort(-1)
    beta = weights.gather(-1, order)
    if allowed is not None:
        # Masked keys become copies of the key with the largest weight, which may have any weight.
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
    """Return centred and scaled values with an appended one, (L, E + 1)."""
    centred = value - value.mean(0)
    spread = centred.square().sum(-1).mean().sqrt().clamp_min(torch.finfo(value.dtype).tiny)
    return torch.cat([centred / spread, torch.ones_like(value[:, :1])], -1)


def _eliminate_buffer(points: Tensor, load: Tensor, num_kept: int) -> tuple[Tensor, Tensor]:
    """Reduce loads (N, K) of points (N, K, m) to at most m non-zeros; return the m slots."""
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

    If several slots become zero at once, the pivot is the one with the largest entry.
    """
    ratio = torch.where(usable, load / u, float("inf"))
    step = ratio.amin(-1, keepdim=True)
    ties = usable & (ratio <= step * (1.0 + 1e-9))
    return step, torch.where(ties, u, -1.0).argmax(-1, keepdim=True)
