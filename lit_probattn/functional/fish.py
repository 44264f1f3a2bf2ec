"""Per-head FiSH attention and its linear form."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lit_probattn.attention.backends import Backend
from lit_probattn.attention.call import HeadCall, key_or_fresh
from lit_probattn.attention.fish.functions import FiSH, ScoreNoise
from lit_probattn.attention.fish.linear import LinearFiSH
from lit_probattn.attention.fish.mixing import Mixer, MixingValues, NoiseKind
from lit_probattn.attention.linear.features import FeatureMap
from lit_probattn.attention.linear.functions import LinearForm
from lit_probattn.attention.packing import Packing
from lit_probattn.base.arguments import check_argument
from lit_probattn.functional.call import attend_heads, check_heads
from lit_probattn.randomness import RandomKey


def _mixing(
    head_mix: Tensor | Sequence[Tensor],
    head_bias: Sequence[Tensor | None] | None,
    noise_scale: Tensor | None,
    num_global: int,
    num_heads: int,
) -> MixingValues:
    """Return the mixing of G global heads to H local heads.

    Raises:
        ValueError: the weights do not map G to H heads.
    """
    weights = (head_mix,) if isinstance(head_mix, Tensor) else tuple(head_mix)
    biases: Sequence[Tensor | None] = (None,) * (len(weights) - 1)
    if head_bias is not None:
        biases = head_bias
    mixer: Mixer = "linear" if len(weights) == 1 else "mlp"
    if len(weights) == 1 and weights[0].shape == (1, num_global) and num_heads > 1:
        mixer = "shared"
    width = num_global
    for weight in weights:
        if weight.dim() != 2 or weight.shape[1] != width:
            raise ValueError(
                f"head_mix has a matrix of shape {tuple(weight.shape)}, expected (heads, {width})"
            )
        width = weight.shape[0]
    if not weights or (width != num_heads and mixer != "shared"):
        raise ValueError(
            f"head_mix maps {num_global} global heads to {width}, expected {num_heads}, the heads "
            "of value"
        )
    if len(biases) != len(weights) - 1:
        raise ValueError(
            f"head_bias has {len(biases)} entries, expected one for each ReLU: {len(weights) - 1}"
        )
    if noise_scale is not None and noise_scale.shape != (num_global,):
        raise ValueError(
            f"noise_scale has shape {tuple(noise_scale.shape)}, expected ({num_global},)"
        )
    return MixingValues(mixer, weights, tuple(biases), noise_scale)


def fish_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_mix: Tensor | Sequence[Tensor],
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    head_bias: Sequence[Tensor | None] | None = None,
    noise_scale: Tensor | None = None,
    noise: NoiseKind = "global",
    backend: Backend = "auto",
    rng: RandomKey | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Compute attention with H local score maps that are mixed from G global score maps.

    Source: FiSH, NeurIPS 2022, Eq. (8)-(10), section 2.4; with s = `scale`:
        G_k = query_k key_kᵀ,  k = 1 … G
        FiSH    A_j = Σ_k p_kj (G_k + s_k ε_k)            head_mix: P, row j holds p_1j … p_Gj
        MiSH    the same p_k for every j                  head_mix: P of one row
        GFiSH   a = W_2 ReLU(W_1 (g + noise) + b_1)       head_mix: [W_1, W_2]
        attn_weights_j = softmax(s A_j)
    Departs from the source: noise per global head by default; see `noise`.

    Args:
        query: (B, G, N, E), global heads.
        key: (B, G, L, E).
        value: (B, H, L, E_v), local heads.
        head_mix: (H, G); (1, G); or several matrices from G to H with ReLUs between them.
        head_bias: biases before the ReLUs, one entry each; None means no biases.
        noise_scale: s_k, (G,), in units of query · key. None means no noise (Hard FiSH); otherwise
            every call draws noise, like a layer in training.
        noise: `global`, `local` or `local_global`, if there is noise.

    For other arguments and errors see `lit_probattn.functional`; masks apply to local heads.

    Returns:
        (B, H, N, E_v).
    """
    check_argument("noise", noise, NoiseKind)
    check_heads(query, key, value)
    shared, heads = query.shape[1], value.shape[1]
    if key.shape[1] != shared:
        raise ValueError(f"query has {shared} heads and key {key.shape[1]}: expected the same")
    mixing = _mixing(head_mix, head_bias, noise_scale, shared, heads)

    def variant(call: HeadCall) -> FiSH:
        drawn = None
        if noise_scale is not None and noise != "none":
            drawn = ScoreNoise(noise, key_or_fresh(call.rng), mixing.num_noise_maps(heads))
        return FiSH(mixing, heads, noise=drawn)

    given = attn_mask, dropout_p, is_causal, scale, backend, rng, cu_seqlens, cu_seqlens_k
    return attend_heads(query, key, value, heads, variant, *given)


