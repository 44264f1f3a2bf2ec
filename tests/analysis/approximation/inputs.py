"""Random tensors that the tests of the approximations share."""

from __future__ import annotations

import torch

G, N, E = 2, 37, 7


def tensors(length=N, seed=0):
    """Query, key, value, (G, length, E) float64 each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (G, length, E)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]


def generator(seed=5):
    """A fresh generator on the CPU."""
    return torch.Generator().manual_seed(seed)
