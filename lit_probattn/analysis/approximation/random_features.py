"""Random features that estimate the exponential kernel, as in the paper and corrected.

    φ(x) = F^-½ exp(R x − ‖x‖²/2),  x = q or k divided by E^¼;   E φ(q) · φ(k) = exp(q · k / √E)

holds if every row of R is N(0, I). Source: value-aware attention (Gupta and Berant, 2021),
appendix A.1, after Choromanski et al., 2021.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from lit_probattn.base.arguments import check_argument

Rows = Literal["performer", "sqrt_d", "iid", "literal", "bare_qr"]


def draw_rows(num_features: int, head_dim: int, rows: Rows, generator: torch.Generator) -> Tensor:
    """Return R, (F, E) float64.

    Args:
        rows: `performer`: rows orthogonal in groups of E with the lengths of normal vectors; each
            row is N(0, I), so the estimate is unbiased. `sqrt_d`: the same with length √E, slightly
            biased. `iid`: independent normals. `literal`: PyTorch's orthogonal initialiser as
            described in the paper, with rows of length 1 (columns of length 1 for F > E), so the
            estimate is far off. `bare_qr`: `performer` without the signs that make QR's rotations
            uniform, biased; for comparison.

    Raises:
        ValueError: a size is below 1, or the kind is unknown.
    """
    check_argument("rows", rows, Rows)
    if num_features < 1 or head_dim < 1:
        raise ValueError(f"sizes must be at least 1, received {num_features} and {head_dim}")
    shape = (num_features, head_dim)
    if rows == "iid":
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    if rows == "literal":
        empty = torch.empty(shape, dtype=torch.float64)
        return torch.nn.init.orthogonal_(empty, generator=generator)
    blocks = []
    for _ in range(-(-num_features // head_dim)):
        normal = torch.randn(head_dim, head_dim, generator=generator, dtype=torch.float64)
        rotation, triangular = torch.linalg.qr(normal)
        if rows != "bare_qr":
            rotation = rotation * triangular.diagonal().sign()
        blocks.append(rotation.mT)
    directions = torch.cat(blocks)[:num_features]
    if rows == "sqrt_d":
        return directions * head_dim**0.5
    lengths = torch.randn(shape, generator=generator, dtype=torch.float64).norm(dim=-1)
    return directions * lengths[:, None]


def log_features(x: Tensor, rows: Tensor) -> Tensor:
    """Return log φ without the factor F^-½, (…, F), for x (…, E) before division by E^¼."""
    x = x * x.shape[-1] ** -0.25
    return x @ rows.to(x).mT - x.square().sum(-1, keepdim=True) / 2.0


def random_feature_weights(
    query: Tensor, key: Tensor, rows: Tensor, *, allowed: Tensor | None = None
) -> Tensor:
    """Return attention weights, (B, H, N, L), estimated with the rows R, (F, E).

    The maximum per query and the maximum over all keys of a head are subtracted from the exponents;
    both cancel in the normalisation; a maximum per key would not, nor would a number added to all
    features, as in Performer's code. `allowed`: bool, broadcastable to (B, H, N, L).
    """
    rows_q, rows_k = log_features(query, rows), log_features(key, rows)
    features_q = torch.exp(rows_q - rows_q.amax(-1, keepdim=True))
    features_k = torch.exp(rows_k - rows_k.amax((-2, -1), keepdim=True))
    products = features_q @ features_k.mT
    if allowed is not None:
        products = products.masked_fill(~allowed, 0.0)
    total = products.sum(-1, keepdim=True)
    return products / total.masked_fill(total == 0, 1.0)
