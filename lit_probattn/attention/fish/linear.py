"""FiSH on linear attention (LFiSH, GLFiSH): its backends as pure functions.

With ψ(x) = elu(x) + 1 linear attention reads states S = Σ_n ψ(key_n) value_nᵀ. The layer that owns
projections, mixing and normaliser weights is in `linear_fish_layer.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lit_probattn.attention.blockwise import Block
from lit_probattn.attention.fish.linear_steps import (
    key_sums,
    read_mixed,
    read_moving_states,
    read_states,
)
from lit_probattn.attention.fish.mixing import MixingValues, map_heads
from lit_probattn.attention.fish.scores import ScoreNoise, concatenate_heads
from lit_probattn.attention.functional import compute_dtype
from lit_probattn.attention.linear.features import FeatureMap
from lit_probattn.attention.linear.functions import drop_values
from lit_probattn.attention.linear.state import LinearState
from lit_probattn.attention.masks import Masks
from lit_probattn.randomness import AttentionDropout

LFiSHMode = Literal["kv_global", "key_global", "score_global"]


@dataclass(frozen=True)
class LinearFiSHForm:
    """The switches of linear FiSH.

    Args:
        mode: what is global; see `LinearFiSHAttention`.
        features: feature map ψ.
        divides: divide by the mixed normaliser, instead of a root mean square norm per head.
        eps: added to the normaliser, or to the mean square.
        output_factor: factor on the output.
    """

    mode: LFiSHMode
    features: FeatureMap
    divides: bool
    eps: float
    output_factor: float


class LinearFiSHState(LinearState):
    """States S (`sums`) and key sums z of one layer over the tokens seen so far.

    Numbers per sequence, for F features, whatever the length: kv_global G·F·(E_v + 1), key_global
    H·F·E_v + G·F, score_global H·G·F·E_v + G·F. No graph is kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.key_sums: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        z = self.key_sums
        return super().num_bytes + (0 if z is None else z.numel() * z.element_size())


def _linear_fish(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    masks: Masks,
    dropout: AttentionDropout | None,
    form: LinearFiSHForm,
    mixing: MixingValues,
    last_bias: Tensor | None,
    norm_mix: Tensor,
    noise: ScoreNoise | None = None,
    state: LinearFiSHState | None = None,
    materialise: bool,
) -> Tensor:
    """Return linear FiSH attention, (B, H, N, E_v).

    Source: FiSH, NeurIPS 2022, appendix A.6; the normaliser is ours:
        out[j, i] = ψ(query[j, i])ᵀ S_loc[j] / (ψ(query[j, i])ᵀ z_loc[j] + eps)
        S_k = Σ_n ψ(key[k, n]) value[k, n]ᵀ,   z_k = Σ_n ψ(key[k, n]),   z_loc = R z,  R ≥ 0
    for mode kv_global; see `LinearFiSHAttention` for the others. Rows that see nothing give zeros.

    Args:
        query: (B, H, N, E); (B, G, N, E) for score_global.
        key: (B, G, L, E).
        value: (B, G, L, E_v) for kv_global, else (B, H, L, E_v).
        masks: key mask and causality.
        dropout: drops whole values.
        form: the switches.
        mixing: P, or the two layers.
        last_bias: bias of the last layer, (H,).
        norm_mix: R, (H, G).
        noise: the draw, or None.
        state: sums over earlier positions; the new ones are added to it.
        materialise: make causal states of all positions, or pairs, at once.
    """
    dtype = compute_dtype(query)
    rows = form.features.query(query.to(dtype), None)
    cols = form.features.key(key.to(dtype), None, None)
    if masks.key_mask is not None:
        cols = cols.masked_fill(~masks.key_mask[:, None, :, None], 0.0)
    value = drop_values(value.to(dtype), dropout)
    mixing, norm_mix = mixing.to(dtype), norm_mix.to(dtype)
    last_bias = None if last_bias is None else last_bias.to(dtype)
    before = None if state is None else state.sums
    z_before = None if state is None else state.key_sums
    drawn: Tensor | None = None
    if noise is not None:
        assert mixing.noise_scale is not None
        block = Block(range(cols.shape[-1]), range(value.shape[-1]))
        drawn = mixing.noise_scale[:, None, None] * noise.draw(cols, block, cols.shape[1])
    z, z_after = key_sums(cols, masks, z_before)
    if form.mode == "kv_global" and masks.is_causal and (materialise or len(mixing.weights) > 1):
        positions = masks.num_queries if materialise else None
        numerator, after = read_moving_states(
            rows, cols, value, masks, mixing, last_bias, drawn, before, positions
        )
    elif form.mode == "kv_global":
        numerator, after = read_states(rows, cols, value, masks, mixing, last_bias, drawn, before)
    else:
        first = mixing.weights[0]
        if form.mode == "key_global":
            num_rows, num_cols = rows, map_heads(first, cols)
            shift = None if drawn is None else map_heads(first, drawn)
        else:
            num_rows, num_cols = concatenate_heads(rows, cols, first)
            shift = None if drawn is None else drawn.flatten(1, 2)[:, None]
        numerator, after = read_mixed(num_rows, num_cols, value, masks, shift, before, materialise)
    if form.mode == "score_global":
        rows, z_local = concatenate_heads(rows, z, norm_mix)
    else:
        z_local = map_heads(norm_mix, z)
    if state is not None:
        state.replace(after, None)
        state.key_sums = z_after.detach()
    return normalise(numerator, _dot(rows, z_local), form)


def linear_fish_reference(
    query: Tensor, key: Tensor, value: Tensor, *, masks: Masks, **arguments: Any
) -> Tensor:
    """Return `_linear_fish` by the equation: causal states of all positions at once."""
    return _linear_fish(query, key, value, masks=masks, materialise=True, **arguments)


def linear_fish_blockwise(
    query: Tensor, key: Tensor, value: Tensor, *, masks: Masks, **arguments: Any
) -> Tensor:
    """Return the same with O(N) memory; causal over chunks."""
    return _linear_fish(query, key, value, masks=masks, materialise=False, **arguments)


def _dot(rows: Tensor, z: Tensor) -> Tensor:
    """Return rows · z, (B, H, N, 1), for one z or one per row."""
    return rows @ z.mT if z.shape[-2] == 1 else (rows * z).sum(-1, keepdim=True)


def normalise(numerator: Tensor, total: Tensor, form: LinearFiSHForm) -> Tensor:
    """Divide by the normaliser, or by the root mean square of each head's output."""
    empty = total == 0
    if form.divides:
        out = numerator / (total + form.eps)
    else:
        out = numerator * torch.rsqrt(numerator.square().mean(-1, keepdim=True) + form.eps)
    return out.masked_fill(empty, 0.0) * form.output_factor
