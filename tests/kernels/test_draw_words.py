"""The words from which kernels draw are made on the device."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lit_probattn.kernels.runtime import draw_tensor


class Recorded(TorchDispatchMode):
    """Records the names of operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_no_number_is_copied_from_the_host():
    """Such a copy waits for a GPU and cannot be captured in a CUDA graph (`aten.lift_fresh`)."""
    samples = torch.arange(3)
    with Recorded() as recorded:
        words = draw_tensor((7, 2**32 - 1), samples)
    assert words.tolist() == [7, 2**32 - 1, 0, 1, 2]
    assert not [name for name in recorded.names if "lift" in name]
