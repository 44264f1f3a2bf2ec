"""Theorem 1 of the low-rank paper: the attention maps that a head of a given size can compute.

    Softmax[(W_k X)ᵀ (W_q X) / √s] = P        W_q, W_k: (s, d),  X: (d, n),  P: (n, n)

The softmax acts on columns. Beyond the paper: head size n − 1 suffices for every P, the exact size
is the rank of C log P with C = I − 11ᵀ / n, about half of it suffices with a causal mask, and for
d < n there are unreachable P for every X.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Singular values below this share of the largest are zero.
_RANK = 1e-8


def attention_map(query_weight: Tensor, key_weight: Tensor, inputs: Tensor) -> Tensor:
    """Return Softmax[(W_k X)ᵀ (W_q X) / √s] over columns, (n, n)."""
    scale = query_weight.shape[0] ** 0.5
    return torch.softmax((key_weight @ inputs).mT @ (query_weight @ inputs) / scale, 0)


def left_inverse(inputs: Tensor) -> Tensor:
    """Return X⁺ with X⁺ X = I for X (d, n) of full column rank, by QR; (n, d).

    (XᵀX)⁻¹Xᵀ would square the condition number.

    Raises:
        ValueError: d < n, or the columns are linearly dependent.
    """
    size, length = inputs.shape
    if size < length:
        raise ValueError(
            f"inputs of width {size} and length {length} have no left inverse: theorem 1 needs "
            "width ≥ length; see `unreachable` for maps that they cannot produce"
        )
    q, r = torch.linalg.qr(inputs)
    diagonal = r.diagonal().abs()
    if not float(diagonal.min()) > torch.finfo(inputs.dtype).eps * float(diagonal.max()):
        raise ValueError("the columns of the inputs are linearly dependent: no left inverse")
    return torch.linalg.solve_triangular(r, q.mT, upper=True)


def centred_logits(weights: Tensor) -> Tensor:
    """Return C log P, C = I − 11ᵀ/n on the key axis: logits without the part that softmax drops."""
    logs = weights.log()
    return logs - logs.mean(-2, keepdim=True)


def representing_weights(
    inputs: Tensor,
    weights: Tensor,
    head_size: int,
    *,
    column_factor: Tensor | None = None,
    balanced: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return W_q and W_k, (s, d) each, whose attention map on `inputs` is `weights`.

    Source: theorem 1: with K = √s log(P · diag(δ)) = W̃_kᵀ W̃_q and W_q = W̃_q X⁺, W_k = W̃_k X⁺ the
    logits are log P + 1 (log δ)ᵀ, and the softmax over columns removes δ.
    Beyond the source: for s < n, the centred logits C log P are factorised by singular values. This
    is exact for s ≥ rank(C log P), so always for s ≥ n − 1, and otherwise optimal for rank s.

    Args:
        inputs: X, (d, n), d ≥ n, full column rank.
        weights: P, (n, n), positive, with columns that sum to one.
        head_size: s, at least 1.
        column_factor: δ, (n,), positive; any choice gives the same map. Requires s ≥ n.
        balanced: split singular values between both factors also for s ≥ n, for smaller weights.

    Raises:
        ValueError: an argument is invalid.
    """
    length = inputs.shape[-1]
    if weights.shape != (length, length) or head_size < 1:
        raise ValueError(
            f"expected weights ({length}, {length}) and head_size of at least 1, received "
            f"{tuple(weights.shape)} and {head_size}"
        )
    if not bool((weights > 0).all()) or float((weights.sum(0) - 1).abs().max()) > 1e-6:
        raise ValueError("weights must be positive with columns that sum to one")
    if column_factor is not None and head_size < length:
        raise ValueError(f"column_factor needs head_size ≥ {length}, received {head_size}")
    if head_size >= length:
        logs = weights.log() if column_factor is None else (weights * column_factor).log()
    else:
        logs = centred_logits(weights)
    product = head_size**0.5 * logs  # K, to be W̃_kᵀ W̃_q
    if head_size >= length and not balanced:
        key_part, query_part = torch.eye(length).to(product), product
    else:
        left, values, right = torch.linalg.svd(product)
        root = values[:head_size].sqrt()
        key_part = root[:, None] * left.mT[:head_size]
        query_part = root[:, None] * right[:head_size]
    missing = head_size - key_part.shape[0]
    inverse = left_inverse(inputs)
    padded = [torch.nn.functional.pad(x, (0, 0, 0, missing)) for x in (query_part, key_part)]
    return padded[0] @ inverse, padded[1] @ inverse


