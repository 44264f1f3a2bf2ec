"""FiSH attention: global score maps, their noise, the mixing; its backends as pure functions.

Mixings are in `mixing.py`; the layer that owns projections, mixing weights and noise scales is in
`layer.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_probattn.attention.backends import Call, draw_words, kernel_refusal, pair_arguments
from lit_probattn.attention.blockwise import Axis, Block, blockwise_attention
from lit_probattn.attention.draws import normal_noise
from lit_probattn.attention.fish.mixing import HeadMixing, MixingValues, NoiseKind, map_heads
from lit_probattn.attention.functional import Heads, compute_dtype, reference_output
from lit_probattn.attention.masks import Masks, span
from lit_probattn.attention.rowpass.tiled import draws_noise, tiled_attention
from lit_probattn.attention.sdpa import fused_attention
from lit_probattn.base.memory import device_type
from lit_probattn.kernels.cpu.tiles import MOST
from lit_probattn.randomness import STREAM_NOISE, AttentionDropout, RandomKey

ScalePosition = Literal["before", "after"]

NoisePosition = Literal["raw", "scaled"]


@dataclass(frozen=True)
class ScoreNoise:
    """One draw of the score noise ε, which every backend can read block by block.

    Args:
        kind: `global` (one map per global head, shared by the local heads), `local` (one per
            local head, or per unit of the first mixing layer) or `local_global`.
        key: names the draw.
        num_maps: maps of the local kinds.
        first_row: position of query 0 among all tokens, so that a cached step sees the noise of
            the full pass.
    """

    kind: NoiseKind
    key: RandomKey
    num_maps: int
    first_row: int = 0

    def draw(self, like: Tensor, block: Block, num_maps: int) -> Tensor:
        """Return (B, num_maps, n, l) of a block, in the dtype of `like`."""
        rows = span(block.rows.start + self.first_row, block.rows.stop + self.first_row)
        return normal_noise(
            self.key, like.shape[0], num_maps, rows, block.cols, like.device, like.dtype
        )

    def words(self, like: Tensor) -> Tensor:
        """Return what a kernel draws the noise of a batch from, (2 + B,) int64."""
        return draw_words(self.key, STREAM_NOISE, like)


@dataclass(frozen=True)
class FiSHArguments:
    """What FiSH needs besides heads and masks.

    Args:
        mixing: weights and noise scales.
        num_heads: H.
        scale_position: where 1/√E enters, before or after the mixing.
        noise_position: `raw`: s_k on the scale of Q·K; `scaled`: on that of Q·K/√E.
        noise: the draw, or None.
        scale_ratio: factor on the products, in units of 1/√E.
    """

    mixing: MixingValues
    num_heads: int
    scale_position: ScalePosition
    noise_position: NoisePosition
    noise: ScoreNoise | None = None
    scale_ratio: float = 1.0

    def factors(self, head_dim: int) -> tuple[float, float, float]:
        """Return the factors on global scores, on local scores and on the noise."""
        scale = head_dim**-0.5 * self.scale_ratio
        if self.scale_position == "after":
            return 1.0, scale, 1.0
        return scale, 1.0, 1.0 if self.noise_position == "scaled" else scale


def local_scores(
    global_scores: Tensor, mixing: MixingValues, noise: ScoreNoise | None, block: Block
) -> Tensor:
    """Return the local scores of a block from its global ones, before scale, bias and mask.

    Source: FiSH, NeurIPS 2022, Eq. (8)-(10), section 2.4; g̃_k = g_k + s_k ε_k:
        linear, shared   a_j = Σ_k p_kj g̃_k
        mlp              a = W_2 ReLU(W_1 g̃ + b_1)
        relu_sum         a = W_2 u,  u_j = Σ_k ReLU(p_kj g̃_k)
    Departs from the source: `local` noise (Eq. (8) as printed) and `local_global` noise enter the
    first layer as one normal per unit with the standard deviation of the sum over k,
    c_j = Σ_k p_kj s_k or √(Σ_k p_kj² s_k²): the same distribution with fewer draws. It is Eq. (8),
    which has the mean of the admixture in Eq. (7) but is not a draw from it.

    Args:
        global_scores: g, (B, G, n, l).
        mixing: weights and noise scales.
        noise: the draw, or None.
        block: which queries and keys these are.

    Returns:
        (B, H, n, l); one map for all heads, (B, 1, n, l), if the mixing is shared and nothing
        tells the heads apart.
    """
    kind = "none" if noise is None else noise.kind
    if noise is not None and kind == "global":
        assert mixing.noise_scale is not None
        draw = noise.draw(global_scores, block, global_scores.shape[1])
        global_scores = torch.addcmul(global_scores, mixing.noise_scale[:, None, None], draw)
    first, *rest = mixing.weights
    if mixing.mixer == "relu_sum":
        units = _relu_sum(global_scores, mixing, noise, block)
    else:
        units = map_heads(first, global_scores)
        if noise is not None and kind != "global":
            assert mixing.noise_scale is not None
            draw = noise.draw(global_scores, block, noise.num_maps)
            deviation = local_deviation(first, mixing.noise_scale, kind)
            units = torch.addcmul(units, deviation[:, None, None], draw)
    for weight, bias in zip(rest, mixing.biases, strict=True):
        if mixing.mixer == "mlp":
            units = torch.relu(units if bias is None else units + bias[:, None, None])
        units = map_heads(weight, units)
    return units


def local_deviation(weight: Tensor, noise_scale: Tensor, kind: NoiseKind) -> Tensor:
    """Return the standard deviation of the local noise of every unit of the first layer, (H,)."""
    terms = weight * noise_scale
    # vector_norm has a zero gradient, not NaN, for units whose weights are all zero.
    return terms.sum(-1) if kind == "local" else torch.linalg.vector_norm(terms, dim=-1)


def _relu_sum(
    global_scores: Tensor, mixing: MixingValues, noise: ScoreNoise | None, block: Block
) -> Tensor:
    """Return u_j = Σ_k ReLU(p_kj g̃_k), (B, H, n, l), by matrix products.

    ReLU(p x) = ReLU(p) ReLU(x) + ReLU(-p) ReLU(-x).
    """
    weight = mixing.weights[0]
    if noise is None or noise.kind == "global":
        positive = map_heads(torch.relu(weight), torch.relu(global_scores))
        return positive + map_heads(torch.relu(-weight), torch.relu(-global_scores))
    assert mixing.noise_scale is not None
    batch, num_global, rows, cols = global_scores.shape
    units = weight.shape[0]
    count = units if noise.kind == "local" else units * num_global
    draw = noise.draw(global_scores, block, count).view(batch, units, -1, rows, cols)
    noisy = torch.addcmul(global_scores[:, None], mixing.noise_scale[:, None, None], draw)
    signed = torch.relu(noisy * weight.sign()[:, :, None, None])  # (B, H, G, n, l)
    return (weight.abs()[:, None] @ signed.flatten(3)).view(batch, units, rows, cols)


def fish_scores(query: Tensor, key: Tensor, arguments: FiSHArguments) -> Tensor:
    """Return the scores of all local heads, (B, H, N, L).

    Source: FiSH, NeurIPS 2022, Eq. (8)-(10): G_k = Q_k K_kᵀ, local mixing, 1/√E.
    Departs from the source: 1/√E after the mixing (the language model) or before it; noise on raw
    or on scaled scores. Noise always comes before mixing and mask.

    Queries and keys are (B, G, N, E) and (B, G, L, E).
    """
    on_global, on_local, on_noise = arguments.factors(query.shape[-1])
    block = Block(span(0, query.shape[2]), span(0, key.shape[2]))
    global_scores = query @ key.mT * on_global
    mixing = arguments.mixing.scaled(1.0, on_noise)
    local = local_scores(global_scores, mixing, arguments.noise, block) * on_local
    return local.expand(-1, arguments.num_heads, -1, -1)


def concatenate_heads(query: Tensor, key: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and one shared key whose plain products are the hard local scores.

    With keys [K_1 | … | K_G] and queries [p_1j Q_1 | … | p_Gj Q_G], query_j · key =
    Σ_k p_kj Q_k · K_k. Any fused attention then serves Hard FiSH, with an explicit scale 1/√E (its
    own default would be 1/√(G E)).

    Args:
        query: (B, G, N, E).
        key: (B, G, L, E).
        weight: p, (H, G).

    Returns:
        query (B, H, N, G·E) and key (B, 1, L, G·E).
    """
    per_head = query.transpose(1, 2)[:, None] * weight[None, :, None, :, None]
    return per_head.flatten(3).to(query.dtype), key.transpose(1, 2).flatten(2)[:, None]


