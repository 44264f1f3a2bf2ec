"""Linear algebra of head conversion: shared factors, reduced-rank regression, grouping of heads."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

# Up to this many heads, groups are optimal; above, they are chosen greedily.
EXACT_HEADS = 12


@dataclass(frozen=True)
class Factors:
    """One query map and K key maps whose products approximate K bilinear forms."""

    query: Tensor  # (E, d), or (G, E, d) for G query heads per key
    keys: Tensor  # (K, E, d_k)
    kept: float  # squared weight of the approximation
    total: float  # squared weight of the forms


def second_moment(x: Tensor) -> Tensor:
    """Return the mean of x xᵀ over tokens: (T, d) -> (d, d)."""
    return x.mT @ x / x.shape[0]


def symmetric_roots(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Return C^½ and C^−½; both omit directions without weight."""
    values, vectors = torch.linalg.eigh(moment)
    good = values > values.amax() * moment.shape[0] * torch.finfo(moment.dtype).eps
    root = values.clamp_min(0.0).sqrt()
    inverse = torch.where(good, 1.0 / root.masked_fill(~good, 1.0), 0.0)
    root = root.masked_fill(~good, 0.0)
    return (vectors * root) @ vectors.mT, (vectors * inverse) @ vectors.mT


def low_rank_product(left: Tensor, right: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Reduce a product to a rank, as two factors with equal weight.

    Decomposes the small core between two orthogonal factors: with r inner columns this costs
    O((m + n) r²), and the product is never formed.

    Args:
        left: (m, r), real or complex.
        right: (r, n).
        rank: E.

    Returns:
        (m, E) and (E, n), zero beyond the product's rank, and its singular values.
    """
    left_base, left_core = torch.linalg.qr(left)
    right_base, right_core = torch.linalg.qr(right.mH)
    u, s, vh = torch.linalg.svd(left_core @ right_core.mH, full_matrices=False)
    half = s[:rank].sqrt().to(u.dtype)
    first = (left_base @ u[:, :rank]) * half
    second = half[:, None] * (vh[:rank] @ right_base.mH)
    missing = rank - len(half)  # fewer directions than the head has dimensions
    pad = torch.nn.functional.pad
    return pad(first, (0, missing)), pad(second, (0, 0, 0, missing)), s


def shared_query_factors(
    query: Tensor, keys: Tensor, rank: int, moment: Tensor | None = None
) -> Factors:
    """Reduce [A_1 | … | A_K], A_r = query_rᵀ key_r, to a rank: one query map and K key maps.

    With a moment C, the decomposition is applied to C^½ A_r C^½: among all maps of that rank it
    minimises Σ_r E (qᵀ(A_r − W_qᵀW_k,r)k)² over independent q and k with second moment C. Query and
    keys share the weight of a singular direction equally.

    Args:
        query: maps of the K heads that are merged, (K, E_old, d); or (G, K, E_old, d) for G query
            heads per key, whose forms are stacked.
        keys: (K, E_old, d_k).
        rank: E.
        moment: C, (d, d). None means the identity.
    """
    grouped = query if query.dim() == 4 else query[None]
    if moment is not None:
        root, inverse = symmetric_roots(moment)
        grouped, keys = grouped @ root, keys @ root
    num_groups, count, _, width = grouped.shape
    left = grouped.permute(0, 3, 1, 2).flatten(2).flatten(0, 1)  # (G·d, K·E_old)
    first, second, s = low_rank_product(left, torch.block_diag(*keys), rank)
    new_query = first.unflatten(0, (num_groups, width)).mT
    new_keys = second.unflatten(1, (count, -1)).transpose(0, 1)
    if moment is not None:
        new_query, new_keys = new_query @ inverse, new_keys @ inverse
    weight = s.square()
    new_query = new_query if query.dim() == 4 else new_query[0]
    if weight.device.type == "meta":  # shapes only
        return Factors(new_query, new_keys, math.nan, math.nan)
    return Factors(new_query, new_keys, float(weight[:rank].sum()), float(weight.sum()))


def shifted_key_factors(
    query: Tensor, keys: Tensor, rank: int, moment: Tensor | None, centre: Tensor
) -> tuple[Factors, Tensor]:
    """Reduce the mean of K forms A_r = query_rᵀ key_r to one query map, one key map and K shifts.

    A shift is the difference between a form's key of the mean input and the common key, projected
    on the query map: W_qᵀ b_r is the least-squares fit of (A_r − W_qᵀ W_k) x̄.

    Args:
        query: maps of the K heads that are merged, (K, E_old, d).
        keys: (K, E_old, d).
        rank: E.
        moment: C, (d, d), as in `shared_query_factors`. None means the identity.
        centre: x̄, (d,).

    Returns:
        Factors with one key map, with the weights of the K forms, and shifts (K, E).
    """
    count, root = len(query), None
    whole, single = query.flatten(0, 1)[None], keys.flatten(0, 1)[None] / count
    mean = shared_query_factors(whole, single, rank, moment)
    if moment is not None:
        root, _ = symmetric_roots(moment)
    seen, wide, long = (x if root is None else x @ root for x in (mean.query, query, keys))
    total = float(form_products(wide[None], long).diagonal().sum())
    own = (wide.mT @ (keys @ centre)[..., None])[..., 0]  # C^½ A_r x̄, (K, d)
    ours = seen.mT @ (mean.keys[0] @ centre)
    shifts = torch.linalg.lstsq(seen.mT, (own - ours).mT, driver="gelsd").solution.mT
    # Σ_r ‖A_r − Ã‖² = Σ_r ‖A_r‖² − K ‖Ã‖², because Ã is the reduced mean.
    return Factors(mean.query, mean.keys, count * mean.kept, total), shifts


def form_products(query: Tensor, keys: Tensor) -> Tensor:
    """Return ⟨A_h, A_g⟩ of all pairs of bilinear forms, without computing the forms: (H, H).

    Args:
        query: (G, H, E, d), G query heads per key.
        keys: (H, E, d_k).
    """
    gram = torch.einsum("ghed,gkfd->hkef", query, query)
    return (gram * torch.einsum("hed,kfd->hkef", keys, keys)).sum((-1, -2))


def low_rank_regression(
    gram: Tensor,
    cross: Tensor,
    rank: int,
    *,
    toward: Tensor | None = None,
    ridge: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the best map of a rank from predictors to targets, as two factors.

    Reduced-rank regression: B = gram⁻¹ cross is the least-squares map; its fitted outputs are
    projected on their `rank` largest principal directions. With a ridge ρ, B minimises
    Σ ‖y − Bᵀg‖² + ρ t ‖B − B_0‖², t the mean of gram's diagonal: in directions in which predictors
    hardly vary, the map stays close to B_0 instead of growing without bound.

    Args:
        gram: Σ gᵀg of the predictors, (d, d).
        cross: Σ gᵀy, (d, C).
        rank: E_v.
        toward: B_0, (d, C). None means 0.
        ridge: ρ.

    Returns:
        (E_v, d) and (C, E_v), whose product maps a predictor to its output.
    """
    if ridge:
        weight = ridge * gram.diagonal().mean()
        gram = gram + weight * torch.eye(len(gram)).to(gram)
        cross = cross if toward is None else cross + weight * toward
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


def cosine_distances(products: Tensor) -> Tensor:
    """Return 1 − cosine of all pairs from their scalar products, (H, H)."""
    norms = products.diagonal().sqrt().clamp_min(1e-300)
    return 1.0 - products / norms[:, None] / norms


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
    """Divide heads into groups with the smallest sum of distances within groups.

    Exact up to `EXACT_HEADS` heads; above, groups are filled one by one with the nearest heads.
    `distances` are (H, H) and symmetric; `size` heads per group divides H.
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
