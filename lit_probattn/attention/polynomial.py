"""Attention with a polynomial kernel: an even power of the dot product instead of its exponential.

The kernel is computed as a softmax of its logarithm, so that masks, blocks, dropout and the cache
are the same as for other variants.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.core import Core
from lit_probattn.attention.cost.counting import Cost
from lit_probattn.attention.cost.mgk import softmax_like
from lit_probattn.attention.layer import Attention, LayerOptions
from lit_probattn.attention.masks import Block
from lit_probattn.attention.numerics import repeat_heads
from lit_probattn.attention.variant import MapFunction, Power, Scores, Variant
from lit_probattn.base.arguments import Options, by_name

# Added to the square of every dot product: rows whose products are all zero get equal weights.
FLOOR = 1e-12


def log_power(products: Tensor, degree: int) -> Tensor:
    """Return log((products² + 1e-12)^(degree / 2)), the logarithm of the kernel."""
    logs = torch.log(products.square() + FLOOR)
    return logs if degree == 2 else logs * (degree / 2)


def polynomial_scores(query: Tensor, key: Tensor, *, degree: int) -> Tensor:
    """Return the logarithms of the polynomial kernel.

    Source: value-aware attention (Gupta and Berant, 2021), section 2, degree-C kernel:
        kernel[i, j] = (query[i] · key[j])^C
    Departs from the source: 1e-12 is added to the square of the product.

    Args:
        query: (B, H, N, E).
        key: (B, H_kv, L, E).
        degree: C, even; a constant factor on query or key cancels.

    Returns:
        (B, H, N, L).
    """
    return log_power(query @ repeat_heads(key, query.shape[1]).mT, degree)


@dataclass(frozen=True)
class Polynomial(Variant):
    """Attention with the kernel (query · key)^degree; any scale cancels."""

    name = "polynomial"
    kind = "maps"

    degree: int = 2

    def __post_init__(self) -> None:
        if self.degree < 2 or self.degree % 2:
            raise ValueError(
                "degree must be even and at least 2, so that weights are not negative, received "
                f"{self.degree}"
            )

    def needs(self) -> dict[str, str]:
        """Return the features that a function of products requires."""
        return dict.fromkeys(("function", "power"), f"degree={self.degree}")

    def scores(self, call: HeadCall) -> Tensor:
        """Return `polynomial_scores`."""
        return polynomial_scores(call.query, call.key, degree=self.degree)

    def lower(self, call: HeadCall, *, own_keys: bool = False) -> Scores:
        """Return a function of the products."""

        def power(products: Tensor, _: Block) -> Tensor:
            return log_power(products, self.degree)

        form = MapFunction(power, form=Power(self.degree))
        return Scores(call.query, call.key[:, :, None], reduce=form)


@dataclass(frozen=True, kw_only=True)
class PolynomialOptions(Options):
    """Options of the polynomial kernel.

    Args:
        degree: the even power; an odd power would give negative weights.
    """

    degree: int = 2


@dataclass(frozen=True, kw_only=True)
class PolynomialArguments(PolynomialOptions, LayerOptions):
    """Arguments of `PolynomialAttention`, without rotary positions."""

    rotary_dim: int = field(default=0, init=False)


class PolynomialCore(Core):
    """Holds the degree; it has no parameters."""

    makes = Polynomial
    options_class = PolynomialOptions

    def make_parameters(self, options: PolynomialOptions) -> None:
        """Check and store the degree."""
        self.degree = Polynomial(options.degree).degree

    def variant(self, call: HeadCall) -> Polynomial:
        """Return the variant with this degree."""
        return Polynomial(self.degree)


class PolynomialAttention(Attention):
    """Attention with the kernel (query · key)^degree.

    Source: value-aware attention (Gupta and Berant, 2021), sections 2 and 3.2, degree 2.
        attn_weights[i, j] ∝ (query[i] · key[j])^degree
    Departs from the source: 1e-12 is added to the square of every product, instead of 1e-6 to the
    denominator: weights sum to one, and rows whose products are all zero are uniform.

    The arguments are the fields of `PolynomialOptions` and of `LayerOptions`, without rotary
    positions.

    Raises:
        ValueError: `degree` is odd or below 2; see also `Attention`.
    """

    core: PolynomialCore
    core_class = PolynomialCore

    @by_name(PolynomialArguments)
    def __init__(self, options: PolynomialArguments) -> None:
        self.build(options)

    def cost(self, seq_len: int) -> Cost:
        """Return the cost of softmax attention plus degree − 1 products per pair.

        The paper has no count. Per pair 2E − 1 for the product, 1 for the power of degree 2, and 2E
        for the values, as in MGK appendix B for softmax attention.
        """
        powers = seq_len * seq_len * self.num_heads * (self.core.degree - 1)
        return softmax_like(self.sizes(seq_len), powers)
