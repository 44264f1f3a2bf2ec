"""What scores need per query and per key, in float32, computed once and outside of the kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def centred(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Move query and key by the mean key of each head, in the dtype that they have.

    Distances do not change, and norms lose fewer digits; norms are to be taken of the results.

    Args:
        query: (B, H, N, E).
        key: (B, H_key, …, L, E), H_key a divisor of H.
    """
    dims = tuple(range(2, key.dim() - 1))
    centre = key.detach().mean(dims, keepdim=True, dtype=torch.float32)
    moved_key = (key - centre).to(key.dtype)
    centre = centre.flatten(2, -2)
    if centre.shape[1] != query.shape[1]:
        centre = centre.repeat_interleave(query.shape[1] // centre.shape[1], 1)
    return (query - centre).to(query.dtype), moved_key


def gaussian_row_terms(squares: Tensor, precision: Tensor) -> Tensor:
    """Return −(τ_r − τ_0) ‖query_i‖² / 2, which differs by a constant of the row from −τ_r ‖q‖²/2.

    Args:
        squares: ‖query‖², (B, H, N).
        precision: τ, (H_key, K), H_key a divisor of H.

    Returns:
        (B, H, K, N).
    """
    precision = precision.float()
    difference = (precision - precision[:, :1].detach()) / -2.0
    difference = difference.repeat_interleave(squares.shape[1] // precision.shape[0], 0)
    return difference[None, :, :, None] * squares[:, :, None]


class _PointTerms(torch.autograd.Function):
    """Norms and products with shifts; saves its inputs only, in the precision that they have."""

    @staticmethod
    def forward(ctx: Any, points: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(points, shift)
        wide = points.float()
        squares = wide.square().sum(-1)
        if shift is None:
            products = squares.new_empty(0)
            ctx.mark_non_differentiable(products)
            return squares, products
        return squares, _grouped(shift.float(), points.shape[1]) @ wide.mT

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_squares: Tensor, grad_products: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        points, shift = ctx.saved_tensors
        grad = points.float() * (2.0 * grad_squares[..., None])
        grad_shift = None
        if shift is not None:
            heads = points.shape[1]
            grad += grad_products.mT @ _grouped(shift.float(), heads)
            per_head = (grad_products @ points.float()).sum(0)
            grad_shift = per_head.unflatten(0, (shift.shape[0], -1)).sum(1).to(shift.dtype)
        return grad.to(points.dtype), grad_shift


def _grouped(shift: Tensor, num_heads: int) -> Tensor:
    groups = num_heads // shift.shape[0]
    return shift if groups == 1 else shift.repeat_interleave(groups, 0)


def point_terms(points: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return squared norms and products with shifts, in float32.

    Args:
        points: queries or keys, (B, H, N, E).
        shift: b_r, (H_shift, K, E), H_shift a divisor of H; None means no products.

    Returns:
        ‖point‖² (B, H, N) and b_r · point (B, H, K, N); the latter empty without shifts.
    """
    squares, products = _PointTerms.apply(points, shift)
    return squares, products