def tolerance(inputs: Tensor, weights: Tensor) -> float:
    """Return a bound on the rounding error of a map: 50 eps cond(X) max(1, |log P|)."""
    eps = torch.finfo(inputs.dtype).eps
    size = max(1.0, float(weights.log().abs().max()))
    return 50.0 * eps * float(torch.linalg.cond(inputs)) * size


def least_head_size(weights: Tensor) -> int:
    """Return rank(C log P), the smallest head size that can compute P for X of full column rank.

    The logits of a head of size s are the matrices of rank ≤ s; P determines them up to a term
    1 cᵀ, and no c reduces the rank below that of C log P. It is at most n − 1.

    Raises:
        ValueError: a weight is below 1e-30, where logarithms are meaningless.
    """
    if float(weights.min()) < 1e-30:
        raise ValueError(f"weights must be at least 1e-30, received {float(weights.min()):.1e}")
    return matrix_rank(centred_logits(weights.double()))


def matrix_rank(matrix: Tensor) -> int:
    """Return the number of singular values above 1e-8 times the largest."""
    return int(torch.linalg.matrix_rank(matrix, rtol=_RANK))


def least_head_size_causal(weights: Tensor) -> int:
    """Return the smallest head size that can compute a causal map.

    Only entries up to the query are given. With T[i, j] = log A[i, j + 1] − log A[i, 1] for queries
    i and j < i, the smallest rank of a completion of this triangular pattern is (Woerdeman)

        Σ_i rank T[i.., ..i] − Σ_i rank T[i + 1.., ..i]

    which is ⌊n / 2⌋ for generic maps.

    Args:
        weights: (n, n): A[i, j] is the weight of key j ≤ i for query i; rows sum to one, the upper
            triangle is ignored.
    """
    logs = weights.double().clamp_min(1e-300).log()
    table = logs[1:, 1:] - logs[1:, :1]  # T[i, j] known for j ≤ i, from 0
    size = len(table)
    whole = sum(matrix_rank(table[i:, : i + 1]) for i in range(size))
    return whole - sum(matrix_rank(table[i + 1 :, : i + 1]) for i in range(size))


def unreachable(inputs: Tensor, weights: Tensor) -> float:
    """Return ‖C (log P) U‖, U an orthonormal basis of the null space of X.

    If it is not zero, no head of any size can compute P on these inputs: for X u = 0 the logits
    vanish on u, so (log P) u would be a multiple of 1. It is zero for X of full column rank.
    """
    _, values, right = torch.linalg.svd(inputs, full_matrices=True)
    rank = int((values > _RANK * values[0]).sum())
    null = right[rank:].mT  # (n, n − rank)
    return float((centred_logits(weights) @ null).norm())


def counter_example() -> tuple[Tensor, Tensor, Tensor]:
    """Return the paper's X and P with d = 1 < n = 2, and the column that every head computes.

    The logits are [[w, 0], [0, 0]], so the second column of the softmax is (½, ½) for every w, and
    the map is at least ¼ away from P = [[½, ¾], [½, ¼]].
    """
    inputs = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    weights = torch.tensor([[0.5, 0.75], [0.5, 0.25]], dtype=torch.float64)
    return inputs, weights, torch.tensor([0.5, 0.5], dtype=torch.float64)


def permutation_by_circle(permutation: Tensor, sharpness: float) -> Tensor:
    """Return the map of a head of size 2 whose largest weights follow a permutation, (n, n).

    Keys k_j = (cos 2πj/n, sin 2πj/n), queries c · k_π(i): the rank limits exact maps, but not the
    positions of the largest weights. The margin is c (1 − cos 2π/n), so c must grow like n².
    """
    length = len(permutation)
    angle = torch.arange(length, dtype=torch.float64) * (2 * torch.pi / length)
    keys = torch.stack([angle.cos(), angle.sin()])  # (2, n)
    return torch.softmax(keys.mT @ (sharpness * keys[:, permutation]), 0)
