"""Causal linear attention of whole sequences, divided by its sums, one span of chunks at a time:

    y_i = c Σ_{j ≤ i} (F_i · f_j) v_j / t_i,        t_i = Σ_{j ≤ i} F_i · f_j + eps

`chunkwise` explains chunks and states. This module also computes feature maps, denominators and
their gradients within a span, while it is in the cache: with z = Σ f_j in addition to S, and
n_i = c dY_i / t_i, d_i = −(dY_i · y_i) / t_i for dY_i,

    dF_c = (n_c v_cᵀ + d_c 1ᵀ, lower triangle) f_c + n_c S_cᵀ + d_c z_cᵀ
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_probattn.attention.engines.loop import device_budget
from lit_probattn.attention.linear.chunkwise import SPAN_PAIRS, chunk_length
from lit_probattn.attention.linear.features import map_into, slope_
from lit_probattn.base.graphs import once_differentiable

_MOST_CHUNKS = 16  # per span: their running sums are one product with a triangle


def causal_average(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    row_map: str = "none",
    col_map: str = "none",
    eps: float = 0.0,
    factor: float = 1.0,
    chunk: int | None = None,
    span: int | None = None,
) -> Tensor:
    """Return y, (B, H, N, E); rows whose sum is zero give zeros.

    Sums below the root of the smallest normal number get no gradient, because their square would
    underflow.

    Args:
        query: (B, H, N, F), float32 or float64.
        key: (B, H_kv, N, F), H_kv a divisor of H.
        value: (B, H_kv, N, E).
        row_map: `elu` or `relu`, applied to queries; `none` if they are features already.
        col_map: the same for keys.
        eps: added to the sums.
        factor: c.
        chunk: positions per chunk; None chooses by F.
        span: pairs of positions per span; None means the budget of the device.
    """
    groups = query.shape[1] // key.shape[1]
    grouped = query.unflatten(1, (key.shape[1], groups))  # (B, H_kv, G, N, F)
    length = query.shape[2]
    chunk = max(1, min(chunk_length(query.shape[-1]) if chunk is None else chunk, length))
    span = device_budget(SPAN_PAIRS, query.device) if span is None else span
    spans = _spans(grouped, chunk, max(1, span // (grouped.shape[2] * chunk * chunk)))
    form = row_map, col_map, eps, factor
    out: Tensor = _CausalAverage.apply(grouped, key, value, spans, *form)
    return out.flatten(1, 2)


class _Span(NamedTuple):
    """Whole chunks of some heads of some samples."""

    batch: slice
    heads: slice
    rows: slice
    chunk: int

    def of(self, x: Tensor) -> Tensor:
        """Return the span's part as a view, (B, H_kv, G, N, F) -> (b, h, C, G, T, F)."""
        part = x[self.batch, self.heads, :, self.rows]
        return part.unflatten(3, (-1, self.chunk)).transpose(2, 3)

    def matrices(self, x: Tensor) -> Tensor:
        """Return one matrix per chunk and key head, if possible as a view, (b·h·C, G·T, F)."""
        part = self.of(x)
        return part.reshape(-1, part.shape[3] * part.shape[4], part.shape[5])

    def features(self, name: str, x: Tensor) -> Tensor:
        """Return contiguous features of the span's matrices under a map."""
        return map_into(name, self.of(x)).flatten(0, 2).flatten(1, 2)


