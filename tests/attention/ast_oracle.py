"""α-entmax attention by loops over samples, heads and queries; thresholds found in float64."""

from __future__ import annotations

import itertools

import torch

from tests.attention.mgk.oracles import visible_pairs


def oracle_row(scores: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """α-entmax of one row (n,) of visible scores.

    The threshold is bisected without gradient; one Newton step with gradient then has the implicit
    derivatives with respect to scores and α.
    """
    power = 1.0 / (alpha - 1.0)
    x = scores * (alpha - 1.0)
    with torch.no_grad():
        low, high = x.max() - 1.0, x.max()
        for _ in range(80):
            middle = (low + high) / 2
            if (x - middle).clamp_min(0).pow(power).sum() >= 1.0:
                low = middle
            else:
                high = middle
        support = x > low
        slope = (power * (x[support] - low).pow(power - 1.0)).sum()
    total = (x[support] - low).pow(power).sum()
    threshold = low + (total - 1.0) / slope
    result = torch.zeros_like(scores)
    result[support] = (x[support] - threshold).pow(power)
    return result


def ast_oracle(query, key, value, *, masks, dropout, alpha):
    """Attention by loops over samples, heads and queries; signature of a backend function."""
    batch, heads, rows, size = query.shape
    cols = key.shape[2]
    visible = visible_pairs(masks, batch, heads, rows, cols).bool()
    groups = heads // key.shape[1]
    outs = torch.zeros(batch, heads, rows, value.shape[-1], dtype=query.dtype)
    kept = None
    if dropout is not None:
        kept = dropout.keep(batch, heads, range(rows), range(cols), query.device)
    parts = []
    for b, h, i in itertools.product(range(batch), range(heads), range(rows)):
        seen = visible[b, h, i].nonzero()[:, 0]
        if len(seen) == 0:
            parts.append(outs[b, h, i])
            continue
        scores = (query[b, h, i] * key[b, h // groups, seen]).sum(-1) / size**0.5
        if masks.bias is not None:
            scores = scores + masks.bias.expand(batch, heads, rows, cols)[b, h, i, seen]
        weights = oracle_row(scores, alpha[h])
        if kept is not None:
            weights = torch.where(kept[b, h, i, seen], weights * dropout.scale, 0.0)
        parts.append(weights @ value[b, h // groups, seen])
    return torch.stack(parts).view(batch, heads, rows, -1)
