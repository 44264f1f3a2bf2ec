"""Steps of linear FiSH: mixing states, and reading them with queries, causal or not."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lit_probattn.attention.fish.mixing import MixingValues, map_heads
from lit_probattn.attention.linear.chunkwise import causal_product
from lit_probattn.attention.masks import Masks

# Numbers in the states of all positions of one chunk, where every position needs its own mixing.
CHUNK_STATES = {"cpu": 1 << 20, "cuda": 1 << 26}


def mix_states(
    states: Tensor, mixing: MixingValues, last_bias: Tensor | None, noise: Tensor | None
) -> Tensor:
    """Return the local states, cell by cell: (B, G, …, F, E_v) -> (B, H, …, F, E_v).

    Source: FiSH, NeurIPS 2022, appendix A.6 ("sample local KᵀV from the global ones"):
        S_loc = P (S + s ε)        or        W_2 ReLU(W_1 (S + s ε) + b_1) + b_2
    Departs from the source: no code was released; the formulas are ours.

    Args:
        states: S, with any dimensions between heads and cells.
        mixing: weights of the mixing.
        last_bias: b_2, (H,), which no softmax cancels here.
        noise: s ε, (B, G, F, E_v), one draw per sequence for all positions.
    """
    if noise is not None:
        states = states + (noise if states.dim() == 4 else noise[:, :, None])
    first, *rest = mixing.weights
    units = map_heads(first, states)
    trailing = (1,) * (states.dim() - 2)
    for weight, bias in zip(rest, mixing.biases, strict=True):
        units = torch.relu(units if bias is None else units + bias.view(-1, *trailing))
        units = map_heads(weight, units)
    return units if last_bias is None else units + last_bias.view(-1, *trailing)


def key_sums(cols: Tensor, masks: Masks, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return z for each row, (B, G, N or 1, F), and after all keys, (B, G, F)."""
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
    """Read global states: mixed once, or (causal, linear mixing) after reading each of them."""
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


def read_mixed(
    rows: Tensor,
    cols: Tensor,
    value: Tensor,
    masks: Masks,
    shift: Tensor | None,
    before: Tensor | None,
    materialise: bool,
) -> tuple[Tensor, Tensor]:
    """Read states of mixed keys, (B, H or 1, L, F), and local values; `shift` joins the states."""
    cols = cols.expand(-1, value.shape[1], -1, -1)
    if not masks.is_causal:
        after = cols.mT @ value
        after = after if before is None else after + before
        return rows @ (after if shift is None else after + shift), after
    if materialise and before is None:
        allowed = masks.allowed(masks.all_rows, range(masks.num_keys), rows.device)
        assert allowed is not None
        numerator = (rows @ cols.mT).masked_fill(~allowed, 0.0) @ value
        after = cols.mT @ value
    else:
        numerator, after = causal_product(rows, cols, value, state=before)
    return (numerator if shift is None else numerator + rows @ shift), after


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
    """Mix the states of every position on its own.

    Memory is O(N): states of one chunk at a time, computed again in backward.

    Args:
        positions: positions per chunk; None sizes chunks for the device.
    """
    batch, num_global, _, features = cols.shape
    state = value.new_zeros(batch, num_global, features, value.shape[-1])
    state = state if before is None else before
    offset = masks.causal_offset
    if offset > 0:
        state = state + cols[:, :, :offset].mT @ value[:, :, :offset]
        cols, value = cols[:, :, offset:], value[:, :, offset:]
    outputs = []
    if offset < 0:
        outputs.append(rows[:, :, :-offset] @ mix_states(state, mixing, last_bias, noise))
        rows = rows[:, :, -offset:]
    widest = max(num_global, *(w.shape[0] for w in mixing.weights))
    if positions is None:
        budget = CHUNK_STATES["cpu" if rows.device.type == "cpu" else "cuda"]
        positions = max(1, budget // (batch * widest * features * value.shape[-1]))

    def read(state: Tensor, rows: Tensor, cols: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        states = state[:, :, None] + (cols[..., None] * value[..., None, :]).cumsum(2)
        local = mix_states(states, mixing, last_bias, noise)  # (B, H, T, F, E_v)
        return (rows[..., None, :] @ local).squeeze(-2), states[:, :, -1]

    for start in range(0, rows.shape[2], positions):
        part = slice(start, start + positions)
        chunk = (state, rows[:, :, part], cols[:, :, part], value[:, :, part])
        if torch.is_grad_enabled() and rows.shape[2] > positions:
            out, state = checkpoint(read, *chunk, use_reentrant=False, preserve_rng_state=False)
        else:
            out, state = read(*chunk)
        outputs.append(out)
    return torch.cat(outputs, -2), state
