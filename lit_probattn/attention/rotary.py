"""Rotary positions: the products of R_i q and R_j k depend only on j − i."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor, nn

# Position of the shifts of shifted keys: R_j (k_j + b), R_j k_j + b, or b in unrotated dimensions
# only, for which both are equal.
RotaryShift = Literal["before", "after", "unrotated"]
BASE = 10000.0  # base of the angles, as in RoFormer


class Rotary(nn.Module):
    """Rotates the first `rotary_dim` dimensions of head vectors by their position.

    Source: Su et al., 2021 (RoFormer), Eq. (15): dimensions 2m and 2m + 1 at position i are rotated
    by the angle i · base^(−2m / rotary_dim).
    Departs from the source: the rest of a head may stay unrotated (`rotary_dim` < E).

    Args:
        rotary_dim: number of rotated dimensions of a head, even.
        head_dim: E.

    Raises:
        ValueError: `rotary_dim` is odd, not positive, or larger than E.
    """

    def __init__(self, rotary_dim: int, head_dim: int) -> None:
        super().__init__()
        if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
            raise ValueError(
                f"rotary_dim must be even and from 2 to head_dim={head_dim}, received {rotary_dim}"
            )
        self.rotary_dim = rotary_dim

    def forward(self, x: Tensor, positions: int | Tensor) -> Tensor:
        """Rotate (B, …, L, E); `positions` is the first position, or all positions (B, L)."""
        length, size = x.shape[-2], self.rotary_dim
        # In float64: at position 100 000, a float32 angle is off by 0.004.
        powers = torch.arange(0, size, 2, dtype=torch.float64, device=x.device) / size
        if isinstance(positions, Tensor) and positions.dim():
            steps = positions.view(len(positions), *(1,) * (x.dim() - 3), length)
        else:
            first = cast(int, positions)  # a 0-d tensor, like sizes, in torch.jit.trace
            steps = torch.arange(first, first + length, device=x.device)
        angles = steps[..., None].to(torch.float64) * BASE**-powers  # (L, size / 2) per row
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        even, odd = x[..., :size].to(dtype).unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
        return torch.cat([turned.to(x.dtype), x[..., size:]], -1)

    def extra_repr(self) -> str:
        """Return the rotated size for `repr`."""
        return f"rotary_dim={self.rotary_dim}"
