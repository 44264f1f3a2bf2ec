"""Image models of timm with any attention variant in place of their own."""

from lit_probattn.models.images.layers import TokenAttention, WindowAttention
from lit_probattn.models.images.model import ImageModel
from lit_probattn.models.images.replace import replace_attention
from lit_probattn.models.images.weights import LoadReport, load_timm_state_dict

__all__ = [
    "ImageModel",
    "LoadReport",
    "TokenAttention",
    "WindowAttention",
    "load_timm_state_dict",
    "replace_attention",
]
