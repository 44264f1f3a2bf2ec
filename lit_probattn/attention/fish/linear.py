"""FiSH on linear attention (LFiSH, GLFiSH): normaliser weights, mixing of states, engines.

With ψ(x) = elu(x) + 1, linear attention uses states S = Σ_n ψ(key_n) value_nᵀ. The layer with
projections, mixing and normaliser weights is in `linear_layer.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from lit_probattn.attention.cache import LinearState, tensor_bytes
from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.engines.kernels import kernel_refusal
from lit_probattn.attention.engines.loop import device_budget, scan_chunks
from lit_probattn.attention.fish.functions import ScoreNoise
from lit_probattn.attention.fish.head_mixing import mix_heads
from lit_probattn.attention.fish.mixing import HeadMixing, MixingValues
from lit_probattn.attention.linear.chunkwise import causal_product
from lit_probattn.attention.linear.functions import (
    LACKS_OF_CHUNKS,
    LACKS_OF_STATE_KERNELS,
    Linear,
    LinearForm,
    StateVariant,
    drop_values,
    fused_features,
    kept_values,
    real_keys,
)
from lit_probattn.attention.masks import Block, Masks
from lit_probattn.attention.numerics import compute_dtype, map_heads
from lit_probattn.attention.variant import Engine


class StateNormalizer(nn.Module):
    """Weights r_kj ≥ 0 of the normaliser z_loc[j] = Σ_k r_kj z_k.

    Source: this package; with free mixing weights p, the mixed normaliser Σ_k p_kj z_k could be
    negative. A linear mixing has r = |p|, which is exact for weights on the simplex; other mixings
    have the softplus of parameters, initially 1/G.

    Args:
        mixing: the mixing of the states.
    """

    def __init__(self, mixing: HeadMixing) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = None
        if mixing.mixer != "linear":
            start = math.log(math.expm1(1.0 / mixing.num_global_heads))
            shape = mixing.num_heads, mixing.num_global_heads
            self.weight = nn.Parameter(torch.full(shape, start))

    def forward(self, first_weight: Tensor) -> Tensor:
        """Return r, (H, G), from the first weight of the mixing."""
        if self.weight is not None:
            return nn.functional.softplus(self.weight.to(first_weight.dtype))
        return first_weight.abs()


# Numbers in the states of all positions of a chunk, if every position is mixed separately.
CHUNK_STATES = {"cpu": 1 << 20, "cuda": 1 << 26}


def mix_states(
    states: Tensor, mixing: MixingValues, last_bias: Tensor | None, noise: Tensor | None
) -> Tensor:
    """Return the local states, mixed elementwise: (B, G, …, F, E_v) -> (B, H, …, F, E_v).

    Source: FiSH, NeurIPS 2022, appendix A.6 ("sample local KᵀV from the global ones"):
        S_loc = P (S + s ε)        or        W_2 ReLU(W_1 (S + s ε) + b_1) + b_2
    Departs from the source: no code was released; the formulas are this package's.

    Args:
        states: S, with any dimensions between heads and elements.
        mixing: mixing weights and biases.
        last_bias: b_2, (H,); there is no softmax that would cancel it.
        noise: s ε, (B, G, F, E_v), one draw per sequence for all positions.
    """
    if noise is not None:
        states = states + (noise if states.dim() == 4 else noise[:, :, None])
    return mix_heads(states.flatten(2, -2), mixing, last_bias).unflatten(2, states.shape[2:-1])


def key_sums(cols: Tensor, masks: Masks, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return z of each row, (B, G, N or 1, F), and after all keys, (B, G, F)."""
    if before is None:
        before = cols.new_zeros(*cols.shape[:2], cols.shape[-1])
    if not masks.is_causal:
        after = before + cols.sum(-2)
        return after[:, :, None], after
    running = torch.cat([before[:, :, None], before[:, :, None] + cols.cumsum(-2)], -2)
    seen = torch.arange(1, masks.num_queries + 1, device=cols.device) + masks.causal_offset
    return running[:, :, seen.clamp_min(0)], running[:, :, -1]