# Widest value head of the fused CUDA kernels: wide value heads of MiSH are split to fit.
_WIDEST_VALUE = 256


def fish_reference(given: Heads, arguments: FiSHArguments) -> Tensor:
    """Return softmax(local scores) @ value, (B, H, N, E_v), in at least float32."""
    query, key, value, masks, dropout = given.precise()
    arguments = replace(arguments, mixing=arguments.mixing.to(query.dtype))
    scores = fish_scores(query, key, arguments)
    return reference_output(scores, value, masks, dropout)


def fish_sdpa(given: Heads, arguments: FiSHArguments) -> Tensor:
    """Return Hard FiSH or Hard MiSH by PyTorch's fused attention, O(N) memory.

    Exact by `concatenate_heads`. Hard MiSH has one map for all heads: one softmax serves the
    values of all of them, side by side.
    """
    query, key, value, masks, dropout = given
    scale = query.shape[-1] ** -0.5 * arguments.scale_ratio
    weight = arguments.mixing.weights[0].to(compute_dtype(query))
    wide = wide_heads(value, arguments.mixing, arguments.noise, masks, dropout)
    heads = arguments.num_heads // wide
    value = merge_values(value, wide)
    query, key = concatenate_heads(query, key, weight)
    width = max(query.shape[-1], value.shape[-1])
    key = F.pad(key, (0, width - key.shape[-1])).expand(-1, heads, -1, -1)
    query = F.pad(query, (0, width - query.shape[-1])).expand(-1, heads, -1, -1)
    out = fused_attention(query, key, value, masks=masks, scale=scale)
    return split_values(out, wide)


