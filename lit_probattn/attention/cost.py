"""What a variant says of its cost: operations, parameters, products of its backends.

Counting rule of the papers: a product (m x k)(k x n) costs m n (2k − 1), multiplications and
additions alike; softmax, masks and feature maps cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lit_probattn.attention.engines.sdpa import LEAST_SIZE


@dataclass(frozen=True)
class Cost:
    """Analytic cost of one attention layer on one sequence, forward.

    Args:
        paper_flops: multiplications plus additions by the paper's counting rule, for the paper's
            layer (no biases; output projection included).
        macs: multiply-adds in matrix products of what `Core.stated_backend` runs.
        num_parameters: parameters of this layer, biases included.
        paper_flops_printed: what the paper prints, where it simplifies wrongly.
    """

    paper_flops: int
    macs: int
    num_parameters: int
    paper_flops_printed: int | None = None


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


def fused_pairs(size: int, value_dim: int, num_keys: int, backend: str) -> PairMacs:
    """Return the products of K keys of `size`; PyTorch's kernels pad, and repeat the values.

    The padding is that on a CPU.
    """
    if backend == "sdpa":
        size = max(size, value_dim, LEAST_SIZE)
        return PairMacs(num_keys * size, num_keys * size)
    return PairMacs(num_keys * size, value_dim)


def num_parts(dtype: torch.dtype) -> int:
    """Return into how many coordinates a scalar goes: low precision splits it in three."""
    return 1 if dtype in (torch.float32, torch.float64) else 3


def mixture_terms(
    n: int, h: int, e: int, c: int, k: int = 1, shifted: bool = False
) -> list[CostTerm]:
    """Lead from twice the multiply-adds of a layer without biases to the paper's operations.

    Args:
        n: sequence length.
        h: heads of the layer, not grouped.
        e: size of all heads.
        c: width.
        k: components; 1 for softmax attention.
        shifted: shifted keys (sMGK).
    """
    keys = h * e * (1 if shifted else k)
    inner, width = h * e, h * e * k
    macs = n * c * (inner + keys + inner) + n * n * h * (k * e + e) + n * inner * c
    outputs = n * (inner + keys + inner) + k * h * n * n + h * n * e + n * c
    terms = [
        CostTerm("2 x multiply-adds of our layer", 2 * macs, True),
        CostTerm("a sum of k products needs k - 1 additions: one less per output", -outputs),
    ]
    if k > 1:
        combined = (k - 1) * h * n * n
        terms.append(CostTerm("additions that combine the components, per pair", combined))
    if shifted:
        terms.append(CostTerm("additions of the shifts to every key", k * n * h * e))
    terms.append(
        CostTerm(
            f"output projection to the paper's width H·E = {width} instead of C = {c}",
            n * (width - c) * (2 * inner - 1),
        )
    )
    total = sum(t.operations for t in terms)
    terms.append(CostTerm("operations by the paper's rule (corrected constant)", total, True))
    if not shifted and k > 1:
        gap = n * h * e * (k - 1)
        text = "the paper's simplification: −(3K+2)/K where −(2K+3)/K is right"
        terms.append(CostTerm(text, -gap))
        terms.append(CostTerm("operations as the paper prints them", total - gap, True))
    return terms
