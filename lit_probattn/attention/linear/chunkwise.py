"""Causal linear attention over chunks: Y_i = Σ_{j ≤ i} (F_i · f_j) v_j in O(N) memory.

Positions are cut into chunks of length T. Inside a chunk the pairs are formed; across chunks only
states S = Σ f_jᵀ v_j (F x E) are passed on:

    Y_c = F_c S_c + tril(F_c f_cᵀ) v_c,        S_{c+1} = S_c + f_cᵀ v_c

All chunks of a span are computed at once (their states are a running sum of the chunk sums), and a
loop goes over spans, sized so that the pairs in flight stay small. Backward is written out: a
forward sweep with S, and a reverse sweep with T = Σ F_iᵀ dY_i:

    dF_c = dY_c S_cᵀ + tril(dY_c v_cᵀ) f_c
    df_c = v_c T_cᵀ + tril(dY_c v_cᵀ)ᵀ F_c,    dv_c = f_c T_c + tril(F_c f_cᵀ)ᵀ dY_c

No state is saved between forward and backward: both sweeps add them up again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lit_probattn.attention.engines.loop import block_ranges, device_budget
from lit_probattn.base.graphs import is_symbol, once_differentiable

# Pairs that one span may hold, all heads together: small enough for the cache of a CPU core.
SPAN_PAIRS = {"cpu": 1 << 19, "cuda": 1 << 26}


def chunk_length(num_features: int) -> int:
    """Return T: work per token is T (F + E) + 2 F E, least near T = F; at least 32."""
    return min(256, max(32, 1 << (num_features - 1).bit_length()))


def causal_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    state: Tensor | None = None,
    chunk: int | None = None,
    span: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return Σ_{j ≤ i} (query_i · key_j) value_j + query_i · state, and the state after it.

    Causality is aligned bottom-right: with N queries and L keys, query i sees keys j ≤ i + L − N.

    Args:
        query: features F_i, (B, H, N, F), float32 or float64.
        key: features f_j, (B, H_kv, L, F), H_kv a divisor of H.
        value: (B, H_kv, L, E).
        state: Σ f_jᵀ v_j of earlier positions, (B, H_kv, F, E). None means none.
        chunk: positions per chunk; None chooses by F.
        span: positions per span; None sizes spans for the device.

    Returns:
        (B, H, N, E), and the state with all L keys in it, (B, H_kv, F, E).
    """
    batch, heads, num_queries, features = query.shape
    kv_heads, num_keys = key.shape[1], key.shape[2]
    offset = num_keys - num_queries
    if state is None:
        state = value.new_zeros(batch, kv_heads, features, value.shape[-1])
    if offset > 0:  # every query sees the first `offset` keys
        state = state + key[:, :, :offset].mT @ value[:, :, :offset]
        key, value = key[:, :, offset:], value[:, :, offset:]
    grouped = query.unflatten(1, (kv_heads, heads // kv_heads))  # (B, H_kv, G, N, F)
    if offset < 0:  # the first queries see the state only
        blind, grouped = grouped[..., :-offset, :], grouped[..., -offset:, :]
    if is_symbol(grouped.shape[-2]):  # spans would be counted
        pairs = (grouped @ key[:, :, None].mT).tril()
        out = pairs @ value[:, :, None] + grouped @ state[:, :, None]
        return out.flatten(1, 2), state + key.mT @ value
    chunk = chunk_length(features) if chunk is None else chunk
    length = grouped.shape[-2]
    chunk = max(1, min(chunk, length))
    if span is None:
        span = device_budget(SPAN_PAIRS, query.device) // max(1, batch * heads * chunk)
    span = max(1, span // chunk) * chunk
    out, state_after = _CausalProduct.apply(grouped, key, value, state, chunk, span)
    if offset < 0:
        out = torch.cat([blind @ state[:, :, None], out], -2)
    return out.flatten(1, 2), state_after


def _spans(length: int, span: int, reverse: bool = False) -> list[slice]:
    return [slice(r.start, r.stop) for r in block_ranges(length, span, reverse=reverse)]


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """Cut positions into chunks: (…, n, F) -> (…, C, T, F), the last chunk filled with zeros."""
    missing = -x.shape[-2] % chunk
    if missing:
        x = torch.nn.functional.pad(x, (0, 0, 0, missing))
    return x.unflatten(-2, (-1, chunk))


def _grouped_chunks(x: Tensor, chunk: int) -> Tensor:
    """Cut positions of grouped heads into chunks: (B, H_kv, G, n, F) -> (B, H_kv, C, G·T, F)."""
    return _chunks(x, chunk).transpose(2, 3).flatten(3, 4)


def _ungrouped(x: Tensor, groups: int, length: int) -> Tensor:
    """Undo `_grouped_chunks`."""
    return x.unflatten(3, (groups, -1)).transpose(2, 3).flatten(3, 4)[..., :length, :]


def _running_states(sums: Tensor, start: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    """Return the state before each chunk (after it, in reverse), and the one past the last.

    Sums are f_cᵀ v_c of each chunk, (B, H_kv, C, F, E); the start is (B, H_kv, F, E).
    """
    first = start[:, :, None]
    if sums.shape[2] == 1:
        return first, start + sums[:, :, 0]
    if reverse:
        total = torch.cat([first, sums.flip(2)], 2).cumsum(2)
        return total[:, :, :-1].flip(2), total[:, :, -1]
    total = torch.cat([first, sums], 2).cumsum(2)
    return total[:, :, :-1], total[:, :, -1]


def _visible(rows: Tensor, groups: int, chunk: int) -> Tensor:
    """Return the causal mask of one chunk as zeros and ones, (G·T, T)."""
    return rows.new_ones(chunk, chunk).tril_().repeat(groups, 1)


class _CausalProduct(torch.autograd.Function):
    """`causal_product` for as many queries as keys; query (B, H_kv, G, N, F)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, state: Tensor, chunk: int, span: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(query, key, value, state)
        ctx.sizes = chunk, span
        groups, length = query.shape[2], query.shape[3]
        visible = _visible(query, groups, chunk)
        out = query.new_empty(*query.shape[:4], value.shape[-1])
        for part in _spans(length, span):
            rows = _grouped_chunks(query[..., part, :], chunk)
            f, v = _chunks(key[..., part, :], chunk), _chunks(value[..., part, :], chunk)
            states, state = _running_states(f.mT @ v, state, reverse=False)
            result = (rows @ f.mT).mul_(visible) @ v
            result += rows @ states
            out[..., part, :] = _ungrouped(result, groups, part.stop - part.start)
        return out, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, state = ctx.saved_tensors
        chunk, span = ctx.sizes
        groups, length = query.shape[2], query.shape[3]
        visible = _visible(query, groups, chunk)
        grad_query = torch.empty_like(query) if ctx.needs_input_grad[0] else None
        grad_key, grad_value = torch.empty_like(key), torch.empty_like(value)
        if grad_query is not None:
            for part in _spans(length, span):
                grad_rows = _grouped_chunks(grad_out[..., part, :], chunk)
                f, v = _chunks(key[..., part, :], chunk), _chunks(value[..., part, :], chunk)
                states, state = _running_states(f.mT @ v, state, reverse=False)
                result = (grad_rows @ v.mT).mul_(visible) @ f
                result += grad_rows @ states.mT
                grad_query[..., part, :] = _ungrouped(result, groups, part.stop - part.start)
        later = grad_state
        for part in _spans(length, span, reverse=True):
            size = part.stop - part.start
            rows = _grouped_chunks(query[..., part, :], chunk)
            grad_rows = _grouped_chunks(grad_out[..., part, :], chunk)
            f, v = _chunks(key[..., part, :], chunk), _chunks(value[..., part, :], chunk)
            states, later = _running_states(rows.mT @ grad_rows, later, reverse=True)
            result = (grad_rows @ v.mT).mul_(visible).mT @ rows
            result += v @ states.mT
            grad_key[..., part, :] = result.flatten(2, 3)[..., :size, :]
            result = (rows @ f.mT).mul_(visible).mT @ grad_rows
            result += f @ states
            grad_value[..., part, :] = result.flatten(2, 3)[..., :size, :]
        return grad_query, grad_key, grad_value, later, None, None
