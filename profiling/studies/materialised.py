"""Attention as released code computes it: every N x N map is stored, nothing is fused.

Yardsticks for time and memory. They share the weights of a layer of this package and compute the
same function; dropout of the maps draws from PyTorch's generator.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_probattn.attention import Attention, MGKAttention, SoftmaxAttention


class PlainAttention(nn.Module):
    """Self-attention by the plain formula, on the weights of a layer.

    Args:
        layer: softmax, or a mixture with two projections or shifts, without grouped heads.

    Raises:
        NotImplementedError: another variant or option; use the layer's reference backend.
    """

    def __init__(self, layer: Attention) -> None:
        super().__init__()
        served = type(layer) is SoftmaxAttention and layer.score == "dot"
        if isinstance(layer, MGKAttention):
            served = layer.score == "gaussian" and layer.e_step != "hard"
        if not served or layer.num_kv_heads != layer.num_heads or layer.rotary is not None:
            raise NotImplementedError(
                f"no plain form of {type(layer).__name__} with these options: use its reference"
            )
        self.layer = layer

    def forward(self, inputs: Tensor, *, key_mask: Tensor | None = None, **ignored: Any) -> Tensor:
        """Map (B, N, C) to (B, N, C)."""
        layer = self.layer
        sizes = (layer.num_heads, layer.head_dim)
        query, value = (
            proj(inputs).unflatten(-1, sizes).transpose(1, 2)
            for proj in (layer.query_proj, layer.value_proj)
        )  # (B, H, N, E)
        key = layer.split_keys(layer.key_proj(inputs))
        maps = self._mixture if isinstance(layer, MGKAttention) else self._softmax
        weights = F.dropout(maps(query, key, key_mask), layer.dropout, self.training)
        out: Tensor = layer.out_proj((weights @ value).transpose(1, 2).flatten(2))
        return out

    def _softmax(self, query: Tensor, key: Tensor, key_mask: Tensor | None) -> Tensor:
        """softmax(q · k / √E), (B, H, N, N)."""
        scores = query @ key.transpose(-2, -1) / self.layer.head_dim**0.5
        if key_mask is not None:
            scores = scores.masked_fill(~key_mask[:, None, None], float("-inf"))
        return scores.softmax(dim=-1)

    def _mixture(self, query: Tensor, key: Tensor, key_mask: Tensor | None) -> Tensor:
        """Σ_r π_r exp(−‖q − k_r‖² / 2σ_r²) over its row sum, (B, H, N, N)."""
        layer = self.layer
        assert isinstance(layer, MGKAttention)
        assert layer.prior is not None
        if layer.key_shift is not None:
            key = key[:, :, None] + layer.key_shift[None, :, :, None]  # (B, H, K, N, E)
        prior, variance = layer.prior.value.clamp(0.0, 1.0), layer.variance()
        density: Tensor | None = None
        for r in range(layer.num_components):
            one = key[:, :, r]
            distance = query.square().sum(-1, keepdim=True) - 2 * query @ one.transpose(-2, -1)
            distance = (distance + one.square().sum(-1)[:, :, None]).clamp_min(0.0)
            scale = variance[..., r].reshape(-1, 1, 1).to(query.dtype)
            part = prior[..., r].reshape(-1, 1, 1) * torch.exp(-distance / (2 * scale))
            density = part if density is None else density + part
        assert density is not None
        if key_mask is not None:
            density = density * key_mask[:, None, None]
        return density / density.sum(-1, keepdim=True)


def materialise(model: nn.Module) -> nn.Module:
    """Replace every attention layer of a model by its plain form, on the same weights."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Attention):
                setattr(module, name, PlainAttention(child))
    return model
