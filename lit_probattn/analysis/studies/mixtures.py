"""Layers as mixtures of Gaussians over their keys, for studies of likelihood and components."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_probattn.analysis.recording import LayerCall
from lit_probattn.analysis.results import AnalysisError
from lit_probattn.attention import Attention, MGKAttention, MLKAttention, SoftmaxAttention
from lit_probattn.attention.functional import masked_softmax, repeat_heads
from lit_probattn.attention.linear.functions import (
    LinearArguments,
    linear_kernel,
    masked_kernel,
)
from lit_probattn.attention.mgk.functions import component_scores


@dataclass(frozen=True)
class Mixture:
    """Keys of one call as a mixture.

    Args:
        query: (S, H, N, E).
        key: (S, H, K, L, E).
        prior: π normalised over components, (H, K, 1 or L).
        variance: σ², (H, K).
    """

    query: Tensor
    key: Tensor
    prior: Tensor
    variance: Tensor


def is_mixture(layer: Attention) -> bool:
    """Whether `mixture` can read a layer."""
    return isinstance(layer, MGKAttention | SoftmaxAttention)


def mixture(call: LayerCall) -> Mixture:
    """Read a call as a mixture; softmax attention is one Gaussian per key with σ² = √E.

    Raises:
        AnalysisError: the variant is neither MGK nor softmax attention.
    """
    layer = call.layer
    query, key, _ = call.project()
    heads = query.shape[1]
    if isinstance(layer, SoftmaxAttention):
        key = repeat_heads(key, heads)[:, :, None]
        ones = torch.ones(heads, 1, dtype=query.dtype, device=query.device)
        return Mixture(query, key, ones[..., None], ones * layer.head_dim**0.5)
    if not isinstance(layer, MGKAttention):
        raise AnalysisError(
            f"{type(layer).__name__} is no mixture of Gaussians: use MGKAttention, or "
            "SoftmaxAttention (one Gaussian per key)"
        )
    core = layer.core
    variance = core.variance().to(query)
    if core.prior is None:
        prior = torch.full((*variance.shape, 1), 1.0 / core.num_components).to(query)
    else:
        prior = core.prior(key.shape[-2]).to(query).softmax(1)
    return Mixture(query, repeat_heads(key, heads), *(_heads(p, heads) for p in (prior, variance)))


def _heads(parameter: Tensor, heads: int) -> Tensor:
    return parameter.repeat_interleave(heads // parameter.shape[0], 0)


def log_kernel(parts: Mixture, *, density: bool) -> Tensor:
    """Return log Σ_r π_r exp(−‖q − k_r‖² / 2σ_r²) of all pairs, (S, H, N, L).

    Args:
        parts: the mixture.
        density: divide each Gaussian by (2π σ²)^(E/2), so that it integrates to one.
    """
    scores = component_scores(
        parts.query,
        parts.key,
        log_prior=parts.prior.log(),
        variance=parts.variance,
        score="gaussian",
        include_log_det=density,
    )
    total = scores.logsumexp(2)
    if density:
        total = total - parts.query.shape[-1] / 2.0 * math.log(2.0 * math.pi)
    return total


@torch.no_grad()
def posterior(call: LayerCall) -> tuple[Tensor, Tensor]:
    """Return attention weights P_ij and responsibilities γ_ijr of a mixture layer's call.

    Source: MGK, ICML 2022, Eq. (8): γ_ijr = exp(s_ijr) / Σ_r' exp(s_ijr'); hard inference: 1 for
    the first largest s_ijr. MLK, section 2.5: γ_ijr = π_r φ(q_i)·φ(k_jr) / Σ_r' (the same).
    P_ij γ_ijr is the joint posterior of key and component.

    Returns:
        (S, H, N, L) and (S, H, K, N, L), by the layer's own scores, priors and masks.

    Raises:
        AnalysisError: the variant has no components.
    """
    layer = call.layer
    if isinstance(layer, MLKAttention) and layer.core.form.mix == "after":
        return _linear_posterior(call, layer)
    if not isinstance(layer, MGKAttention):
        raise AnalysisError(
            f"{type(layer).__name__} has no components with responsibilities: expected "
            "MGKAttention, or MLKAttention with mix=after"
        )
    core = layer.core
    query, key, masks = call.project()
    prior = None if core.prior is None else core.prior(masks.num_keys).to(query)
    scores = component_scores(
        query,
        key,
        log_prior=prior,
        variance=core.variance().to(query),
        score=core.score,
        include_log_det=core.include_log_det,
    )
    rows, cols = masks.all_rows, range(masks.num_keys)
    allowed = masks.allowed(rows, cols, query.device)
    bias = masks.bias_block(rows, cols)
    if core.e_step == "hard":
        shares = torch.nn.functional.one_hot(scores.argmax(2), scores.shape[2]).to(scores)
        shares, total = shares.movedim(-1, 2), scores.amax(2)
    else:
        shares, total = scores.softmax(2), scores.logsumexp(2)
    weights = masked_softmax(total if bias is None else total + bias, allowed, core.row_eps)
    return weights, shares


def _linear_posterior(call: LayerCall, layer: MLKAttention) -> tuple[Tensor, Tensor]:
    """Return the same for a linear mixture, whose kernel is a sum over components."""
    core, heads = layer.core, call.call()
    query, key, masks = call.project()
    prior = core.shares(heads)
    assert prior is not None  # a mixture has one
    parts = []
    for component in range(core.num_components):
        alone = torch.zeros_like(prior)
        alone[:, component] = prior[:, component]
        parts.append(linear_kernel(query, key, LinearArguments(core.form, core.projection, alone)))
    kernel = torch.stack(parts, 2)
    total = kernel.sum(2)
    shares = kernel / total.masked_fill(total == 0, 1.0)[:, :, None]
    visible = masked_kernel(total, masks)
    norm = visible.sum(-1, keepdim=True)
    return visible / norm.masked_fill(norm == 0, 1.0), shares


def has_components(layer: Attention) -> bool:
    """Whether `posterior` can read a layer."""
    linear = isinstance(layer, MLKAttention) and layer.core.form.mix == "after"
    return linear or isinstance(layer, MGKAttention)
