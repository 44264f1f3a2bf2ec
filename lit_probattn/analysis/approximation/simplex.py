"""The best convex combination of given values: Wolfe's minimum-norm point, batched over queries.

Tensors: G heads and samples, N queries, R slots of a support. A slot is live or free; free slots
have weight zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Weights below this are zero.
_ZERO = 1e-13
_RIDGE = 1e-14


@dataclass
class Support:
    """Selected values of each query and their weights; (G, N, R) each."""

    index: Tensor  # key of each slot
    weight: Tensor  # sums to one over live slots
    live: Tensor  # slots in use, bool

    @property
    def size(self) -> Tensor:
        """Number of live slots, (G, N)."""
        return self.live.sum(-1)

    def points(self, value: Tensor) -> Tensor:
        """Return the values of all slots, (G, N, R, E), for `value` (G, L, E)."""
        groups = torch.arange(value.shape[0], device=value.device).view(-1, 1, 1)
        return value[groups, self.index]

    def output(self, value: Tensor) -> Tensor:
        """Return Σ weight · value, (G, N, E)."""
        return (self.weight[..., None] * self.points(value)).sum(-2)

    def dense(self, num_keys: int) -> Tensor:
        """Return the weights of all keys, (G, N, L)."""
        empty = self.weight.new_zeros(*self.weight.shape[:2], num_keys)
        return empty.scatter_add(-1, self.index, self.weight * self.live)

    def widened(self, num_slots: int) -> Support:
        """Return the same with `num_slots` slots."""
        more = (0, num_slots - self.index.shape[-1])
        return Support(*(nn.functional.pad(x, more) for x in vars(self).values()))

    def copy(self) -> Support:
        """Return an independent copy."""
        return Support(self.index.clone(), self.weight.clone(), self.live.clone())


def reoptimise(support: Support, value: Tensor, output: Tensor, rows: Tensor | None = None) -> None:
    """Set the weights of supports to the point of their convex hull closest to `output`, in place.

    Source: Wolfe (1976), minor cycles: solve [[Y Yᵀ, 1], [1ᵀ, 0]] [μ; ν] = [0; 1] with Y = V_S − o;
    if all μ are positive they are the weights, otherwise move towards μ until a weight is zero,
    drop it and repeat. Dropped slots become free. The distance never grows.

    Args:
        value: (G, L, E), float64 for reliable supports.
        output: o, (G, N, E).
        rows: queries to update, (G, N) bool. None means all.
    """
    chosen = support.live.any(-1) if rows is None else rows & support.live.any(-1)
    group, query = chosen.nonzero(as_tuple=True)
    index, live = support.index[group, query], support.live[group, query]
    weight = support.weight[group, query]
    shifted = value[group[:, None], index] - output[group, query][:, None]
    gram = shifted @ shifted.mT  # (P, R, R)
    gram = gram / gram.diagonal(dim1=-2, dim2=-1).amax(-1).clamp_min(1e-300)[:, None, None]
    pending = torch.arange(len(group), device=value.device)
    for _ in range(index.shape[-1] + 1):
        if not len(pending):
            break
        now, old = live[pending], weight[pending]
        target = _affine_minimum(gram[pending], now)
        bad = now & ~(target > _ZERO)
        done = ~bad.any(-1)
        step = torch.where(bad, old / (old - target).clamp_min(1e-300), 1.0)
        step = step.amin(-1, keepdim=True).clamp(0.0, 1.0)
        moved = torch.where(now, step * target + (1.0 - step) * old, 0.0)
        now = now & ~(bad & (moved <= 10 * _ZERO))
        live[pending], weight[pending] = now, torch.where(now, moved, 0.0)
        pending = pending[~done]
    weight = weight / weight.sum(-1, keepdim=True).clamp_min(1e-300)
    support.weight = support.weight.index_put((group, query), weight)
    support.live = support.live.index_put((group, query), live)


def _affine_minimum(gram: Tensor, live: Tensor) -> Tensor:
    """Return the weights, with sum one, of the point of the affine hull closest to 0; (P, R).

    They are A⁻¹ 1 / (1ᵀ A⁻¹ 1) for a Gram matrix A with largest entry one; a small ridge
    approximates the limit if A is singular (the hull contains the origin).
    """
    system = gram.masked_fill(~(live[:, :, None] & live[:, None, :]), 0.0)
    system.diagonal(dim1=-2, dim2=-1).add_(torch.where(live, _RIDGE, 1.0))
    factor = torch.linalg.cholesky_ex(system).L
    solution = torch.cholesky_solve(live.to(gram.dtype)[..., None], factor)[..., 0]
    total = solution.sum(-1, keepdim=True)
    return (solution / total.masked_fill(total == 0, 1.0)).nan_to_num(0.0, 0.0, 0.0)
