"""Scores of FiSH: global maps, their noise, and the mixing into local maps, for any block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lit_probattn.attention.blockwise import Block
from lit_probattn.attention.fish.mixing import MixingValues, NoiseKind, map_heads
from lit_probattn.randomness import RandomKey, normal_noise

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
        rows = range(block.rows.start + self.first_row, block.rows.stop + self.first_row)
        return normal_noise(
            self.key, like.shape[0], num_maps, rows, block.cols, like.device, like.dtype
        )


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


def scale_factors(
    head_dim: int, scale_position: ScalePosition, noise_position: NoisePosition
) -> tuple[float, float, float]:
    """Return the factors on global scores, on local scores and on the noise."""
    scale = head_dim**-0.5
    if scale_position == "after":
        return 1.0, scale, 1.0
    return scale, 1.0, 1.0 if noise_position == "scaled" else scale


def fish_scores(
    query: Tensor,
    key: Tensor,
    *,
    mixing: MixingValues,
    num_heads: int,
    scale_position: ScalePosition,
    noise_position: NoisePosition,
    noise: ScoreNoise | None = None,
) -> Tensor:
    """Return the scores of all local heads, (B, H, N, L).

    Source: FiSH, NeurIPS 2022, Eq. (8)-(10): G_k = Q_k K_kᵀ, local mixing, 1/√E.
    Departs from the source: 1/√E after the mixing (the language model) or before it; noise on raw
    or on scaled scores. Noise always comes before mixing and mask.

    Args:
        query: (B, G, N, E).
        key: (B, G, L, E).
        mixing: weights and noise scales.
        num_heads: H.
        scale_position: where 1/√E enters.
        noise_position: `raw`: s_k on the scale of Q·K; `scaled`: on that of Q·K/√E.
        noise: the draw, or None.
    """
    on_global, on_local, on_noise = scale_factors(query.shape[-1], scale_position, noise_position)
    block = Block(range(query.shape[2]), range(key.shape[2]))
    global_scores = query @ key.mT * on_global
    local = local_scores(global_scores, mixing.scaled(1.0, on_noise), noise, block) * on_local
    return local.expand(-1, num_heads, -1, -1)


def concatenate_heads(query: Tensor, key: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and one shared key whose plain products are the hard local scores.

    Source: FiSH specification, equivalence 1: with keys [K_1 | … | K_G] and queries
    [p_1j Q_1 | … | p_Gj Q_G], query_j · key = Σ_k p_kj Q_k · K_k. Any fused attention then serves
    Hard FiSH, with an explicit scale 1/√E (its own default would be 1/√(G E)).

    Args:
        query: (B, G, N, E).
        key: (B, G, L, E).
        weight: p, (H, G).

    Returns:
        query (B, H, N, G·E) and key (B, 1, L, G·E).
    """
    per_head = query.transpose(1, 2)[:, None] * weight[None, :, None, :, None]
    return per_head.flatten(3).to(query.dtype), key.transpose(1, 2).flatten(2)[:, None]
