"""Softmax attention in one kernel: the baseline that the mixtures are measured against."""

from __future__ import annotations

from torch import Tensor

from lit_probattn.kernels.dense.operators import mixture_attention


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    key_bias: Tensor | None = None,
    bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    pair_mask: Tensor | None = None,
    draw: Tensor | None = None,
    threshold: int = 0,
    is_causal: bool = False,
) -> Tensor:
    """Return softmax(scale · query · key + key_bias + bias) @ value.

    Source: MGK, ICML 2022, Eq. (1).
    Departs from the source: nothing.

    Args:
        query: (B, H, N, E).
        key: (B, H_kv, L, E).
        value: (B, H_kv, L, E_v).
        scale: factor on query · key; positive.
        key_bias: one score per key, (B, H_kv, L), or None.
        bias: additive, 4-dimensional, broadcastable to (B, H, N, L), or None.
        key_mask: real keys, (B, L) bool, or None.
        pair_mask: allowed pairs, 4-dimensional bool, broadcastable, or None.
        draw: words of attention dropout, see `runtime.draw_tensor`; None means no dropout.
        threshold: `AttentionDropout.threshold`.
        is_causal: bottom-right aligned causal mask.

    Returns:
        (B, H, N, E_v) in the dtype of `query`; rows that see nothing are zero.
    """
    key_term = None if key_bias is None else key_bias[:, :, None]
    out, _ = mixture_attention(
        *(query, key[:, :, None], value, None, None, key_term, bias, key_mask, pair_mask, draw),
        *(scale, is_causal, False, True, threshold),
    )
    return out
