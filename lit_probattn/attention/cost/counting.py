"""What is said of a layer's cost, the sizes that it depends on, and the papers' counting rule.

A product (m x k)(k x n) costs m n (2k − 1), multiplications and additions alike; softmax, masks and
feature maps cost nothing. The formulas are in a module per paper.
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
        scores: query · key over all components and extra coordinates.
        values: weights · value.
        per_token: per position, beyond what `Cost.macs` has.
        m_step: per pair in training, beside the output.
    """

    scores: int
    values: int
    per_token: int = 0
    m_step: int = 0


@dataclass(frozen=True)
class CostTerm:
    """One line between multiply-adds and the paper's operations; all but the totals add up."""

    text: str
    operations: int
    is_total: bool = False


@dataclass(frozen=True)
class Cost:
    """Analytic cost of one attention layer on one sequence, forward.

    Args:
        paper_flops: multiplications plus additions by the paper's counting rule, for the paper's
            layer (no biases; output projection included).
        macs: multiply-adds in matrix products of what `Variant.stated_backend` runs.
        num_parameters: parameters of this layer, biases included.
        paper_flops_printed: what the paper prints, where it simplifies wrongly.
        pair_macs: products per pair of a backend in a dtype. None means that there is no closed
            form.
        terms: what lies between `macs` and `paper_flops`, if anything is said of it.
        break_even_head_dim: head size above which the N² term of the scores is below that of MHA.
            None means that there is none.
    """

    paper_flops: int
    macs: int
    num_parameters: int
    paper_flops_printed: int | None = None
    pair_macs: Callable[[str, torch.dtype], PairMacs] | None = field(default=None, compare=False)
    terms: tuple[CostTerm, ...] = field(default=(), compare=False)
    break_even_head_dim: float | None = None


@dataclass(frozen=True)
class Sizes:
    """A layer and a sequence of self-attention, in the letters of the papers.

    Args:
        n: positions, N.
        c: width of the queries and of the output, C.
        c_key: width of keys and values.
        heads: number and sizes of the heads.
        num_parameters: parameters of the layer, biases included.
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
        """Whether all heads have one size and keys of their own, as the papers count them."""
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
