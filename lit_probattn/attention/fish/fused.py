"""From FiSH layers to the fused kernels, which are imported only when they are called."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from lit_probattn.attention.backends import Call
from lit_probattn.attention.fish.functions import merge_values, split_values, wide_heads
from lit_probattn.attention.fish.mixing import HeadMixing, MixingValues
from lit_probattn.attention.fish.scores import (
    NoisePosition,
    ScalePosition,
    ScoreNoise,
    local_deviation,
    scale_factors,
)
from lit_probattn.attention.functional import compute_dtype
from lit_probattn.attention.fused import kernel_refusal, pair_arguments
from lit_probattn.attention.masks import Masks
from lit_probattn.randomness import STREAM_NOISE, AttentionDropout

# Score tiles of all global maps, and all hidden units, are written out in a program.
MOST_GLOBAL, MOST_UNITS = 16, 32
# Entries of one position in all global heads: queries of a tile stay in shared memory.
MOST_ENTRIES = 1024
_WIDEST_VALUE = 128


def fish_refusal(mixing: HeadMixing, call: Call, *head_dims: int) -> str | None:
    """Say why the fused kernels cannot serve a call ("cannot …"), or None if they can.

    Args:
        mixing: the layer's mixing.
        call: the call.
        head_dims: sizes of query and value heads.
    """
    widths = mixing.widths
    if mixing.mixer == "relu_sum":
        return "cannot mix scores as section 2.4 writes it (mixer=relu_sum); mixer=mlp it can"
    if len(widths) > 3:
        return f"cannot mix scores through more than two layers (widths {widths})"
    if widths[0] > MOST_GLOBAL:
        return f"cannot hold {widths[0]} global maps: at most {MOST_GLOBAL}"
    if widths[0] * head_dims[0] > MOST_ENTRIES:
        return (
            f"cannot hold {widths[0]} global maps of heads of {head_dims[0]} entries: at most "
            f"{MOST_ENTRIES} together"
        )
    if len(widths) == 3 and widths[1] > MOST_UNITS:
        return f"cannot hold {widths[1]} hidden units: at most {MOST_UNITS}"
    family = "gfish" if len(widths) == 3 else "fish"
    return kernel_refusal(family, replace(call, bias_needs_grad=False), *head_dims)


def fish_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    masks: Masks,
    dropout: AttentionDropout | None,
    mixing: MixingValues,
    num_heads: int,
    scale_position: ScalePosition,
    noise_position: NoisePosition,
    noise: ScoreNoise | None = None,
) -> Tensor:
    """Return FiSH attention by fused kernels, (B, H, N, E_v); O(N) memory, forward and backward.

    The arguments are those of `fish_reference`. Mixing weights and noise scales are float32 in the
    kernels, whatever the dtype of `query`. 1/√E enters the global scores or the last weight.

    Raises:
        NotImplementedError: a bias that wants a gradient is broadcast over queries or keys.
    """
    from lit_probattn.kernels.fish.attention import fish_attention

    _check_bias(masks)
    on_global, on_local, on_noise = scale_factors(query.shape[-1], scale_position, noise_position)
    mixing = mixing.to(compute_dtype(query)).scaled(on_local, on_noise)
    wide = wide_heads(value, mixing, noise, masks, dropout, _WIDEST_VALUE)
    heads = num_heads // wide
    first, *rest = mixing.weights
    scale = None
    if noise is not None:
        assert mixing.noise_scale is not None
        scale = mixing.noise_scale
        if noise.kind != "global":
            scale = local_deviation(first, scale, noise.kind)
            scale = scale.expand(heads) if mixing.mixer == "shared" else scale
    call = pair_arguments(masks, dropout, query)
    out = fish_attention(
        query,
        key,
        merge_values(value, wide),
        first=first.expand(heads, -1) if mixing.mixer == "shared" else first,
        first_bias=mixing.biases[0] if rest else None,
        second=rest[0] if rest else None,
        noise_scale=scale,
        noise_per_head=noise is not None and noise.kind != "global",
        noise_draw=None if noise is None else noise_words(noise, query),
        first_row=0 if noise is None else noise.first_row,
        on_global=on_global,
        **call,
    )
    return split_values(out, wide)


def noise_words(noise: ScoreNoise, like: Tensor) -> Tensor:
    """Return what a kernel draws the noise of a batch from, (2 + B,) int64."""
    from lit_probattn.kernels.runtime import draw_tensor

    samples = noise.key.samples(like.shape[0], like.device)
    return draw_tensor(noise.key.philox_key(STREAM_NOISE), samples)


def _check_bias(masks: Masks) -> None:
    bias = masks.bias
    if bias is None or not bias.requires_grad:
        return
    if bias.shape[2:] != (masks.num_queries, masks.num_keys):
        raise NotImplementedError(
            f"fish: backend 'triton' cannot give a gradient to a bias of shape "
            f"{tuple(bias.shape)}, broadcast over queries or keys: expected (…, "
            f"{masks.num_queries}, {masks.num_keys}); expand it, or use backend 'blockwise'"
        )
