"""Layers as mixtures of Gaussians over their keys, for studies of likelihood and components."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_probattn.analysis.recording import LayerCall
from lit_probattn.attention.mgk.functions import MGK, component_scores
from lit_probattn.attention.numerics import compute_dtype, repeat_heads, repeat_rows


@dataclass(frozen=True)
class Mixture:
    """The keys of a call as a mixture."""

    query: Tensor  # (S, H, N, E)
    key: Tensor  # (S, H, K, L, E)
    prior: Tensor  # π normalised over components, (H, K, 1 or L)
    variance: Tensor  # σ², (H, K)


def mixture(call: LayerCall) -> Mixture:
    """Return the mixture of a call whose core `has_gaussians`; priors are normalised."""
    heads = call.call()
    num_heads, query = heads.query.shape[1], heads.query.to(compute_dtype(heads.query))
    key, log_prior, variance = call.layer.core.gaussians(heads)
    if log_prior is None:
        prior = torch.full((*variance.shape, 1), 1.0 / variance.shape[1]).to(query)
    else:
        prior = log_prior.softmax(1)
    parts = (repeat_rows(part, num_heads) for part in (prior, variance))
    return Mixture(query, repeat_heads(key.to(query), num_heads), *parts)


def log_kernel(parts: Mixture, *, density: bool) -> Tensor:
    """Return log Σ_r π_r exp(−‖q − k_r‖² / 2σ_r²) of all pairs, (S, H, N, L).

    `density` divides each Gaussian by (2π σ²)^(E/2), so that it integrates to one.
    """
    arguments = MGK(parts.prior.log(), parts.variance, include_log_det=density)
    scores = component_scores(parts.query, parts.key, arguments)
    total = scores.logsumexp(2)
    if density:
        total = total - parts.query.shape[-1] / 2.0 * math.log(2.0 * math.pi)
    return total