def linear_fish_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_mix: Tensor | Sequence[Tensor],
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    head_bias: Sequence[Tensor | None] | None = None,
    last_bias: Tensor | None = None,
    norm_mix: Tensor | None = None,
    noise_scale: Tensor | None = None,
    eps: float = 1e-6,
    backend: Backend = "auto",
    rng: RandomKey | None = None,
    cu_seqlens: Tensor | Packing | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """Compute linear attention with H local states mixed from G global states, in O(N).

    Source: FiSH, NeurIPS 2022, appendix A.6; ψ(x) = elu(x) + 1, S_k = Σ_n ψ(key_kn) value_knᵀ:
        LFiSH   S_loc[j] = Σ_k p_kj (S_k + s_k ε_k)
        GLFiSH  S_loc = W_2 ReLU(W_1 (S + s ε) + b_1) + b_2, per cell
        out[j, i] = ψ(query[j, i])ᵀ S_loc[j] / (ψ(query[j, i])ᵀ Σ_k r_kj z_k + eps)
    Departs from the source: see `LinearFiSHAttention`; masks of pairs are not supported.

    Args:
        query: (B, H, N, E).
        key: (B, G, L, E).
        value: (B, G, L, E_v).
        head_mix: (H, G), or two matrices with a ReLU between them.
        head_bias: b_1, with two matrices.
        last_bias: b_2, (H,).
        norm_mix: r, (H, G), not negative. None means |p|, for a single matrix.
        noise_scale: s, (G,). None means no noise.
        eps: added to the normaliser.

    For other arguments and errors see `lit_probattn.functional`.

    Returns:
        (B, H, N, E_v).
    """
    check_heads(query, key, value)
    heads, shared = query.shape[1], key.shape[1]
    if value.shape[1] != shared:
        raise ValueError(f"value has {value.shape[1]} heads, expected {shared}, the heads of key")
    mixing = _mixing(head_mix, head_bias, noise_scale, shared, heads)
    if mixing.mixer == "shared":
        raise ValueError(
            "linear FiSH mixes states by one matrix (heads, global heads), or by two; received "
            f"widths {mixing.widths}"
        )
    if norm_mix is None:
        if mixing.mixer == "mlp":
            raise ValueError("norm_mix=None means |p| of a single matrix; set it for two matrices")
        norm_mix = mixing.weights[0].abs()
    if norm_mix.shape != (heads, shared):
        raise ValueError(f"norm_mix has shape {tuple(norm_mix.shape)}, expected {(heads, shared)}")
    form = LinearForm(FeatureMap(), eps=eps)

    def variant(call: HeadCall) -> LinearFiSH:
        noise = None
        if noise_scale is not None:
            noise = ScoreNoise("global", key_or_fresh(call.rng), shared)
        return LinearFiSH(form, mixing, last_bias, norm_mix, noise)

    given = attn_mask, dropout_p, is_causal, None, backend, rng, cu_seqlens, cu_seqlens_k
    return attend_heads(query, key, value, heads, variant, *given, has_scores=False)
