"""Causal linear attention over chunks: Y_i = Σ_{j ≤ i} (F_i · f_j) v_j in O(N) memory.

Positions are split into chunks of length T. Pairs are formed only within a chunk; between chunks
only states S = Σ f_jᵀ v_j (F x E) are passed on:

    Y_c = F_c S_c + tril(F_c f_cᵀ) v_c,        S_{c+1} = S_c + f_cᵀ v_c

All chunks of a span are computed at once (their states are a running sum of the chunk sums), and a
loop runs over spans, whose size is chosen so that intermediate results fit in the cache. Backward
is one explicit sweep from the last span to the first, with T = Σ F_iᵀ dY_i of later positions:

    dF_c = dY_c S_cᵀ + tril(dY_c v_cᵀ) f_c
    df_c = v_c T_cᵀ + tril(dY_c v_cᵀ)ᵀ F_c,    dv_c = f_c T_c + tril(F_c f_cᵀ)ᵀ dY_c

The state at the start of each span is saved for backward, which recomputes the states within it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_probattn.attention.engines.loop import device_budget
from lit_probattn.attention.numerics import autocast_off
from lit_probattn.base.graphs import (
    is_symbol,
    once_differentiable,
    reject_several_gradients,
    written,
)

# Pairs of all heads in one span: small enough for the cache of a CPU core.
SPAN_PAIRS = {"cpu": 1 << 17, "cuda": 1 << 26}


def chunk_length(num_features: int) -> int:
    """Return T: work per token is T (F + E) + 2 F E, smallest near T = F; at least 32."""
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

    Causality is aligned bottom-right: with N queries and L keys, query i uses keys j ≤ i + L − N.

    Args:
        query: features F_i, (B, H, N, F), float32 or float64.
        key: features f_j, (B, H_kv, L, F), H_kv a divisor of H.
        value: (B, H_kv, L, E).
        state: Σ f_jᵀ v_j of earlier positions, (B, H_kv, F, E). None means zero.
        chunk: positions per chunk; None chooses by F.
        span: positions per span; None chooses by device.

    Returns:
        (B, H, N, E), and the state after all L keys, (B, H_kv, F, E).
    """
    batch, heads, num_queries, features = query.shape
    kv_heads, num_keys = key.shape[1], key.shape[2]
    offset = num_keys - num_queries
    if state is None:
        state = value.new_zeros(batch, kv_heads, features, value.shape[-1])
    if offset > 0:  # every query uses the first `offset` keys
        state = state + key[:, :, :offset].mT @ value[:, :, :offset]
        key, value = key[:, :, offset:], value[:, :, offset:]
    grouped = query.unflatten(1, (kv_heads, heads // kv_heads))  # (B, H_kv, G, N, F)
    if offset < 0:  # the first queries use only the state
        blind, grouped = grouped[..., :-offset, :], grouped[..., -offset:, :]
    if is_symbol(grouped.shape[-2]):  # the number of spans is unknown
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


class _Span(NamedTuple):
    """Positions starting at `start`: `num_chunks` chunks of length `chunk`."""

    start: int
    num_chunks: int
    chunk: int

    def of(self, x: Tensor) -> Tensor:
        """Return the span's chunks as a view, (…, N, F) -> (…, C, T, F)."""
        stop = self.start + self.num_chunks * self.chunk
        return x[..., self.start : stop, :].unflatten(-2, (self.num_chunks, self.chunk))

    def matrices(self, x: Tensor) -> Tensor:
        """Return matrices per chunk, sample and key head: (B, H_kv, [G,] N, F) -> (C·B·H_kv, …)."""
        if x.dim() == 4:
            x = x[:, :, None]
        chunks = self.of(x).permute(3, 0, 1, 2, 4, 5)  # (C, B, H_kv, G, T, F)
        return chunks.flatten(0, 2).flatten(1, 2)

    def store(self, matrices: Tensor, into: Tensor) -> None:
        """Write matrices, as from `matrices`, to the span's positions."""
        chunks = self.of(into)
        if chunks.dim() == 5:
            chunks = chunks[:, :, None]
        places = chunks.permute(3, 0, 1, 2, 4, 5)
        places.copy_(matrices.view(places.shape))


def _spans(length: int, chunk: int, span: int) -> list[_Span]:
    """Split positions into spans of whole chunks, and one shorter chunk at the end."""
    whole, rest = divmod(length, chunk)
    count = span // chunk
    spans = [_Span(at * chunk, min(count, whole - at), chunk) for at in range(0, whole, count)]
    return [*spans, _Span(whole * chunk, 1, rest)] if rest else spans


def _running_states(
    sums: Tensor, start: Tensor, count: int, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Return the state before each chunk (after it, in reverse), and the final state.

    `sums` are f_cᵀ v_c of each of `count` chunks, (C·B·H_kv, F, E); `start` is (B, H_kv, F, E).
    """
    sums = sums.view(count, *start.shape)
    if len(sums) == 1:
        return start.flatten(0, 1), start + sums[0]
    if written() is not None:  # one operation instead of one per chunk
        total = torch.cat([start[None], sums.flip(0) if reverse else sums]).cumsum(0)
        states = total[:-1].flip(0) if reverse else total[:-1]
        return states.flatten(0, 2), total[-1]
    total = sums.new_empty(len(sums) + 1, *start.shape)
    states = total[1:] if reverse else total[:-1]
    step = -1 if reverse else 1
    places, terms = total.unbind()[::step], sums.unbind()[::step]
    places[0].copy_(start)
    for before, term, after in zip(places[:-1], terms, places[1:], strict=True):
        torch.add(before, term, out=after)  # `cumsum` over chunks is not vectorised
    return states.flatten(0, 2), places[-1].clone()


def _visible(rows: Tensor, groups: int, chunk: int) -> Tensor:
    """Return the causal mask of one chunk as zeros and ones, (G·T, T)."""
    return rows.new_ones(chunk, chunk).tril_().repeat(groups, 1)


class _CausalProduct(torch.autograd.Function):
    """`causal_product` for equal numbers of queries and keys, with query (B, H_kv, G, N, F)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, state: Tensor, chunk: int, span: int
    ) -> tuple[Tensor, Tensor]:
        spans = _spans(query.shape[3], chunk, span)
        out = query.new_empty(*query.shape[:4], value.shape[-1])
        starts = []
        for part in spans:
            starts.append(state)
            rows, f, v = (part.matrices(x) for x in (query, key, value))
            states, state = _running_states(f.mT @ v, state, part.num_chunks, False)
            pairs = (rows @ f.mT).mul_(_visible(rows, query.shape[2], part.chunk))
            part.store(torch.bmm(pairs, v).baddbmm_(rows, states), out)
        ctx.save_for_backward(query, key, value, *starts)
        ctx.spans = spans
        return out, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
        reject_several_gradients(grad_out, grad_state)
        with autocast_off(grad_out):  # as in forward, for callers that leave autocast on
            return _CausalProduct._backward(ctx, grad_out, grad_state)

    @staticmethod
    def _backward(ctx: Any, grad_out: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *starts = ctx.saved_tensors
        grad_query = torch.empty_like(query) if ctx.needs_input_grad[0] else None
        grad_key, grad_value = torch.empty_like(key), torch.empty_like(value)
        later = grad_state
        for part, start in zip(reversed(ctx.spans), reversed(starts), strict=True):
            visible = _visible(query, query.shape[2], part.chunk)
            rows, f, v, grad_rows = (part.matrices(x) for x in (query, key, value, grad_out))
            grad_pairs = (grad_rows @ v.mT).mul_(visible)
            if grad_query is not None:
                states, _ = _running_states(f.mT @ v, start, part.num_chunks, False)
                part.store(torch.bmm(grad_pairs, f).baddbmm_(grad_rows, states.mT), grad_query)
            states, later = _running_states(rows.mT @ grad_rows, later, part.num_chunks, True)
            part.store(torch.bmm(grad_pairs.mT, rows).baddbmm_(v, states.mT), grad_key)
            pairs = (rows @ f.mT).mul_(visible)
            part.store(torch.bmm(pairs.mT, grad_rows).baddbmm_(f, states), grad_value)
        return grad_query, grad_key, grad_value, later, None, None
