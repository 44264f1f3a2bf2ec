"""FiSH attention: H local heads mixed from G global score maps; its backends as pure functions.

Scores are in `fish_scores.py`; the layer that owns projections, mixing weights and noise scales is
in `fish_layer.py`.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from lit_probattn.attention.blockwise import Axis, Block, blockwise_attention
from lit_probattn.attention.fish.mixing import MixingValues
from lit_probattn.attention.fish.scores import (
    NoisePosition,
    ScalePosition,
    ScoreNoise,
    concatenate_heads,
    fish_scores,
    local_scores,
    scale_factors,
)
from lit_probattn.attention.functional import compute_dtype
from lit_probattn.attention.layer import reference_output
from lit_probattn.attention.masks import Masks
from lit_probattn.attention.sdpa import fused_attention
from lit_probattn.randomness import AttentionDropout

# Widest value head of the fused CUDA kernels: wide value heads of MiSH are split to fit.
_WIDEST_VALUE = 256


def fish_reference(
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
    """Return softmax(local scores) @ value, (B, H, N, E_v), in at least float32.

    `value` is (B, H, L, E_v); the other arguments are those of `fish_scores`.
    """
    dtype = compute_dtype(query)
    scores = fish_scores(
        query.to(dtype),
        key.to(dtype),
        mixing=mixing.to(dtype),
        num_heads=num_heads,
        scale_position=scale_position,
        noise_position=noise_position,
        noise=noise,
    )
    return reference_output(scores, value, masks, dropout)


def fish_sdpa(
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
    """Return Hard FiSH or Hard MiSH through PyTorch's fused attention, O(N) memory.

    Exact by `concatenate_heads`. Hard MiSH has one map for all heads: one softmax serves the
    values of all of them, side by side.
    """
    scale = query.shape[-1] ** -0.5
    weight = mixing.weights[0].to(compute_dtype(query))
    wide = wide_heads(value, mixing, noise, masks, dropout)
    heads = num_heads // wide
    value = merge_values(value, wide)
    query, key = concatenate_heads(query, key, weight)
    width = max(query.shape[-1], value.shape[-1])
    key = F.pad(key, (0, width - key.shape[-1])).expand(-1, heads, -1, -1)
    query = F.pad(query, (0, width - query.shape[-1])).expand(-1, heads, -1, -1)
    out = fused_attention(query, key, value, masks=masks, scale=scale)
    return split_values(out, wide)


def fish_blockwise(
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
    """Return every variant block by block, O(N · block) memory; noise is drawn again in backward.

    Scores of all global heads of a block are made once and mixed; 1/√E is folded into the queries
    or into the last mixing weight.
    """
    dtype = compute_dtype(query)
    on_global, on_local, on_noise = scale_factors(query.shape[-1], scale_position, noise_position)
    mixing = mixing.to(dtype).scaled(on_local, on_noise)
    if noise is None:
        mixing = MixingValues(mixing.mixer, mixing.weights, mixing.biases, None)
    wide = wide_heads(value, mixing, noise, masks, dropout)
    heads = num_heads // wide
    value = merge_values(value.to(dtype), wide)
    tensors = mixing.tensors()

    def scores(block: Block, rows: Tensor, cols: Tensor, *parameters: Tensor) -> Tensor:
        local = local_scores(rows @ cols.mT, mixing.with_tensors(parameters), noise, block)
        return local.expand(-1, heads, -1, -1)

    shared: list[Axis] = ["shared"] * len(tensors)
    out, _ = blockwise_attention(
        scores,
        (query.to(dtype) * on_global, key.to(dtype), *tensors),
        ("row", "col", *shared),
        value,
        num_heads=heads,
        masks=masks,
        dropout=dropout,
    )
    return split_values(out, wide)


def wide_heads(
    value: Tensor,
    mixing: MixingValues,
    noise: ScoreNoise | None,
    masks: Masks,
    dropout: AttentionDropout | None,
    widest: int | None = None,
) -> int:
    """Return how many local heads may share one map and one softmax: 1 unless all are alike.

    Their values side by side are at most `widest` wide; None means what PyTorch's kernels take.
    """
    own_maps = mixing.mixer != "shared" or dropout is not None
    own_maps = own_maps or (noise is not None and noise.kind != "global")
    for pairs in (masks.bias, masks.attn_mask):
        own_maps = own_maps or (pairs is not None and pairs.shape[1] > 1)
    if own_maps:
        return 1
    heads, head_dim = value.shape[1], value.shape[3]
    if widest is None and value.device.type == "cpu":
        return heads
    widest = _WIDEST_VALUE if widest is None else widest
    fitting = [g for g in range(1, heads + 1) if heads % g == 0 and g * head_dim <= widest]
    return fitting[-1] if fitting else 1


def merge_values(value: Tensor, wide: int) -> Tensor:
    """(B, H, L, E_v) -> (B, H/wide, L, wide·E_v)."""
    if wide == 1:
        return value
    return value.unflatten(1, (-1, wide)).transpose(2, 3).flatten(3)


def split_values(out: Tensor, wide: int) -> Tensor:
    """(B, H/wide, N, wide·E_v) -> (B, H, N, E_v)."""
    if wide == 1:
        return out
    return out.unflatten(-1, (wide, -1)).transpose(2, 3).flatten(1, 2)
