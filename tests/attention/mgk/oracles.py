"""Attention written out as float64 sums, sharing nothing with the package.

Each oracle has the signature of a backend function, so that a layer can run on it. Distances are
differences squared, exponentials are taken directly, masks multiply.
"""

from __future__ import annotations

import torch
from torch import Tensor


def visible_pairs(masks, batch: int, heads: int, num_queries: int, num_keys: int) -> Tensor:
    """Return the allowed pairs, (B, H, N, L) float64 of zeros and ones, by loops over positions."""
    allowed = torch.ones(batch, heads, num_queries, num_keys, dtype=torch.float64)
    if masks.is_causal:
        for i in range(num_queries):
            for j in range(num_keys):
                if j > i + num_keys - num_queries:
                    allowed[:, :, i, j] = 0
    if masks.key_mask is not None:
        for b in range(batch):
            for j in range(num_keys):
                if not masks.key_mask[b, j]:
                    allowed[b, :, :, j] = 0
    if masks.attn_mask is not None:
        allowed = allowed * masks.attn_mask.double()
    return allowed


def combine(density: Tensor, value: Tensor, masks, dropout) -> Tensor:
    """Normalise densities over the visible keys and sum the values; density (B, H, N, L)."""
    batch, heads, num_queries, num_keys = density.shape
    if masks.bias is not None:
        density = density * masks.bias.exp()
    density = density * visible_pairs(masks, batch, heads, num_queries, num_keys)
    total = density.sum(-1, keepdim=True)
    weights = torch.where(total > 0, density / torch.where(total > 0, total, 1.0), 0.0)
    if dropout is not None:
        keep = dropout.keep(batch, heads, range(num_queries), range(num_keys), density.device)
        weights = torch.where(keep, weights * dropout.scale, 0.0)
    groups = heads // value.shape[1]
    out = [weights[:, h] @ value[:, h // groups] for h in range(heads)]
    return torch.stack(out, 1)


def softmax_oracle(query, key, value, *, masks, dropout, score):
    """Softmax attention over dot products or Gaussians, as a sum of exponentials."""
    groups = query.shape[1] // key.shape[1]
    densities = []
    for h in range(query.shape[1]):
        q, k = query[:, h, :, None], key[:, h // groups, None]
        scale = query.shape[-1] ** 0.5
        exponent = (q * k).sum(-1) / scale
        if score == "gaussian":
            exponent = -((q - k) ** 2).sum(-1) / (2 * scale)
        densities.append(exponent.exp())
    return combine(torch.stack(densities, 1), value, masks, dropout)


def mgk_oracle(
    query,
    key,
    value,
    *,
    masks,
    dropout,
    log_prior,
    variance,
    equal_variance,
    score,
    include_log_det,
    hard,
):
    """Mixture attention in its literal form: Σ_r π_r exp(…), or max_r exp(…)."""
    heads, components = query.shape[1], key.shape[2]
    densities = []
    for h in range(heads):
        key_head = h // (heads // key.shape[1])
        owner = h // (heads // variance.shape[0])
        terms = []
        for r in range(components):
            q, k = query[:, h, :, None], key[:, key_head, r, None]
            sigma2 = variance[owner, r]
            exponent = (q * k).sum(-1) / sigma2
            if score == "gaussian":
                exponent = -((q - k) ** 2).sum(-1) / (2 * sigma2)
            term = exponent.exp()
            if log_prior is not None:
                term = term * log_prior[owner, r].exp()
            if include_log_det:
                term = term * sigma2 ** (-query.shape[-1] / 2)
            terms.append(term)
        stacked = torch.stack(terms)
        densities.append(stacked.max(0).values if hard else stacked.sum(0))
    return combine(torch.stack(densities, 1), value, masks, dropout)
