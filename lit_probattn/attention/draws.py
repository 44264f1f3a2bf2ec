"""Draws for attention: by the C library of the CPU where its self-test passes, else by torch.

Both give the same bits, so nothing depends on which of them drew.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_probattn import randomness
from lit_probattn.randomness import AttentionDropout, RandomKey


@torch.compiler.disable
def keep_pairs(
    dropout: AttentionDropout,
    batch_size: int,
    num_heads: int,
    rows: range,
    cols: range,
    device: torch.device,
    first_head: int = 0,
) -> Tensor:
    """Return `AttentionDropout.keep` of a block, (B, H, rows, cols) bool."""
    if _plain(device):
        from lit_probattn.kernels.cpu import rows as native
        from lit_probattn.kernels.cpu.selftest import failure

        if failure() is None:
            return native.keep(dropout, batch_size, num_heads, rows, cols, first_head)
    return dropout.keep(batch_size, num_heads, rows, cols, device, first_head)


@torch.compiler.disable
def normal_noise(
    key: RandomKey,
    batch_size: int,
    num_maps: int,
    rows: range,
    cols: range,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return `randomness.normal_noise` of a block, (B, num_maps, rows, cols)."""
    if dtype == torch.float32 and _plain(device):
        from lit_probattn.kernels.cpu import rows as native
        from lit_probattn.kernels.cpu.selftest import draws_noise

        if draws_noise():
            return native.normal_noise(key, batch_size, num_maps, rows, cols)
    return randomness.normal_noise(key, batch_size, num_maps, rows, cols, device, dtype)


def _plain(device: torch.device) -> bool:
    """Whether new tensors have memory on the CPU; those that only carry shapes have none."""
    return device.type == "cpu" and type(torch.empty(0)) is Tensor
