"""Cosine attention: a variant that the package does not have, to be added by tests.

`tests/attention/test_proofs.py` uses it from outside the package, and copies it inside.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.core import Core, ParameterTable
from lit_probattn.attention.cost.counting import Cost
from lit_probattn.attention.cost.mgk import softmax_like
from lit_probattn.attention.layer import Attention, LayerOptions
from lit_probattn.attention.numerics import compute_dtype, repeat_heads
from lit_probattn.attention.variant import Scores, Variant
from lit_probattn.base.arguments import Positive, by_name


@dataclass(frozen=True)
class Cosine(Variant):
    """Attention by cosines, with inverse temperatures (H,); any scale cancels."""

    name = "cosine"
    sharpness: Tensor

    def scores(self, call: HeadCall) -> Tensor:
        """Return sharpness · cos(query[i], key[j]), (B, H, N, L)."""
        key = repeat_heads(F.normalize(call.key, dim=-1), call.query.shape[1])
        cosines = F.normalize(call.query, dim=-1) @ key.mT
        return self.sharpness.to(call.query.dtype)[:, None, None] * cosines

    def lower(self, call: HeadCall, *, own_keys: bool = False) -> Scores:
        """Return products of vectors of length one."""
        dtype, low = compute_dtype(call.query), call.query.dtype
        query = F.normalize(call.query.to(dtype), dim=-1) * self.sharpness.to(dtype)[:, None, None]
        key = F.normalize(call.key.to(dtype), dim=-1)
        return Scores(query.to(low), key.to(low)[:, :, None])


@dataclass(frozen=True, kw_only=True)
class CosineOptions:
    """Options of cosine attention.

    Args:
        sharpness: 1/T at the start.
    """

    sharpness: Positive = 10.0


@dataclass(frozen=True, kw_only=True)
class CosineArguments(CosineOptions, LayerOptions):
    """Arguments of `CosineAttention`."""


class CosineCore(Core):
    """Inverse temperatures."""

    makes = Cosine
    options_class = CosineOptions

    def make_parameters(self, options: CosineOptions) -> None:
        """Make the sharpness of every head."""
        start = torch.full((self.layout.out,), options.sharpness)
        self.log_sharpness = nn.Parameter(start.log())

    def variant(self, call: HeadCall) -> Cosine:
        """Return the sharpness of every head."""
        return Cosine(self.log_sharpness.exp())

    def learned(self) -> dict[str, ParameterTable]:
        """Return the sharpness of every head."""
        return {"sharpness": ParameterTable(self.log_sharpness.exp()[:, None], "sharpness", "1/T")}


class CosineAttention(Attention):
    """Attention whose scores are cosines: attn_weights ∝ exp(cos(query[i], key[j]) / T_h).

    Its arguments are the fields of `CosineOptions` and `LayerOptions`.
    """

    core_class = CosineCore

    @by_name(CosineArguments)
    def __init__(self, options: CosineArguments) -> None:
        self.build(options)

    def cost(self, seq_len: int) -> Cost:
        """Return the cost of softmax attention; norms have no products."""
        return softmax_like(self.sizes(seq_len))