def _spans(query: Tensor, chunk: int, most: int) -> list[_Span]:
    """Split heads and positions into spans of at most `most` matrices, in order of positions."""
    batch, heads, _, length, _ = query.shape
    whole, rest = divmod(length, chunk)
    count = max(1, min(whole, _MOST_CHUNKS, most))

    def cut(rows: slice, count: int, size: int) -> list[_Span]:
        at_once = max(1, most // max(1, count))
        if at_once >= heads:
            step = at_once // heads
            pieces = [
                (slice(b, min(b + step, batch)), slice(0, heads)) for b in range(0, batch, step)
            ]
        else:
            starts = range(0, heads, at_once)
            pieces = [
                (slice(b, b + 1), slice(h, min(h + at_once, heads)))
                for b in range(batch)
                for h in starts
            ]
        return [_Span(b, h, rows, size) for b, h in pieces]

    found = []
    for at in range(0, whole, count):
        here = min(count, whole - at)
        found += cut(slice(at * chunk, (at + here) * chunk), here, chunk)
    return found + (cut(slice(whole * chunk, length), 1, rest) if rest else [])


def _running(sums: Tensor, start: Tensor, triangle: Tensor, last: int = -1) -> Tensor:
    """Return the sum before each chunk, or after it for an upper triangle; `start` is updated.

    `sums` are the sums of the chunks, (b·h·C, F, E); `start` is a view, (b, h, F, E), and becomes
    the sum of all; `last` is the chunk that is added last.
    """
    count = triangle.shape[-1]
    grouped = sums.view(-1, count, sums.shape[1] * sums.shape[2])
    first = start.reshape(len(grouped), 1, -1)
    if count == 1:
        states = first.clone()
        start.add_(sums.view_as(start))
        return states.view_as(sums)
    states = torch.baddbmm(first, triangle.expand(len(grouped), -1, -1), grouped)
    torch.add(states[:, last].view_as(start), grouped[:, last].view_as(start), out=start)
    return states.view_as(sums)


class _Triangles:
    """The causal mask of a chunk, (G·T, T), and sums over chunks before and after, (1, C, C)."""

    def __init__(self, groups: int, like: Tensor) -> None:
        self.groups, self.like = groups, like
        self.made: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def of(self, part: _Span) -> tuple[Tensor, Tensor, Tensor]:
        """Return the three matrices of a span, shared by spans of one shape."""
        chunks = (part.rows.stop - part.rows.start) // part.chunk
        if (chunks, part.chunk) not in self.made:
            mask = self.like.new_ones(part.chunk, part.chunk).tril_().repeat(self.groups, 1)
            ones = self.like.new_ones(1, chunks, chunks)
            self.made[chunks, part.chunk] = mask, ones.tril(-1), ones.triu(1)
        return self.made[chunks, part.chunk]


class _CausalAverage(torch.autograd.Function):
    """`causal_average` with query (B, H_kv, G, N, F)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        spans: list[_Span],
        row_map: str,
        col_map: str,
        eps: float,
        factor: float,
    ) -> Tensor:
        batch, heads, groups, length, features = query.shape
        size = value.shape[-1]
        # Heads of a position are adjacent, as the output projection reads them.
        out = value.new_empty(batch, length, heads, groups, size).permute(0, 2, 3, 1, 4)
        state, total_state = (value.new_zeros(batch, heads, features, n) for n in (size, 1))
        triangles, least = _Triangles(groups, value), torch.finfo(value.dtype).tiny
        saved = []
        for part in spans:
            rows = part.features(row_map, query)
            f = part.features(col_map, key[:, :, None])
            v = part.matrices(value[:, :, None])
            mask, before, _ = triangles.of(part)
            here = part.batch, part.heads
            states = _running(f.mT @ v, state[here], before)
            totals = _running(f.sum(1).unsqueeze(-1), total_state[here], before)
            pairs = (rows @ f.mT).mul_(mask)
            total = (rows * totals.mT).sum(-1, keepdim=True)
            total.add_(pairs.sum(-1, keepdim=True)).add_(eps)
            magnitude = total.abs()
            inverse = (factor / total).masked_fill_(magnitude < least, 0.0)
            product = torch.bmm(pairs, v).baddbmm_(rows, states)
            place = part.of(out)
            torch.mul(product.view(place.shape), inverse.view(*place.shape[:-1], 1), out=place)
            saved += [rows, f, pairs, states, totals]
            saved.append(inverse.masked_fill_(magnitude < least**0.5, 0.0))
        ctx.save_for_backward(value, out, *saved)
        ctx.spans, ctx.form = spans, (row_map, col_map, factor)
        ctx.places = [(x.shape, x.stride()) for x in (query, key)]  # layout only
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        value, out, *saved = ctx.saved_tensors
        row_map, col_map, factor = ctx.form
        grad_query, grad_key = (value.new_empty_strided(*place) for place in ctx.places)
        grad_value = torch.empty_like(value)
        batch, heads, groups, _, features = grad_query.shape
        later = value.new_zeros(batch, heads, features, value.shape[-1])
        later_total = value.new_zeros(batch, heads, features, 1)
        triangles = _Triangles(groups, value)
        for number, part in reversed(list(enumerate(ctx.spans))):
            rows, f, pairs, states, totals, inverse = saved[6 * number : 6 * number + 6]
            v, place = part.matrices(value[:, :, None]), part.of(grad_out)
            here = part.batch, part.heads
            mask, _, behind = triangles.of(part)
            n = torch.empty(place.shape, dtype=v.dtype, device=v.device)
            torch.mul(place, part.of(out), out=n)
            d = n.sum(-1, keepdim=True).view_as(inverse).mul_(inverse).mul_(-1.0 / factor)
            torch.mul(place, inverse.view(*place.shape[:-1], 1), out=n)
            n = n.view(*rows.shape[:2], -1)
            grad_pairs = (n @ v.mT).add_(d).mul_(mask)
            grad = torch.bmm(grad_pairs, f).baddbmm_(n, states.mT).addcmul_(d, totals.mT)
            slope_(row_map, grad, rows, part.of(grad_query))
            states = _running(rows.mT @ n, later[here], behind, 0)
            totals = _running((rows * d).sum(1).unsqueeze(-1), later_total[here], behind, 0)
            grad = torch.bmm(grad_pairs.mT, rows).baddbmm_(v, states.mT).add_(totals.mT)
            slope_(col_map, grad, f, part.of(grad_key[:, :, None]))
            grad = torch.bmm(pairs.mT, n).baddbmm_(f, states)
            part.of(grad_value[:, :, None]).copy_(grad.view(part.of(value[:, :, None]).shape))
        return grad_query, grad_key, grad_value, None, None, None, None, None
