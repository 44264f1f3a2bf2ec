"""Attention with a polynomial kernel: an even power of the dot product in place of its exponential.

The kernel runs as a softmax of its logarithm, so that masks, blocks, dropout and the cache are
those of every other variant.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from lit_probattn.attention.backends import Backend
from lit_probattn.attention.blockwise import Block, blockwise_attention
from lit_probattn.attention.functional import (
    compute_dtype,
    grouped_scores,
    reference_output,
    repeat_heads,
)
from lit_probattn.attention.layer import Attention, BackendFunction, Cost
from lit_probattn.attention.masks import Masks
from lit_probattn.randomness import AttentionDropout

# Added to the square of every dot product: rows whose products all vanish get equal weights.
FLOOR = 1e-12


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


def polynomial_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    masks: Masks,
    dropout: AttentionDropout | None,
    degree: int,
) -> Tensor:
    """Return Σ_j kernel[i, j] value[j] / Σ_j kernel[i, j], (B, H, N, E_v), in at least float32."""
    dtype = compute_dtype(query)
    scores = polynomial_scores(query.to(dtype), key.to(dtype), degree=degree)
    return reference_output(scores, value, masks, dropout)


def polynomial_blockwise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    masks: Masks,
    dropout: AttentionDropout | None,
    degree: int,
) -> Tensor:
    """Return the same block by block, O(N · block) memory."""
    dtype = compute_dtype(query)

    def scores(_: Block, rows: Tensor, cols: Tensor) -> Tensor:
        return log_power(rows @ repeat_heads(cols, rows.shape[1]).mT, degree)

    out, _ = blockwise_attention(
        scores,
        (query.to(dtype), key.to(dtype)),
        ("row", "col"),
        value.to(dtype),
        num_heads=query.shape[1],
        masks=masks,
        dropout=dropout,
    )
    return out


class PolynomialAttention(Attention):
    """Attention with the kernel (query · key)^degree.

    Source: value-aware attention (Gupta and Berant, 2021), sections 2 and 3.2, degree 2.
        attn_weights[i, j] ∝ (query[i] · key[j])^degree
    Departs from the source: 1e-12 is added to the square of every product, in place of an epsilon
    in the denominator: weights sum to one, and rows without any product are uniform.

    Args:
        embed_dim: C.
        head_dim: E.
        num_heads: H.
        num_kv_heads: key/value heads, a divisor of H.
        key_embed_dim: width of keys and values in cross-attention.
        value_head_dim: size of a value head.
        bias: biases of the projections.
        dropout: attention dropout in training.
        backend: implementation.
        degree: the even power; an odd one would make negative weights.

    Raises:
        ValueError: `degree` is odd or below 2.
    """

    variant: ClassVar[str] = "polynomial"
    steps_over_cache: ClassVar[bool] = True
    backends: ClassVar[dict[str, BackendFunction]] = {
        "reference": polynomial_reference,
        "blockwise": polynomial_blockwise,
    }

    def __init__(
        self,
        embed_dim: int,
        head_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        key_embed_dim: int | None = None,
        value_head_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        backend: Backend = "auto",
        degree: int = 2,
    ) -> None:
        super().__init__(
            embed_dim,
            head_dim,
            num_heads,
            num_kv_heads=num_kv_heads,
            key_embed_dim=key_embed_dim,
            value_head_dim=value_head_dim,
            bias=bias,
            dropout=dropout,
            backend=backend,
        )
        if degree < 2 or degree % 2:
            raise ValueError(
                f"degree must be even and at least 2, so that weights are not negative, "
                f"received {degree}"
            )
        self.degree = degree

    def score_arguments(self, num_keys: int) -> dict[str, Any]:
        """Return the power."""
        return {"degree": self.degree}

    def reference_scores(self, query: Tensor, key: Tensor, **arguments: Any) -> Tensor:
        """Return `polynomial_scores`."""
        return polynomial_scores(query, key, **arguments)

    def cached_scores(
        self, query: Tensor, key: Tensor, offset: Tensor | None, cols: range, num_keys: int
    ) -> Tensor:
        """Return the scores of a part of the cache."""
        return log_power(grouped_scores(query, key), self.degree)

    def cost(self, seq_len: int) -> Cost:
        """Return the cost: softmax attention's, with degree − 1 more products per pair.

        The paper gives no count. Per pair 2E − 1 for the product, 1 for the power of degree 2, and
        2E for the values, as in MGK appendix B for softmax attention.
        """
        n, c, e, h = seq_len, self.embed_dim, self.head_dim, self.num_heads
        e_v, kv, width = self.value_head_dim, self.num_kv_heads, self.key_embed_dim
        projections = n * (c * h * e + width * kv * (e + e_v) + h * e_v * c)
        softmax = n * n * h * (4 * e - 1) + n * h * e * (6 * c + 2 * h * e - 5)
        return Cost(
            paper_flops=softmax + n * n * h * (self.degree - 1),
            macs=projections + n * n * h * (e + e_v),
            num_parameters=sum(p.numel() for p in self.parameters()),
        )
