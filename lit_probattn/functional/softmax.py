"""Per-head softmax attention."""

from __future__ import annotations

from torch import Tensor

from lit_probattn.attention.backends import Backend
from lit_probattn.attention.packing import Packing
from lit_probattn.attention.softmax import Score, Softmax
from lit_probattn.base.arguments import check_argument
from lit_probattn.functional.call import attend_heads, layout_of
from lit_probattn.randomness import RandomKey


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    score: Score = "dot",
    backend: Backend = "auto",
    rng: RandomKey | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Compute softmax attention of scaled dot products or of Gaussian scores.

    Source: MGK, ICML 2022, section 2.1 and appendix A; with s = `scale`:
        attn_weights[i, j] ∝ exp(s query[i] · key[j])                   score = dot
        attn_weights[i, j] ∝ exp(−s ‖query[i] − key[j]‖² / 2)           score = gaussian
    Departs from the source: nothing.

    Args:
        query: (B, H, N, E).
        key: (B, H_kv, L, E).
        value: (B, H_kv, L, E_v).
        score: `dot` or `gaussian`.

    For other arguments and errors see `lit_probattn.functional`.

    Returns:
        (B, H, N, E_v).
    """
    check_argument("score", score, Score)
    layout = layout_of(query, key, value, enable_gqa)
    given = attn_mask, dropout_p, is_causal, scale, backend, rng, cu_seqlens, cu_seqlens_k
    return attend_heads(query, key, value, layout.out, lambda _: Softmax(score), *given)
