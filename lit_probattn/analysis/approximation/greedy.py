"""Selection of r values by a fully corrective greedy search, an estimate of optimal-v-aware-r.

For 1 < r ≤ E the optimal support is a combinatorial problem. Three searches run per query and the
best result is used. Its error is an upper bound on the optimal error, at most that of
optimal-v-oblivious-r, and does not grow with r.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lit_probattn.analysis.approximation.oracles import nearest_value
from lit_probattn.analysis.approximation.simplex import Support, reoptimise
from lit_probattn.base.arguments import check_argument

Select = Literal["linesearch", "lmo"]
# A step must reduce the squared error by this share of ‖o‖².
_LEAST_GAIN = 1e-14
_SWAP_CANDIDATES = 4


@dataclass(frozen=True)
class Problem:
    """Queries of several heads, in float64."""

    value: Tensor  # (G, L, E)
    weights: Tensor  # attention weights, (G, N, L)
    allowed: Tensor  # allowed keys, (G, N, L) bool
    output: Tensor  # o, (G, N, E)

    @property
    def seen(self) -> Tensor:
        """Queries with at least one allowed key, (G, N)."""
        return self.allowed.any(-1)

    def error(self, support: Support) -> Tensor:
        """Return the squared error of the output of a support, (G, N)."""
        return (support.output(self.value) - self.output).square().sum(-1)


def first_support(problem: Problem, num_slots: int) -> Support:
    """Return the supports of r = 1 with `num_slots` slots."""
    first = nearest_value(problem.value, problem.output, problem.allowed)
    index = first[..., None].repeat(1, 1, num_slots)
    live = torch.zeros_like(index, dtype=torch.bool)
    live[..., 0] = problem.seen
    return Support(index, live.to(problem.value.dtype), live)


def grow(problem: Problem, support: Support, num_kept: int, select: Select) -> None:
    """Add values to supports in place until they have `num_kept`, or no value reduces the error.

    A round selects the value with the largest error reduction by line search (`linesearch`), or the
    value most aligned with the residual (`lmo`, fully corrective Frank-Wolfe), then recomputes all
    weights (`reoptimise`). A zero weight frees its slot.

    Raises:
        ValueError: `select` is unknown.
    """
    check_argument("select", select, Select)
    least = problem.output.square().sum(-1) * _LEAST_GAIN
    growing = problem.seen.clone()
    for _ in range(3 * num_kept):
        growing = growing & (support.size < num_kept)
        if not bool(growing.any()):
            return
        gain, share, direction = _gains(problem, support)
        ranking = gain if select == "linesearch" else direction
        best = ranking.argmax(-1, keepdim=True)  # (G, N, 1)
        growing = growing & (gain.gather(-1, best)[..., 0] > least)
        _insert(support, best, share.gather(-1, best), growing)
        reoptimise(support, problem.value, problem.output, growing)


def _gains(problem: Problem, support: Support) -> tuple[Tensor, Tensor, Tensor]:
    """Return the decrease of the squared error, step and direction for each key; (G, N, L)."""
    value, found = problem.value, support.output(problem.value)
    residual = problem.output - found
    along = residual @ value.mT
    num = along - (residual * found).sum(-1, keepdim=True)
    squares = value.square().sum(-1)[..., None, :]
    den = squares - 2.0 * found @ value.mT + found.square().sum(-1, keepdim=True)
    share = (num / den.clamp_min(1e-300)).clamp(0.0, 1.0)
    gain = 2.0 * share * num - share.square() * den
    free = problem.allowed & (support.dense(value.shape[-2]) == 0)
    hidden = float("-inf")
    return gain.masked_fill(~free, hidden), share, along.masked_fill(~free, hidden)


def _insert(support: Support, key: Tensor, share: Tensor, rows: Tensor) -> None:
    """Insert `key` (G, N, 1) into the first free slot of `rows`, after a step of size `share`."""
    slot = support.live.to(torch.int8).argmin(-1, keepdim=True)
    chosen = rows[..., None]
    weight = torch.where(chosen, support.weight * (1.0 - share), support.weight)
    old_weight, old_key = weight.gather(-1, slot), support.index.gather(-1, slot)
    support.weight = weight.scatter(-1, slot, torch.where(chosen, share, old_weight))
    support.index = support.index.scatter(-1, slot, torch.where(chosen, key, old_key))
    support.live = support.live.scatter(-1, slot, support.live.gather(-1, slot) | chosen)


def heaviest_support(problem: Problem, num_kept: int) -> Support:
    """Return the r keys with the largest weights, with optimal weights (`ovo_reopt`)."""
    ranking = problem.weights.masked_fill(~problem.allowed, -1.0)
    top = torch.sort(ranking, dim=-1, descending=True, stable=True)
    count = min(num_kept, ranking.shape[-1])
    index, weight = top.indices[..., :count], top.values[..., :count]
    live = weight >= 0
    support = Support(index, weight * live, live)
    _normalise(support, 0.0)
    reoptimise(support, problem.value, problem.output)
    return support


def _normalise(support: Support, least: float) -> None:
    """Normalise weights to sum one; uniform if they sum to at most `least`."""
    total = support.weight.sum(-1, keepdim=True)
    alike = support.live / support.live.sum(-1, keepdim=True).clamp_min(1)
    support.weight = torch.where(total > least, support.weight / total.clamp_min(1e-300), alike)


def better(problem: Problem, first: Support, second: Support) -> Support:
    """Return the support with the smaller error per query; `first` for equal errors."""
    take = (problem.error(second) < problem.error(first))[..., None]
    pairs = zip(vars(first).values(), vars(second).values(), strict=True)
    return Support(*(torch.where(take, new, old) for old, new in pairs))


def swap(problem: Problem, support: Support, num_kept: int, passes: int) -> Support:
    """Try to replace each member by one of the four best other keys, and keep improvements.

    Expensive: `passes` · r · 5 re-optimisations.
    """
    for _ in range(passes):
        for slot in range(num_kept):
            trial = support.copy()
            trial.live[..., slot] = False
            trial.weight[..., slot] = 0.0
            _normalise(trial, 1e-12)
            reoptimise(trial, problem.value, problem.output)
            rows = trial.live.any(-1)
            gain, share, _ = _gains(problem, trial)
            for best in gain.topk(min(_SWAP_CANDIDATES, gain.shape[-1]), -1).indices.unbind(-1):
                key = best[..., None]
                usable = rows & (gain.gather(-1, key)[..., 0] > 0)
                other = trial.copy()
                _insert(other, key, share.gather(-1, key), usable)
                reoptimise(other, problem.value, problem.output)
                support = better(problem, support, other)
    return support


def value_aware(
    value: Tensor,
    weights: Tensor,
    ranks: Sequence[int],
    *,
    allowed: Tensor | None = None,
    swaps: int = 0,
    max_queries: int = 8192,
) -> dict[int, Tensor]:
    """Return estimates of optimal-v-aware-r: weights with at most r non-zeros for each r.

    Source: value-aware attention (Gupta and Berant, 2021), section 3; the searches are not from the
    paper. r = 1 is exact; use `witness` for r ≥ E + 1. The result is the best of two greedy
    searches, the r largest weights re-weighted, and the results for smaller r in `ranks`.

    Args:
        value: (G, L, E).
        weights: attention weights, (G, N, L), like the results, which are in float64.
        ranks: values of r, at least 1 (otherwise ValueError).
        allowed: allowed keys, bool, broadcastable to (G, N, L). None means all.
        swaps: number of passes that exchange members.
        max_queries: number of queries per chunk.
    """
    if min(ranks, default=0) < 1:
        raise ValueError(f"ranks must be at least 1, received {list(ranks)}")
    groups, num_queries, num_keys = weights.shape
    seen = torch.ones_like(weights, dtype=torch.bool)
    seen = seen if allowed is None else seen & allowed
    parts: dict[int, list[Tensor]] = {rank: [] for rank in ranks}
    step = max(1, max_queries // num_queries)
    for start in range(0, groups, step):
        chosen = slice(start, start + step)
        v, a = value[chosen].double(), weights[chosen].double()
        problem = Problem(v, a, seen[chosen], a @ v)
        for rank, support in _path(problem, sorted(set(ranks)), swaps).items():
            parts[rank].append(support.dense(num_keys))
    return {rank: torch.cat(found) for rank, found in parts.items()}


def _path(problem: Problem, ranks: Sequence[int], swaps: int) -> dict[int, Support]:
    """Return supports of increasing ranks, each warm-started from the previous one."""
    searches: dict[Select, Support] = {
        select: first_support(problem, 1) for select in ("linesearch", "lmo")
    }
    best = first_support(problem, 1)
    found = {}
    for rank in ranks:
        size = min(rank, problem.value.shape[-2])
        best = best.widened(size)
        for select in searches:
            searches[select] = searches[select].widened(size)
            grow(problem, searches[select], size, select)
            best = better(problem, best, searches[select])
        best = better(problem, best, heaviest_support(problem, size))
        if swaps and size > 1:
            best = swap(problem, best, size, swaps)
        found[rank] = best.copy()
    return found