def fish_blockwise(given: Heads, arguments: FiSHArguments, native: bool = False) -> Tensor:
    """Return every variant block by block, O(N · block) memory; noise is drawn again in backward.

    Scores of all global heads of a block are made once and mixed; 1/√E is folded into the queries
    or into the last mixing weight. The rows of a block are computed in C if `native`.
    """
    query, key, value, masks, dropout = given.precise()
    on_global, on_local, on_noise = arguments.factors(query.shape[-1])
    mixing, noise = arguments.mixing.to(query.dtype).scaled(on_local, on_noise), arguments.noise
    if noise is None:
        mixing = replace(mixing, noise_scale=None)
    wide = wide_heads(value, mixing, noise, masks, dropout)
    heads = arguments.num_heads // wide
    value = merge_values(value, wide)
    tensors = mixing.tensors()

    def scores(block: Block, rows: Tensor, cols: Tensor, *parameters: Tensor) -> Tensor:
        local = local_scores(rows @ cols.mT, mixing.with_tensors(parameters), noise, block)
        return local.expand(-1, heads, -1, -1)

    shared: list[Axis] = ["shared"] * len(tensors)
    axes: list[Axis] = ["row", "col", *shared]
    inputs = (query * on_global, key, *tensors)
    out = blockwise_attention(scores, inputs, axes, value, masks, dropout, heads, native)
    return split_values(out, wide)


