"""Linear algebra of head conversion: shared factors, reduced-rank regression, grouping of heads."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

# Up to this many heads, groups are the best ones; above, they are chosen greedily.
EXACT_HEADS = 12


@dataclass(frozen=True)
class Factors:
    """One query map and K key maps whose products approximate K bilinear forms."""

    query: Tensor  # (E, d)
    keys: Tensor  # (K, E, d)
    kept: float  # squared weight of the forms that is kept
    total: float  # squared weight of the forms


def second_moment(x: Tensor) -> Tensor:
    """Return the mean of x xᵀ over tokens: (T, d) -> (d, d)."""
    return x.mT @ x / x.shape[0]


def symmetric_roots(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Return C^½ and C^−½; directions that carry no weight are left out of both."""
    values, vectors = torch.linalg.eigh(moment)
    good = values > values.amax() * moment.shape[0] * torch.finfo(moment.dtype).eps
    root = values.clamp_min(0.0).sqrt()
    inverse = torch.where(good, 1.0 / root.masked_fill(~good, 1.0), 0.0)
    root = root.masked_fill(~good, 0.0)
    return (vectors * root) @ vectors.mT, (vectors * inverse) @ vectors.mT


def shared_query_factors(forms: Tensor, rank: int, moment: Tensor | None = None) -> Factors:
    """Cut the stack [A_1 | … | A_K] to a rank, as one query map and K key maps.

    With a moment C the decomposition is that of C^½ A_r C^½: among all maps of that rank it
    minimises Σ_r E (qᵀ(A_r − W_qᵀW_k,r)k)² over independent q and k with second moment C. Query and
    keys share the weight of a singular direction equally.

    Args:
        forms: A_r, (K, d, d).
        rank: E.
        moment: C, (d, d). None means the identity.
    """
    count, size, _ = forms.shape
    weighted = forms
    if moment is not None:
        root, inverse = symmetric_roots(moment)
        weighted = root @ forms @ root
    stack = weighted.transpose(0, 1).flatten(1)  # (d, K·d)
    u, s, vt = torch.linalg.svd(stack, full_matrices=False)
    total = float(s.square().sum())
    kept = float(s[:rank].square().sum())
    half = s[:rank].sqrt()
    query = (u[:, :rank] * half).mT
    keys = (half[:, None] * vt[:rank]).unflatten(1, (count, size)).transpose(0, 1)
    if moment is not None:
        query, keys = query @ inverse, keys @ inverse
    room = (0, 0, 0, rank - query.shape[0])  # fewer directions than the head has room for
    pad = torch.nn.functional.pad
    return Factors(pad(query, room), pad(keys, room), kept, total)


def low_rank_regression(gram: Tensor, cross: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the best map of a rank from predictors to targets, as two factors.

    Reduced-rank regression: B = gram⁻¹ cross is the least-squares map; its fitted outputs are
    projected on their `rank` largest principal directions.

    Args:
        gram: Σ gᵀg of the predictors, (d, d).
        cross: Σ gᵀy, (d, C).
        rank: E_v.

    Returns:
        (E_v, d) and (C, E_v): their product maps a predictor to its output.
    """
    full = torch.linalg.pinv(gram, hermitian=True) @ cross  # (d, C)
    values, vectors = torch.linalg.eigh(full.mT @ gram @ full)
    order = values.argsort(descending=True)[:rank]
    out = vectors[:, order]  # (C, E_v)
    into = (full @ out).mT
    missing = rank - out.shape[1]
    into = torch.nn.functional.pad(into, (0, 0, 0, missing))
    out = torch.nn.functional.pad(out, (0, missing))
    norms = into.norm(dim=1) + 1e-300
    balance = (out.norm(dim=0) / norms).sqrt()
    balance = torch.where((norms > 1e-200) & (balance > 0), balance, 1.0)
    return into * balance[:, None], out / balance


def cosine_distances(vectors: Tensor) -> Tensor:
    """Return 1 − cosine of all pairs: (H, d) -> (H, H)."""
    unit = vectors / vectors.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    return 1.0 - unit @ unit.mT


def jensen_shannon_distances(maps: Tensor) -> Tensor:
    """Return the mean Jensen-Shannon divergence of the rows of all pairs of maps, in nats.

    Rows sum to 1 or are zero: (H, n, L) -> (H, H).
    """
    heads = maps.shape[0]
    negative_entropy = torch.xlogy(maps, maps).sum(-1)  # (H, n)
    result = torch.zeros(heads, heads, dtype=maps.dtype, device=maps.device)
    for i, j in itertools.combinations(range(heads), 2):
        middle = (maps[i] + maps[j]) / 2.0
        divergence = (negative_entropy[i] + negative_entropy[j]) / 2.0
        divergence = divergence - torch.xlogy(middle, middle).sum(-1)
        result[i, j] = result[j, i] = divergence.mean()
    return result


def best_groups(distances: Tensor, size: int) -> list[list[int]]:
    """Divide heads into groups whose distances inside sum to the least.

    Exact up to `EXACT_HEADS` heads; above, groups are filled one by one with the nearest heads.
    `distances` are (H, H) and symmetric, `size` heads per group a divisor of H.
    """
    table = distances.tolist()
    heads = len(table)

    def inside(group: tuple[int, ...]) -> float:
        return float(sum(table[i][j] for i, j in itertools.combinations(group, 2)))

    if heads > EXACT_HEADS:
        left, groups = list(range(heads)), []
        while left:
            first = left.pop(0)
            near = sorted(left, key=lambda j: table[first][j])[: size - 1]
            left = [j for j in left if j not in near]
            groups.append(sorted([first, *near]))
        return groups

    @cache
    def solve(left: tuple[int, ...]) -> tuple[float, tuple[tuple[int, ...], ...]]:
        if not left:
            return 0.0, ()
        best: tuple[float, tuple[tuple[int, ...], ...]] = (float("inf"), ())
        for others in itertools.combinations(left[1:], size - 1):
            group = (left[0], *others)
            cost, rest = solve(tuple(h for h in left if h not in group))
            best = min(best, (cost + inside(group), (group, *rest)))
        return best

    return [list(group) for group in solve(tuple(range(heads)))[1]]
