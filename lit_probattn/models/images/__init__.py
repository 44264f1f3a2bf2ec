"""timm's image models with their attention replaced by any variant."""

from lit_probattn.models.images.layers import TokenAttention, WindowAttention
from lit_probattn.models.images.model import ImageModel
from lit_probattn.models.images.replace import replace_attention
from lit_probattn.models.images.weights import load_timm_state_dict

__all__ = [
    "ImageModel",
    "TokenAttention",
    "WindowAttention",
    "load_timm_state_dict",
    "replace_attention",
]
