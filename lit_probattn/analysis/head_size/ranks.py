"""Ranks of logits: the number of directions that a head uses.

Logits are (…, N, L) with row i for query i. Centring subtracts the mean of each row, to which the
softmax is invariant.
"""

from __future__ import annotations

import torch
from torch import Tensor


def centre(logits: Tensor, real: Tensor | None = None) -> Tensor:
    """Return logits without their row means, C S; 0 for pairs that are not `real` (…, N, L)."""
    if real is None:
        return logits - logits.mean(-1, keepdim=True)
    kept = logits.masked_fill(~real, 0.0)
    means = kept.sum(-1, keepdim=True) / real.sum(-1, keepdim=True).clamp_min(1)
    return (kept - means).masked_fill(~real, 0.0)


def effective_count(shares: Tensor) -> Tensor:
    """Return exp(entropy) of shares that sum to one, the effective number of parts."""
    return torch.special.entr(shares).sum(-1).exp()


def effective_rank(values: Tensor) -> Tensor:
    """Return exp(entropy) of σ_k / Σ σ; (…)."""
    return effective_count(values / values.sum(-1, keepdim=True).clamp_min(1e-300))


def stable_rank(values: Tensor) -> Tensor:
    """Return Σ σ² / σ_1²; (…)."""
    squares = values.square()
    return squares.sum(-1) / squares[..., 0].clamp_min(1e-300)


def energy_rank(values: Tensor, share: float) -> Tensor:
    """Return the smallest number of singular values with at least `share` of Σ σ²; (…)."""
    return leading(values.square(), share)


def leading(values: Tensor, share: float) -> Tensor:
    """Return the smallest number of leading values with at least `share` of their sum; (…)."""
    reached = values.cumsum(-1) >= share * values.sum(-1, keepdim=True) * (1 - 1e-12)
    return reached.to(torch.int8).argmax(-1) + 1


def map_rank(weights: Tensor, threshold: float = 1e-6) -> Tensor:
    """Return the number of singular values of at least `threshold` of attention maps; (…).

    This is the measure of MGK. It does not measure the bottleneck, because the exponential of a
    matrix of low rank has full rank in general.
    """
    return (torch.linalg.svdvals(weights) >= threshold).sum(-1)


def recovered_rank(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rank of the centred logits recovered from maps, and whether entries were clamped.

    Logarithms of entries below 1e-30 are meaningless: such entries are clamped, and the rank of
    a map that has some is meaningless too; (…) each.
    """
    clamped = (weights < 1e-30).flatten(-2).any(-1)
    logits = centre(weights.clamp_min(1e-30).log())
    return torch.linalg.matrix_rank(logits, rtol=1e-8), clamped


def truncate(logits: Tensor, rank: int, real: Tensor | None = None) -> Tensor:
    """Return the best approximation of rank `rank` of the centred logits, (…, N, L).

    Pairs that are not `real`, such as padding, do not count and are 0.
    """
    left, values, right = torch.linalg.svd(centre(logits, real), full_matrices=False)
    kept = values[..., :rank, None] * right[..., :rank, :]
    return left[..., :rank] @ kept


def diagnose(logits: Tensor) -> dict[str, Tensor]:
    """Return all measures of logits (…, N, L), float64; (…) each."""
    values = torch.linalg.svdvals(centre(logits))
    return {
        "rank": torch.linalg.matrix_rank(logits),
        "centred_rank": torch.linalg.matrix_rank(centre(logits)),
        "effective_rank": effective_rank(values),
        "stable_rank": stable_rank(values),
        "energy_90": energy_rank(values, 0.9),
        "energy_99": energy_rank(values, 0.99),
    }
