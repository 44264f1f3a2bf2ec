"""Attention variants: each wraps its equation, exact reductions, blockwise form and cost."""

from lit_probattn.attention.backends import recorded_choices
from lit_probattn.attention.base import Attention, AttentionFactory, Cost
from lit_probattn.attention.cache import KVCache
from lit_probattn.attention.fish_layer import FiSHAttention
from lit_probattn.attention.mgk_layer import MGKAttention
from lit_probattn.attention.softmax import SoftmaxAttention

__all__ = [
    "Attention",
    "AttentionFactory",
    "Cost",
    "FiSHAttention",
    "KVCache",
    "MGKAttention",
    "SoftmaxAttention",
    "recorded_choices",
]
