"""Softmax attention: scaled dot products, or one Gaussian per key; any head size, grouped heads.

Fixed head size attention (Bhojanapalli et al., 2020) is this class with a `head_dim` other than
embed_dim / num_heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.core import Core, Gaussians
from lit_probattn.attention.cost import mgk as costs
from lit_probattn.attention.cost.counting import Cost
from lit_probattn.attention.layer import Attention, LayerOptions
from lit_probattn.attention.mgk.functions import MGK
from lit_probattn.attention.numerics import (
    compute_dtype,
    repeat_heads,
    squared_distance,
)
from lit_probattn.attention.variant import Scores, Variant
from lit_probattn.base.arguments import Options, by_name

Score = Literal["dot", "gaussian"]


@dataclass(frozen=True)
class Softmax(Variant):
    """Softmax attention with dot-product or Gaussian scores."""

    name = "softmax"
    kind = "softmax"
    kernels = ("dense/softmax",)

    score: Score = "dot"

    def scores(self, call: HeadCall) -> Tensor:
        """Return the scores, (B, H, N, L).

        Source: MGK, ICML 2022, section 2.1 and appendix A (Gaussian, one head):
            dot:       query[i] · key[j] / √E
            gaussian:  −‖query[i] − key[j]‖² / (2 √E)
        Departs from the source: nothing.
        """
        query, key = call.query, repeat_heads(call.key, call.query.shape[1])
        root = query.shape[-1] ** 0.5 / call.scale_ratio()
        if self.score == "dot":
            return query @ key.mT / root
        return -squared_distance(query, key) / (2.0 * root)

    def lower(self, call: HeadCall, *, own_keys: bool = False) -> Scores:
        """Return the scores in normal form; Gaussian ones as MGK with one component, σ² = √E."""
        query, key = call.query, call.key
        scale = query.shape[-1] ** -0.5 * call.scale_ratio()
        if self.score == "dot":
            return Scores(query, key[:, :, None], scale)
        variance = torch.full(
            (key.shape[1], 1), 1.0 / scale, dtype=compute_dtype(query), device=key.device
        )
        return MGK(None, variance, equal_variance=True).lower(call, own_keys=own_keys)


@dataclass(frozen=True, kw_only=True)
class SoftmaxOptions(Options):
    """Options of softmax attention.

    Args:
        score: scaled dot product, or one Gaussian per key with variance √E.
    """

    score: Score = "dot"


@dataclass(frozen=True, kw_only=True)
class SoftmaxArguments(SoftmaxOptions, LayerOptions):
    """Arguments of `SoftmaxAttention`."""


class SoftmaxCore(Core):
    """Holds the kind of score; it has no parameters."""

    makes = Softmax
    options_class = SoftmaxOptions
    has_gaussians: ClassVar[bool] = True

    def make_parameters(self, options: SoftmaxOptions) -> None:
        """Store the kind of score."""
        self.score: Score = options.score

    def variant(self, call: HeadCall) -> Softmax:
        """Return the variant with this kind of score."""
        return Softmax(self.score)

    def gaussians(self, call: HeadCall) -> Gaussians:
        """Return one Gaussian per key with σ² = √E, for both kinds of score."""
        call.refuse_documents("Gaussians")
        heads = call.query.shape[1]
        ones = torch.ones(heads, 1, dtype=compute_dtype(call.query), device=call.query.device)
        key = repeat_heads(call.key, heads)[:, :, None]
        return Gaussians(key, None, ones * self.layout.head_dim**0.5)


class SoftmaxAttention(Attention):
    """Softmax attention, the baseline of every other variant.

    Source: MGK, ICML 2022, Eq. (1); fixed head size: Bhojanapalli et al., 2020, Eq. (5).
        attn_weights[i, j] ∝ exp(query[i] · key[j] / √E)                score = dot
        attn_weights[i, j] ∝ exp(−‖query[i] − key[j]‖² / (2 √E))         score = gaussian
    Departs from the source: nothing.

    The arguments are the fields of `SoftmaxOptions` and `LayerOptions`.

    Raises:
        ValueError: unknown score; see also `Attention`.
    """

    core: SoftmaxCore
    core_class = SoftmaxCore

    @by_name(SoftmaxArguments)
    def __init__(self, options: SoftmaxArguments) -> None:
        self.build(options)

    def cost(self, seq_len: int) -> Cost:
        """Return the cost by MGK appendix B; multiply-adds count grouped heads."""
        return costs.softmax(self.sizes(seq_len), gaussian=self.core.score == "gaussian")
