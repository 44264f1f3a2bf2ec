"""Attention with a polynomial kernel: an even power of the dot product in place of its exponential.

The kernel runs as a softmax of its logarithm, so that masks, blocks, dropout and the cache are
those of every other variant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_probattn.attention.backends import AUTO_RULES, AutoRule, Backend, BackendFunction
from lit_probattn.attention.blockwise import Axis, Block, blockwise_attention
from lit_probattn.attention.core import Choice, Core, HeadCall, HeadLayout
from lit_probattn.attention.cost import Cost
from lit_probattn.attention.functional import (
    Heads,
    compute_dtype,
    grouped_scores,
    reference_output,
    repeat_heads,
)
from lit_probattn.attention.layer import Attention

# Added to the square of every dot product: rows whose products all vanish get equal weights.
FLOOR = 1e-12


@dataclass(frozen=True)
class PolynomialArguments:
    """The even power."""

    degree: int


def log_power(products: Tensor, degree: int) -> Tensor:
    """Return log((products² + 1e-12)^(degree / 2)), the logarithm of the kernel."""
    return torch.log(products.square() + FLOOR) * (degree / 2)


def polynomial_scores(query: Tensor, key: Tensor, *, degree: int) -> Tensor:
    """Return the logarithms of the polynomial kernel.

    Source: value-aware attention (Gupta and Berant, 2021), section 2, degree-C kernel:
        kernel[i, j] = (query[i] · key[j])^C
    Departs from the source: 1e-12 is added to the square of the product.

    Args:
        query: (B, H, N, E).
        key: (B, H_kv, L, E).
        degree: C, even. A factor on query or key would cancel.

    Returns:
        (B, H, N, L).
    """
    return log_power(query @ repeat_heads(key, query.shape[1]).mT, degree)


def polynomial_reference(given: Heads, arguments: PolynomialArguments) -> Tensor:
    """Return Σ_j kernel[i, j] value[j] / Σ_j kernel[i, j], (B, H, N, E_v), in at least float32."""
    query, key, value, masks, dropout = given.precise()
    scores = polynomial_scores(query, key, degree=arguments.degree)
    return reference_output(scores, value, masks, dropout)


def polynomial_blockwise(
    given: Heads, arguments: PolynomialArguments, native: bool = False
) -> Tensor:
    """Return the same block by block, O(N · block) memory; the rows of a block in C if `native`."""
    query, key, value, masks, dropout = given.precise()

    def scores(_: Block, rows: Tensor, cols: Tensor) -> Tensor:
        return log_power(rows @ repeat_heads(cols, rows.shape[1]).mT, arguments.degree)

    axes: list[Axis] = ["row", "col"]
    return blockwise_attention(scores, (query, key), axes, value, masks, dropout, native=native)


def polynomial_native(given: Heads, arguments: PolynomialArguments) -> Tensor:
    """Return the same as `polynomial_blockwise`, with the rows of a block in C."""
    return polynomial_blockwise(given, arguments, native=True)


class PolynomialCore(Core):
    """Attention with the kernel (query · key)^degree, from heads to heads; any scale cancels."""

    variant: ClassVar[str] = "polynomial"
    steps_over_cache: ClassVar[bool] = True
    backends: ClassVar[Mapping[str, BackendFunction]] = {
        "reference": polynomial_reference,
        "blockwise": polynomial_blockwise,
        "native": polynomial_native,
    }
    # The logarithm stays torch's: the C library gains little but the dropout.
    auto_rules: Mapping[str, AutoRule] = {
        **AUTO_RULES,
        "cpu": replace(AUTO_RULES["cpu"], native_from=(256, 128)),
    }

    def __init__(self, layout: HeadLayout, backend: Backend = "auto", *, degree: int = 2) -> None:
        super().__init__(layout, backend)
        if degree < 2 or degree % 2:
            raise ValueError(
                f"degree must be even and at least 2, so that weights are not negative, "
                f"received {degree}"
            )
        self.degree = degree

    def choose(self, call: HeadCall, backend: str) -> Choice:
        """Return the power; keys as they are."""
        return Choice(backend, call.key, PolynomialArguments(self.degree))

    def scores(self, call: HeadCall) -> Tensor:
        """Return `polynomial_scores`."""
        dtype = compute_dtype(call.query)
        return polynomial_scores(call.query.to(dtype), call.key.to(dtype), degree=self.degree)

    def cached_scores(
        self, query: Tensor, key: Tensor, offset: Tensor | None, cols: range, call: HeadCall
    ) -> Tensor:
        """Return the scores of a part of the cache."""
        return log_power(grouped_scores(query, key), self.degree)


class PolynomialAttention(Attention):
    """Attention with the kernel (query · key)^degree.

    Source: value-aware attention (Gupta and Berant, 2021), sections 2 and 3.2, degree 2.
        attn_weights[i, j] ∝ (query[i] · key[j])^degree
    Departs from the source: 1e-12 is added to the square of every product, in place of 1e-6 in the
    denominator: weights sum to one, and rows without any product are uniform.

    Args:
        degree: the even power; an odd one would make negative weights.
        common: the other arguments of `Attention`, without rotary positions.

    Raises:
        ValueError: `degree` is odd or below 2; see also `Attention`.
    """

    core: PolynomialCore

    def __init__(self, embed_dim: int, num_heads: int, *, degree: int = 2, **common: Any) -> None:
        super().__init__(embed_dim, num_heads, rotary_dim=0, **common)
        self.core = PolynomialCore(self.layout, self._backend, degree=degree)

    def cost(self, seq_len: int) -> Cost:
        """Return the cost: softmax attention's, with degree − 1 more products per pair.

        The paper gives no count. Per pair 2E − 1 for the product, 1 for the power of degree 2, and
        2E for the values, as in MGK appendix B for softmax attention.
        """
        powers = seq_len * seq_len * self.num_heads * (self.core.degree - 1)
        return self.softmax_cost(seq_len, powers)
