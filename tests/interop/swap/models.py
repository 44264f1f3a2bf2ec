"""Tiny models of torch and timm with random weights in float64, and what they are called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.interop.swap.table import HOSTS, VIT, Host, timm_host
from tests.support.helpers import double

# A model, and a call of it that returns one tensor.
Case = tuple[nn.Module, Callable[[nn.Module], Tensor]]


def randomised(model: nn.Module) -> nn.Module:
    """Draw every weight so that attention is far from uniform and no branch is switched off."""
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            nn.init.normal_(parameter, std=1.5 / parameter[0].numel() ** 0.5)
        else:
            nn.init.normal_(parameter, mean=0.0 if "bias" in name else 1.0, std=0.3)
    return model.double().eval()


def multihead() -> nn.MultiheadAttention:
    return nn.MultiheadAttention(24, 4, dropout=0.0, batch_first=True)


class Crossing(nn.Module):
    """Cross-attention to tokens of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.attention = nn.MultiheadAttention(24, 4, kdim=11, vdim=11, bias=False)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.attention(self.norm(x), other, other)[0]


def encoder(masked: bool) -> Case:
    layer = nn.TransformerEncoderLayer(24, 4, 29, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    x = double(3, 7, 24)
    hidden = torch.arange(7)[None] >= torch.tensor([7, 4, 5])[:, None]
    causal = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    options: dict[str, Any] = {}
    if masked:
        options = {"src_key_padding_mask": hidden, "mask": causal, "is_causal": True}
    return randomised(model), lambda m: m(x, **options)[~hidden if masked else slice(None)]


def decoder() -> Case:
    layer = nn.TransformerDecoderLayer(24, 4, 29, dropout=0.0)
    x, memory = double(5, 3, 24), double(7, 3, 24)
    causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
    padding = torch.arange(7)[None] >= torch.tensor([7, 4, 1])[:, None]
    options = {"tgt_mask": causal, "tgt_is_causal": True, "memory_key_padding_mask": padding}
    return randomised(nn.TransformerDecoder(layer, 2)), lambda m: m(x, memory, **options)


def crossing() -> Case:
    x, other = double(5, 3, 24), double(7, 3, 11)
    return randomised(Crossing()), lambda m: m(x, other)


TORCH: dict[str, Callable[[], Case]] = {
    "encoder": lambda: encoder(False),
    "encoder, padded and causal": lambda: encoder(True),
    "decoder": decoder,
    "cross-attention, other width": crossing,
}

_STAGES = {"num_heads": (2, 4), "embed_dim": 16, "depths": (1, 2)}
TIMM: dict[str, Callable[[], Host]] = {
    **{name: HOSTS[f"timm {name}"] for name in ("ViT", "EVA02", "DINOv3", "BEiT")},
    "ViT, norms of queries and keys": lambda: timm_host(
        "vit_tiny_patch16_224", 32, qk_norm=True, **VIT
    ),
    "EVA02, a norm over heads": lambda: timm_host(
        "eva02_tiny_patch14_224", 28, scale_attn_inner=True, **VIT
    ),
    "EVA with rotary positions": lambda: timm_host(
        "vit_medium_patch16_rope_reg1_gap_256", 32, **VIT
    ),
    "AttentionRope, angles of each head": lambda: timm_host(
        "vit_small_patch16_rope_mixed_224", 32, **VIT
    ),
    "Swin": lambda: timm_host("swin_tiny_patch4_window7_224", 64, window_size=4, **_STAGES),
    "Swin 2": lambda: timm_host("swinv2_tiny_window8_256", 64, **_STAGES),
}


def timm_model(name: str) -> Case:
    host = TIMM[name]()
    pictures = host.example.double()
    return randomised(host.model), lambda m: m(pictures)
