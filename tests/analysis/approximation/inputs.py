"""Random tensors and a layer that tests of studies share."""

from __future__ import annotations

import torch

from lit_probattn.attention import SoftmaxAttention

G, N, E = 2, 37, 7


def tensors(length=N, seed=0):
    """Query, key, value, (G, length, E) float64 each."""
    generator = torch.Generator().manual_seed(seed)
    shape = (G, length, E)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)]


def generator(seed=5):
    """A fresh generator on the CPU."""
    return torch.Generator().manual_seed(seed)


def padded_samples():
    """A softmax layer, samples of 7 and 12 positions (2, 12, 16), and their key mask."""
    layer = SoftmaxAttention(16, 2, head_dim=8).double().eval()
    torch.manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    return layer, x, torch.arange(12) < torch.tensor([[7], [12]])
