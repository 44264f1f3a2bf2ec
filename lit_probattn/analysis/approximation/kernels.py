"""Kernels of generalised attention as normalised weights, and as products of features.

    attn_weights[i, j] = kernel(query[i], key[j]) / Σ_j kernel(query[i], key[j])

Source: value-aware attention (Gupta and Berant, 2021), Eq. (1).
Departs from the source: no epsilon in denominators, so that weights sum to one; polynomial kernels
add 1e-12 to the square of a product.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lit_probattn.attention.functional import masked_softmax
from lit_probattn.attention.linear.features import FeatureMap

Kernel = Literal["exp", "poly", "elu"]


def kernel_weights(
    query: Tensor, key: Tensor, kernel: Kernel, *, allowed: Tensor | None = None, degree: int = 2
) -> Tensor:
    """Return the weights of a kernel over what may be seen, (B, H, N, L).

    Args:
        query: (B, H, N, E).
        key: (B, H, L, E).
        kernel: `exp` (exp(q · k / √E)), `poly` ((q · k)^degree) or `elu` ((elu(q) + 1) · (elu(k) +
            1), without scaling).
        allowed: bool, broadcastable to (B, H, N, L). None means all. Rows without any give zeros.
        degree: even power of `poly`.

    Raises:
        ValueError: the kernel is unknown.
    """
    if kernel == "exp":
        return masked_softmax(query @ key.mT * query.shape[-1] ** -0.5, allowed)
    if kernel == "poly":
        squares = (query @ key.mT).square() + 1e-12
        return masked_softmax(squares.log() * (degree / 2), allowed)
    if kernel != "elu":
        raise ValueError(f"kernel must be exp, poly or elu, received {kernel!r}")
    features = FeatureMap("elu")
    products = features.query(query, None) @ features.key(key, None, None).mT
    if allowed is not None:
        products = products.masked_fill(~allowed, 0.0)
    total = products.sum(-1, keepdim=True)
    return products / total.masked_fill(total == 0, 1.0)


def square_features(x: Tensor, compact: bool = True) -> Tensor:
    """Return φ with φ(q) · φ(k) = (q · k)².

    Source: value-aware attention, section 2: φ(x) = vec(x xᵀ). Compact: each pair once, off the
    diagonal times √2.

    Args:
        x: (…, E).
        compact: E (E + 1) / 2 numbers instead of E².

    Returns:
        (…, F).
    """
    outer = x[..., :, None] * x[..., None, :]
    if not compact:
        return outer.flatten(-2)
    rows, cols = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
    one = torch.ones((), dtype=x.dtype, device=x.device)
    return outer[..., rows, cols] * torch.where(rows == cols, one, (2 * one).sqrt())


def effective_support(weights: Tensor) -> Tensor:
    """Return exp(entropy) of each row of weights, the number of keys that it spreads over; (…)."""
    logs = torch.where(weights > 0, weights, 1.0).log()
    return torch.exp(-(weights * logs).sum(-1))


def top_mass(weights: Tensor, num_kept: int) -> Tensor:
    """Return the sum of the largest weights of each row; (…)."""
    return weights.topk(min(num_kept, weights.shape[-1]), -1).values.sum(-1)
