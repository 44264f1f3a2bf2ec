"""Per-head attention with a polynomial kernel."""

from __future__ import annotations

from torch import Tensor

from lit_probattn.attention.backends import Backend
from lit_probattn.attention.packing import Packing
from lit_probattn.attention.polynomial import Polynomial
from lit_probattn.functional.call import attend_heads, layout_of
from lit_probattn.randomness import RandomKey


def polynomial_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    enable_gqa: bool = False,
    degree: int = 2,
    backend: Backend = "auto",
    rng: RandomKey | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Compute attention with an even power of the dot product.

    Source: value-aware attention (Gupta and Berant, 2021), section 2:
        attn_weights[i, j] ∝ (query[i] · key[j])^degree
    Departs from the source: 1e-12 is added to the square of every product. A scale cancels.

    Args:
        query: (B, H, N, E).
        key: (B, H_kv, L, E).
        value: (B, H_kv, L, E_v).
        degree: even and at least 2.

    For other arguments and errors see `lit_probattn.functional`.

    Returns:
        (B, H, N, E_v).
    """
    layout = layout_of(query, key, value, enable_gqa)
    given = attn_mask, dropout_p, is_causal, None, backend, rng, cu_seqlens, cu_seqlens_k
    return attend_heads(query, key, value, layout.out, lambda _: Polynomial(degree), *given)
