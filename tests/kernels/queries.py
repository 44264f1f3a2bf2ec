"""Queries whose output is needed, for tests of kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_probattn.kernels.runtime import Launch, forced

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def needed_queries() -> Tensor:
    """Return a mask of four samples, (4, 100): some, two far apart, none and all."""
    mask = torch.zeros(4, 100, dtype=torch.bool, device=DEVICE)
    mask[0, 40:60] = True
    mask[0, 50] = False
    mask[1, [3, 70]] = True
    mask[3] = True
    return mask


def _outside(mask: Tensor) -> Tensor:
    """Return the tiles of 32 before the first and after the last of them, (4, 1, 100, 1)."""
    far = torch.ones_like(mask)
    far[0, 32:64], far[1, :96], far[3] = False, False, False
    return far[:, None, :, None]


def check_that_others_change_no_bit(attend, leaves, cotangent, blocks):
    """Compare outputs and gradients of `attend(*leaves, query_mask)` with those without a mask.

    With tiles of queries of one size in forward and of another in backward.
    """
    mask = needed_queries()
    far, made = _outside(mask), []
    leaves[0][1, :, 20] *= 1e4  # would overflow without its normaliser
    for given in (None, mask):
        if given is not None:
            leaves[0] = leaves[0].detach().masked_fill(far, float("nan"))
        leaves = [x.requires_grad_() for x in leaves]
        with forced(Launch(blocks[0], 16)):
            out = attend(*leaves, query_mask=given)
        with forced(Launch(blocks[1], 16)):
            wanted = cotangent * mask[:, None, :, None]
            made.append((out, *torch.autograd.grad(out, leaves, wanted)))
    (whole, *expected), (part, *found) = made
    assert (part.masked_select(far) == 0).all()
    assert (found[0].masked_select(far) == 0).all()
    needed = mask[:, None, :, None].expand_as(whole)
    assert torch.equal(part[needed], whole[needed])
    for grad, right in zip(found, expected, strict=True):
        assert torch.equal(grad, right)
