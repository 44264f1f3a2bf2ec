"""Per-head adaptively sparse attention."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_probattn.attention.ast import AST, check_alpha
from lit_probattn.attention.backends import Backend
from lit_probattn.attention.numerics import compute_dtype
from lit_probattn.attention.packing import Packing
from lit_probattn.functional.call import attend_heads, by_head, layout_of
from lit_probattn.randomness import RandomKey


def ast_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    alpha: float | Tensor = 1.5,
    backend: Backend = "auto",
    rng: RandomKey | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Compute attention by α-entmax, which gives most pairs exactly zero weight.

    Source: Correia et al., 2019; FiSH, NeurIPS 2022, section 3.6; with s = `scale`:
        attn_weights[i] = α-entmax(s query[i] · key)
    Departs from the source: nothing. Requires the package entmax.

    Args:
        query: (B, H, N, E).
        key: (B, H_kv, L, E).
        value: (B, H_kv, L, E_v).
        alpha: from 1.01 to 2 (sparsemax), for all heads, or (H,), whose range is not checked.

    For other arguments and errors see `lit_probattn.functional`.

    Returns:
        (B, H, N, E_v).
    """
    layout = layout_of(query, key, value, enable_gqa)
    if isinstance(alpha, Tensor):
        alpha = by_head("alpha", alpha, layout.out).flatten().to(query.device)
    else:
        alpha = torch.tensor([check_alpha(alpha)], dtype=compute_dtype(query), device=query.device)
    variant = AST(alpha.expand(layout.out))
    given = attn_mask, dropout_p, is_causal, scale, backend, rng, cu_seqlens, cu_seqlens_k
    return attend_heads(query, key, value, layout.out, lambda _: variant, *given)
