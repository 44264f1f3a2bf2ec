"""Small models of timm whose every part counts."""

from __future__ import annotations

import timm
import torch

from lit_probattn.attention import FiSHAttention

SWIN = {"patch_size": 2, "window_size": 4, "embed_dim": 12, "depths": (2, 2), "num_heads": (2, 4)}
VIT = {"patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3}


def swin(seed: int = 0, **options):
    torch.manual_seed(seed)
    name = "swin_tiny_patch4_window7_224"
    model = timm.create_model(name, img_size=32, num_classes=7, **{**SWIN, **options})
    return spread(model)


def vit(seed: int = 0, **options):
    torch.manual_seed(seed)
    name = "vit_tiny_patch16_224"
    return spread(timm.create_model(name, img_size=32, num_classes=7, **{**VIT, **options}))


def spread(model):
    """Make every part count: timm starts with weights too small to see a wrong order of heads."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def hard_fish(embed_dim, **options):
    return FiSHAttention(embed_dim, **{"noise": "none", "mixing_init": "copy", **options})


def hard_gfish(embed_dim, **options):
    preset = {"mixer": "mlp", "mixing_bias": "all", "scale_position": "before"}
    return hard_fish(embed_dim, **{**preset, "mixing_init": "trunc_normal_0.02", **options})


def pictures(count: int = 3) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(5))
