"""Attention variants: each wraps its equation, exact reductions, blockwise form and cost."""

from lit_probattn.attention.ast import ASTAttention
from lit_probattn.attention.backends import recorded_choices
from lit_probattn.attention.cache import Cache, KVCache, LinearState
from lit_probattn.attention.core import Core, HeadCall, HeadLayout
from lit_probattn.attention.fish.layer import FiSHAttention
from lit_probattn.attention.fish.linear_layer import LinearFiSHAttention
from lit_probattn.attention.layer import Attention, AttentionFactory, Cost
from lit_probattn.attention.linear.as_released import (
    ReleasedLinearAttention,
    ReleasedMLKAttention,
)
from lit_probattn.attention.linear.layer import LinearAttention
from lit_probattn.attention.linear.mlk import MLKAttention
from lit_probattn.attention.mgk.as_released import ReleasedMGKAttention
from lit_probattn.attention.mgk.layer import MGKAttention
from lit_probattn.attention.polynomial import PolynomialAttention
from lit_probattn.attention.softmax import SoftmaxAttention

__all__ = [
    "ASTAttention",
    "Attention",
    "AttentionFactory",
    "Cache",
    "Core",
    "Cost",
    "FiSHAttention",
    "HeadCall",
    "HeadLayout",
    "KVCache",
    "LinearAttention",
    "LinearFiSHAttention",
    "LinearState",
    "MGKAttention",
    "MLKAttention",
    "PolynomialAttention",
    "ReleasedLinearAttention",
    "ReleasedMGKAttention",
    "ReleasedMLKAttention",
    "SoftmaxAttention",
    "recorded_choices",
]
