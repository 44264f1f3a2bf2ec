"""FiSH attention in fused kernels: H softmaxes over maps that are mixed from G global ones."""

from __future__ import annotations

from torch import Tensor

from lit_probattn.kernels.fish.operators import fish_forward


def fish_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    first: Tensor,
    first_bias: Tensor | None = None,
    second: Tensor | None = None,
    noise_scale: Tensor | None = None,
    noise_per_head: bool = False,
    noise_draw: Tensor | None = None,
    first_row: int = 0,
    on_global: float = 1.0,
    bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    pair_mask: Tensor | None = None,
    draw: Tensor | None = None,
    threshold: int = 0,
    is_causal: bool = False,
) -> Tensor:
    """Return softmax(local scores + bias) @ value, (B, H, N, D) in the dtype of `query`.

    Source: FiSH, NeurIPS 2022, Eq. (8)-(10), section 2.4 as released; g_m = on_global · q_m · k_m:
        a = P (g + s ε)                           linear, noise per global map
        a = P g + c ε                             linear, noise per local head
        a = W_2 ReLU(W_1 (g + s ε) + b_1)         two layers; or noise per hidden unit before the
                                                  ReLU
    Departs from the source: see `FiSHAttention`.

    Args:
        query: (B, G, N, E).
        key: (B, G, L, E).
        value: (B, H, L, D).
        first: P (H, G) or W_1 (U, G), float32.
        first_bias: b_1, (U,).
        second: W_2, (H, U). None means a linear mixing.
        noise_scale: s (G,), or c (H,) or (U,) with `noise_per_head`.
        noise_per_head: whether noise belongs to local heads (hidden units) or to global maps.
        noise_draw: words of the noise, see `runtime.draw_tensor`. None means no noise.
        first_row: position of query 0 among all tokens, for the noise.
        on_global: factor on query · key.
        bias: additive, 4-dimensional, broadcastable to (B, H, N, L).
        key_mask: real keys, (B, L) bool.
        pair_mask: allowed pairs, 4-dimensional bool, broadcastable.
        draw: words of attention dropout. None means no dropout.
        threshold: `AttentionDropout.threshold`.
        is_causal: bottom-right aligned causal mask.

    Returns:
        (B, H, N, D); rows that see nothing are zero.
    """
    noise = 0 if noise_draw is None else (2 if noise_per_head else 1)
    out, _ = fish_forward(
        *(query, key, value, first, first_bias, second, noise_scale if noise else None),
        *(noise_draw, draw, key_mask, pair_mask, bias),
        *(is_causal, noise, first_row, on_global, threshold),
    )
    return out
