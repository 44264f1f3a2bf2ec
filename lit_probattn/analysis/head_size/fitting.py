"""Approximation of a map by a small head, whose logit factors are fitted by L-BFGS."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_probattn.analysis.head_size.theorem import centred_logits


def mean_divergence(logits: Tensor, weights: Tensor, is_causal: bool) -> Tensor:
    """Return the mean over queries of KL(weights ‖ softmax(logits)) in nats; ().

    Columns, (n, n), belong to queries; causal maps are zero for later keys.
    """
    if is_causal:
        logits = _hide_later(logits)
    logs = torch.log_softmax(logits, 0).masked_fill(weights == 0, 0.0)
    exact = torch.where(weights > 0, weights, 1.0).log()
    return (weights * (exact - logs)).sum(0).mean()


def _hide_later(logits: Tensor) -> Tensor:
    later = torch.ones_like(logits, dtype=torch.bool).tril(-1)  # key j > query i
    return logits.masked_fill(later, float("-inf"))


def truncated_factors(weights: Tensor, head_size: int, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return factors (s, n) of keys and queries: the best rank-s part of C log P."""
    if is_causal:
        known = weights > 0
        logs = torch.where(known, weights, 1.0).log()
        mean = logs.sum(0) / known.sum(0)
        logs = torch.where(known, logs - mean, 0.0)
    else:
        logs = centred_logits(weights)
    left, values, right = torch.linalg.svd(logs)
    root = values[:head_size].sqrt()[:, None]
    return root * left.mT[:head_size], root * right[:head_size]


def fit_head(
    weights: Tensor, head_size: int, *, is_causal: bool, steps: int
) -> tuple[float, float]:
    """Return the divergence of a head of size s from a map: truncated, and fitted from that start.

    The map P is (n, n), and its columns sum to one. Small noise avoids saddle points.
    """
    weights = weights.double()
    key, query = truncated_factors(weights, head_size, is_causal)
    truncated = float(mean_divergence(key.mT @ query, weights, is_causal))
    generator = torch.Generator().manual_seed(0)

    def leaf(x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        return (x + 1e-3 * noise).contiguous().requires_grad_()

    factors = [leaf(key), leaf(query)]
    optimiser = torch.optim.LBFGS(
        factors,
        max_iter=steps,
        history_size=30,
        tolerance_grad=1e-12,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = mean_divergence(factors[0].mT @ factors[1], weights, is_causal)
        loss.backward()
        return loss

    optimiser.step(closure)
    with torch.no_grad():
        fitted = float(mean_divergence(factors[0].mT @ factors[1], weights, is_causal))
    return truncated, min(truncated, fitted)


def random_map(length: int, seed: int, *, is_causal: bool = False) -> Tensor:
    """Return a softmax over columns of logits 3 · N(0, 1), (n, n) float64."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3.0 * torch.randn(length, length, generator=generator, dtype=torch.float64)
    return torch.softmax(_hide_later(logits) if is_causal else logits, 0)