def read_states(
    rows: Tensor,
    cols: Tensor,
    value: Tensor,
    masks: Masks,
    mixing: MixingValues,
    last_bias: Tensor | None,
    noise: Tensor | None,
    before: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Read global states: mix them once, or (causal, linear mixing) after reading each state."""
    if not masks.is_causal:
        states = cols.mT @ value
        states = states if before is None else states + before
        return rows @ mix_states(states, mixing, last_bias, noise), states
    first = mixing.weights[0]
    numerator: Tensor | None = None
    after = []
    for k in range(cols.shape[1]):
        part = slice(k, k + 1)
        earlier = None if before is None else before[:, part]
        read, state = causal_product(rows, cols[:, part], value[:, part], state=earlier)
        after.append(state)
        read = read * first[:, k, None, None]
        numerator = read if numerator is None else numerator + read
    assert numerator is not None
    if noise is not None:
        numerator = numerator + rows @ map_heads(first, noise)
    return numerator, torch.cat(after, 1)


def read_moving_states(
    rows: Tensor,
    cols: Tensor,
    value: Tensor,
    masks: Masks,
    mixing: MixingValues,
    last_bias: Tensor | None,
    noise: Tensor | None,
    before: Tensor | None,
    positions: int | None,
) -> tuple[Tensor, Tensor]:
    """Mix the states of every position separately, in chunks of `positions` (None: by device).

    Memory is O(N): the states of one chunk at a time, recomputed in backward.
    """
    batch, num_global, _, features = cols.shape
    state = value.new_zeros(batch, num_global, features, value.shape[-1])
    state = state if before is None else before
    offset = masks.causal_offset
    if offset > 0:
        state = state + cols[:, :, :offset].mT @ value[:, :, :offset]
        cols, value = cols[:, :, offset:], value[:, :, offset:]
    outputs = [rows.new_empty(*rows.shape[:2], 0, value.shape[-1])]
    if offset < 0:
        outputs.append(rows[:, :, :-offset] @ mix_states(state, mixing, last_bias, noise))
        rows = rows[:, :, -offset:]
    widest = max(num_global, *(w.shape[0] for w in mixing.weights))
    if positions is None:
        numbers = batch * widest * features * value.shape[-1]  # in the states of one position
        positions = max(1, device_budget(CHUNK_STATES, rows.device) // max(1, numbers))

    def read(state: Tensor, rows: Tensor, cols: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        states = state[:, :, None] + (cols[..., None] * value[..., None, :]).cumsum(2)
        local = mix_states(states, mixing, last_bias, noise)  # (B, H, T, F, E_v)
        return (rows[..., None, :] @ local).squeeze(-2), states[:, :, -1]

    first = [state]
    del state  # so that only the recurrence holds the first state, and frees it after its use
    found, after = scan_chunks(read, first.pop(), (rows, cols, value), positions)
    return torch.cat([*outputs, *found], -2), after


class LinearFiSHState(LinearState):
    """States S (`sums`) and key sums z of one layer over all tokens so far.

    It stores G·F·(E_v + 1) numbers per sequence for F features, independent of length, and no
    graph.
    """

    def __init__(self) -> None:
        super().__init__()
        self.key_sums: Tensor | None = None

    def reorder(self, rows: Tensor) -> None:
        """Select rows of the sums."""
        super().reorder(rows)
        if self.key_sums is not None:
            self.key_sums = self.key_sums.index_select(0, rows)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensors."""
        return super().num_bytes + tensor_bytes(self.key_sums)


@dataclass(frozen=True)
class LinearFiSH(StateVariant):
    """Linear attention with H local states that are mixed from G global states.

    Args:
        form: feature map ψ, and the number that is added to the normaliser.
        mixing: P, or the two layers.
        last_bias: bias of the last layer, (H,).
        norm_mix: R, (H, G).
        noise: the draw of the noise.
        state: sums over earlier positions, to which the new positions are added.
    """

    name = "linear_fish"
    title = "linear FiSH"
    kernels = ("linear/linear_fish",)
    state_class = LinearFiSHState
    advice = "use FiSHAttention"

    form: LinearForm
    mixing: MixingValues
    last_bias: Tensor | None
    norm_mix: Tensor
    noise: ScoreNoise | None = None
    state: LinearFiSHState | None = None

    def scores(self, call: HeadCall) -> Tensor:
        """Raise: local heads have states, and a pair has a weight per global head."""
        raise NotImplementedError(
            "linear FiSH mixes states, so its local heads have no attention maps; analyse "
            "FiSHAttention or LinearAttention instead"
        )

    def needs(self) -> dict[str, str]:
        """Return the feature that a nonlinear mixing requires."""
        return {} if self.mixing.is_linear else {"function": f"mixer={self.mixing.mixer}"}


def linear_fish(given: HeadCall, arguments: LinearFiSH, *, materialise: bool = False) -> Tensor:
    """Return linear FiSH attention, (B, H, N, E_v).

    Source: FiSH, NeurIPS 2022, appendix A.6; the normaliser is this package's:
        out[j, i] = ψ(query[j, i])ᵀ S_loc[j] / (ψ(query[j, i])ᵀ z_loc[j] + eps)
        S_k = Σ_n ψ(key[k, n]) value[k, n]ᵀ,   z_k = Σ_n ψ(key[k, n]),   z_loc = R z,  R ≥ 0
    Fully masked rows give zeros. Memory is O(N), causal over chunks, unless `materialise` stores
    the causal states of all positions at once.
    """
    query, key, value, masks, dropout = given.precise().heads
    dtype, form = query.dtype, arguments.form
    noise, state, last_bias = arguments.noise, arguments.state, arguments.last_bias
    rows = form.features.query(query, None)
    cols = real_keys(form.features.key(key, None)[0], masks)
    value = drop_values(value, dropout)
    mixing, norm_mix = arguments.mixing.to(dtype), arguments.norm_mix.to(dtype)
    last_bias = None if last_bias is None else last_bias.to(dtype)
    before = None if state is None else state.sums
    z_before = None if state is None else state.key_sums
    drawn = None if noise is None else state_noise(noise, mixing, cols, value)
    z, z_after = key_sums(cols, masks, z_before)
    if masks.is_causal and (materialise or len(mixing.weights) > 1):
        positions = masks.num_queries if materialise else None
        numerator, after = read_moving_states(
            rows, cols, value, masks, mixing, last_bias, drawn, before, positions
        )
    else:
        numerator, after = read_states(rows, cols, value, masks, mixing, last_bias, drawn, before)
    z_local = map_heads(norm_mix, z)
    if state is not None:
        state.replace(after, None)
        state.key_sums = z_after.detach()
    return normalise(numerator, _dot(rows, z_local), form)


def _dot(rows: Tensor, z: Tensor) -> Tensor:
    """Return rows · z, (B, H, N, 1), for one z or one per row."""
    return rows @ z.mT if z.shape[-2] == 1 else (rows * z).sum(-1, keepdim=True)


def normalise(numerator: Tensor, total: Tensor, form: LinearForm) -> Tensor:
    """Divide by the normaliser; rows whose sum is zero give zeros."""
    empty = total == 0
    return (numerator / (total + form.eps).masked_fill(empty, 1.0)).masked_fill(empty, 0.0)


def linear_fish_triton(given: HeadCall, arguments: LinearFiSH) -> Tensor:
    """Return `linear_fish` for a linear mixing of global keys and values.

    The kernels mix numerators with p and denominators with r while they read states, and divide;
    noise, the same for all positions, is the initial state.
    """
    from lit_probattn.kernels.linear.operators import linear_attention

    form, noise, masks = arguments.form, arguments.noise, given.masks
    dtype = compute_dtype(given.query)
    mixing = arguments.mixing.to(dtype)
    drawn = None
    if noise is not None:
        drawn = state_noise(noise, mixing, given.key[:, :, :1].to(dtype), given.value)
    out, _ = linear_attention(
        **fused_features(given, Linear(form)),
        value=given.value,
        weight=mixing.weights[0],
        norm_weight=arguments.norm_mix.to(dtype),
        state=drawn,
        key_mask=masks.key_mask,
        keep=kept_values(given.value, given.dropout),
        divides=True,
        eps=form.eps,
        is_causal=masks.is_causal,
    )
    return out


def state_noise(noise: ScoreNoise, mixing: MixingValues, cols: Tensor, value: Tensor) -> Tensor:
    """Return s ε of the global states, (B, G, F, E_v), in the dtype of `cols`."""
    assert mixing.noise_scale is not None
    block = Block(range(cols.shape[-1]), range(value.shape[-1]))
    return mixing.noise_scale[:, None, None] * noise.draw(cols, block, cols.shape[1])


_NO_PAIRS = "cannot apply attn_mask, because it forms no pairs (use key_mask, is_causal)"
LinearFiSH.own_engines = {
    "reference": Engine(partial(linear_fish, materialise=True), lacks={"pair mask": _NO_PAIRS}),
    "blockwise": Engine(linear_fish, lacks={**LACKS_OF_CHUNKS, "pair mask": _NO_PAIRS}),
    "triton": Engine(
        linear_fish_triton,
        lacks={
            **LACKS_OF_STATE_KERNELS,
            "pair mask": _NO_PAIRS,
            "function": "cannot mix states through a ReLU ({}), which every position recomputes",
        },
        missing=kernel_refusal,
    ),
}
