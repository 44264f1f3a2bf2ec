"""Queries whose output is needed, for tests of kernels."""

from __future__ import annotations

import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def needed_queries() -> Tensor:
    """Return a mask of four samples, (4, 100): some, two far apart, none and all."""
    mask = torch.zeros(4, 100, dtype=torch.bool, device=DEVICE)
    mask[0, 40:60] = True
    mask[0, 50] = False
    mask[1, [3, 70]] = True
    mask[3] = True
    return mask


def outside(mask: Tensor) -> Tensor:
    """Return the tiles of 32 before the first and after the last of them, (4, 1, 100, 1)."""
    far = torch.ones_like(mask)
    far[0, 32:64], far[1, :96], far[3] = False, False, False
    return far[:, None, :, None]
