"""The cost of a layer, the sizes that it depends on, and the papers' counting rule.

A product (m x k)(k x n) costs m n (2k − 1), counting multiplications and additions; softmax, masks
and feature maps cost nothing. The formulas are in one module per paper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lit_probattn.attention.call import HeadLayout


@dataclass(frozen=True)
class PairMacs:
    """Multiply-adds of a backend per head, query and key position, forward.

    Args:
        scores: query · key over all components and additional coordinates.
        values: weights · value.
        per_token: per position, in addition to `Cost.macs`.
        m_step: per pair in training, in addition to the output.
    """

    scores: int
    values: int
    per_token: int = 0
    m_step: int = 0


@dataclass(frozen=True)
class CostTerm:
    """One term between multiply-adds and the paper's operations; all but the totals add up."""

    text: str
    operations: int
    is_total: bool = False


@dataclass(frozen=True)
class Cost:
    """Analytic cost of one attention layer on one sequence, forward.

    Args:
        paper_flops: multiplications plus additions by the paper's counting rule, for the paper's
            layer (no biases; output projection included).
        macs: multiply-adds in the matrix products of `Variant.stated_backend`.
        num_parameters: parameters of this layer, including biases.
        paper_flops_printed: count as printed in the paper, if its simplification is wrong.
        pair_macs: products per pair of a backend in a dtype. None means that there is no closed
            form.
        terms: the difference between `macs` and `paper_flops`, itemised if known.
        break_even_head_dim: head size above which the N² term of the scores is below the term of
            MHA. None means that there is none.
        constant_macs: multiply-adds of `macs` with constants such as random features, which have
            no gradient.
    """

    paper_flops: int
    macs: int
    num_parameters: int
    paper_flops_printed: int | None = None
    pair_macs: Callable[[str, torch.dtype], PairMacs] | None = field(default=None, compare=False)
    terms: tuple[CostTerm, ...] = field(default=(), compare=False)
    break_even_head_dim: float | None = None
    constant_macs: int = 0


@dataclass(frozen=True)
class Sizes:
    """A layer and the length of a self-attention sequence, in the letters of the papers.

    Args:
        n: positions, N.
        c: width of the queries and of the output, C.
        c_key: width of keys and values.
        heads: number and sizes of the heads.
        num_parameters: parameters of the layer, including biases.
    """

    n: int
    c: int
    c_key: int
    heads: HeadLayout
    num_parameters: int

    @property
    def h(self) -> int:
        """H, heads of the output."""
        return self.heads.out

    @property
    def e(self) -> int:
        """E, size of a query or key head."""
        return self.heads.head_dim

    @property
    def e_v(self) -> int:
        """E_v, size of a value head."""
        return self.heads.value_head_dim

    @property
    def are_plain(self) -> bool:
        """Whether all heads have one size and separate keys, as the papers count them."""
        return self.heads.key == self.heads.query and self.e == self.e_v

    @property
    def projection_macs(self) -> int:
        """Multiply-adds of the four projections."""
        heads, e, e_v = self.heads, self.e, self.e_v
        of_queries = heads.query * e + heads.projected * e_v
        of_keys = heads.key * heads.keys_per_head * e + heads.value * e_v
        return self.n * (self.c * of_queries + self.c_key * of_keys)


def product_flops(m: int, k: int, n: int) -> int:
    """Operations of a product (m x k)(k x n)."""
    return m * n * (2 * k - 1)