def fish_native(given: Heads, arguments: FiSHArguments) -> Tensor:
    """Return the same as `fish_blockwise` by tiles in C, where `mixes_by_tiles`; else its rows."""
    noise = arguments.noise
    query, key, value, masks, dropout = given.precise()
    drawn = noise is None or (query.dtype == torch.float32 and draws_noise())
    if not mixes_by_tiles(arguments.mixing) or not drawn:
        return fish_blockwise(given, arguments, native=True)
    on_global, on_local, on_noise = arguments.factors(query.shape[-1])
    mixing = arguments.mixing.to(query.dtype).scaled(on_local, on_noise)
    first, *rest = mixing.weights
    per_unit = noise is not None and noise.kind != "global"
    scale = None if noise is None else mixing.noise_scale
    if noise is not None and scale is not None and per_unit:
        scale = local_deviation(first, scale, noise.kind)
    layers = per_unit or bool(rest)
    if noise is not None and rest and not per_unit:  # noise of the maps, through two layers
        return fish_blockwise(given, arguments, native=True)
    return tiled_attention(
        *(query, key[:, None], value, masks, dropout),
        reduction="layers" if layers else "sum",
        heads=arguments.num_heads,
        components=1 if layers else query.shape[1],
        coef=None if layers else first,
        noise_scale=scale,
        noise=None if noise is None else (noise.key, noise.first_row),
        layers=(first, mixing.biases[0] if rest else None, *rest) if layers else (),
        scale=on_global,
    )


def mixes_by_tiles(mixing: MixingValues) -> bool:
    """Whether the C library mixes maps, by one layer or two of sizes that it holds."""
    linear = mixing.mixer == "linear" or (mixing.mixer == "mlp" and len(mixing.weights) == 2)
    return linear and max(size for weight in mixing.weights for size in weight.shape) <= MOST


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
    if widest is None and device_type(value.device) == "cpu":
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


# Score tiles of all global maps, and all hidden units, are written out in a program.
MOST_GLOBAL, MOST_UNITS = 16, 32

# Entries of one position in all global heads: queries of a tile stay in shared memory.
MOST_ENTRIES = 1024

_WIDEST_IN_KERNEL = 128


def fish_refusal(mixing: HeadMixing, call: Call, *head_dims: int) -> str | None:
    """Say why the fused kernels cannot serve a call ("cannot …"), or None if they can."""
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
    family = "fish/gfish" if len(widths) == 3 else "fish/fish"
    return kernel_refusal(family, replace(call, bias_needs_grad=False), *head_dims)


def fish_triton(given: Heads, arguments: FiSHArguments) -> Tensor:
    """Return FiSH attention by fused kernels, (B, H, N, E_v); O(N) memory, forward and backward.

    Mixing weights and noise scales are float32 in the kernels, whatever the dtype of the queries.
    1/√E enters the global scores or the last weight.

    Raises:
        NotImplementedError: a bias that needs a gradient is broadcast over queries or keys.
    """
    from lit_probattn.kernels.fish.operators import fish_attention

    query, key, value, masks, dropout = given
    _check_bias(masks)
    on_global, on_local, on_noise = arguments.factors(query.shape[-1])
    mixing = arguments.mixing.to(compute_dtype(query)).scaled(on_local, on_noise)
    noise = arguments.noise
    wide = wide_heads(value, mixing, noise, masks, dropout, _WIDEST_IN_KERNEL)
    heads = arguments.num_heads // wide
    first, *rest = mixing.weights
    scale = None
    if noise is not None:
        assert mixing.noise_scale is not None
        scale = mixing.noise_scale
        if noise.kind != "global":
            scale = local_deviation(first, scale, noise.kind)
            scale = scale.expand(heads) if mixing.mixer == "shared" else scale
    out = fish_attention(
        query,
        key,
        merge_values(value, wide),
        first=first.expand(heads, -1) if mixing.mixer == "shared" else first,
        first_bias=mixing.biases[0] if rest else None,
        second=rest[0] if rest else None,
        noise_scale=scale,
        noise_per_head=noise is not None and noise.kind != "global",
        noise_draw=None if noise is None else noise.words(query),
        first_row=0 if noise is None else noise.first_row,
        on_global=on_global,
        **pair_arguments(given),
    )
    return split_values(out, wide)


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
