"""Attention whose maps belong to one head each, or to all heads of a sample, which sum them.

An owner is a (sample, head) pair with a map for each component, or a sample with R maps (`common`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_probattn.attention.functional import autocast_off, repeat_heads
from lit_probattn.attention.masks import Block, Masks
from lit_probattn.attention.rowpass.native import rows_backward, rows_forward
from lit_probattn.attention.rowpass.operators import (
    DrawnKey,
    Gradients,
    PairCall,
    define_row_operator,
    row_terms,
)
from lit_probattn.attention.rowpass.products import (
    add_bias,
    add_by_head,
    add_product,
    heads_at_once,
    places,
    product,
)
from lit_probattn.attention.rowpass.terms import Buffers, Place, Reduction, RowGrads, RowTerms
from lit_probattn.attention.variant import ScoreNoise
from lit_probattn.base.graphs import once_differentiable, written
from lit_probattn.base.memory import is_predicting
from lit_probattn.randomness import AttentionDropout


class _Rows(torch.autograd.Function):
    """Queries are (owners, 1 or R, N, E), keys (owners, R, L, E), values (B·H, L, E_v)."""

    @staticmethod
    def forward(
        ctx: Any,
        terms: RowTerms,
        draws: ScoreNoise | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        coef: Tensor | None,
        row: Tensor | None,
        col: Tensor | None,
        noise_scale: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        terms = replace(terms, coef=coef, row=row, col=col)
        out = _forward(terms, draws, query, key, value, noise_scale)
        ctx.terms, ctx.draws = terms, draws
        ctx.save_for_backward(query, key, value, coef, row, col, noise_scale, bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        with autocast_off(grad_out):  # as in forward, for callers that leave it on
            tensors, needs = ctx.saved_tensors, ctx.needs_input_grad[2:]
            return (None, None, *_backward(ctx.terms, ctx.draws, tensors, needs, grad_out))


def _forward(
    terms: RowTerms,
    draws: ScoreNoise | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    noise_scale: Tensor | None,
) -> Tensor:
    """Return the output, (B·H, N, E_v)."""
    out, buffer = value.new_zeros(len(value), query.shape[2], value.shape[2]), Buffers(query)
    for part, readers in _blocks(terms, query):
        rows, cols = slice(part.rows.start, part.rows.stop), slice(0, len(part.cols))
        maps, _ = _maps(query, key, part, draws, noise_scale, buffer)
        for place in readers:
            weights = buffer(-1, place.shape) if terms.common else maps[0]
            rows_forward(terms, place, maps, weights)
            product(weights, value[place.pairs, cols], out[place.pairs, rows])
    return out


def _backward(
    terms: RowTerms,
    draws: ScoreNoise | None,
    tensors: Sequence[Any],
    needs: Sequence[bool],
    grad_out: Tensor,
) -> Gradients:
    """Return the gradients of the tensors of `_Rows`; None where not needed."""
    query, key, value, coef, _, _, noise_scale, _ = tensors
    grad_out, last = grad_out.contiguous(), query.shape[1] - 1
    grads = [
        torch.zeros_like(x) if x is not None and n else None
        for x, n in zip(tensors, needs, strict=True)
    ]
    grad_query, grad_key, grad_value, grad_coef = grads[:4]
    grad_row, grad_col, grad_scale, grad_bias = grads[4:]
    buffer, num_maps, components = Buffers(query), key.shape[1], terms.num_components
    plain = coef is None and (terms.shared or components == 1)
    for part, readers in _blocks(terms, query):
        rows, cols = slice(part.rows.start, part.rows.stop), slice(0, len(part.cols))
        maps, noise = _maps(query, key, part, draws, noise_scale, buffer)
        of_maps: Sequence[Tensor] = maps
        if terms.common:
            of_maps = [buffer(num_maps + g, part.shape).zero_() for g in range(num_maps)]
        for place in readers:
            weights, here = buffer(-1, place.shape), grad_out[place.pairs, rows]
            grad = product(here, value[place.pairs, cols].mT, buffer(-2, place.shape))
            count, length = place.count, len(place.cols)
            if plain:
                of_maps = [grad]
            wanted = RowGrads(
                of_maps,
                None if grad_row is None else grad_row[place.pairs, rows],
                None if grad_col is None else grad_col.new_empty(count, components, length),
                None if grad_coef is None else grad_coef.new_empty(count, components),
            )
            rows_backward(terms, place, maps, weights, grad, wanted)
            if grad_value is not None:
                add_product(grad_value[place.pairs, cols], weights.mT, here)
            if grad_col is not None and wanted.col is not None:
                grad_col[place.pairs, :, cols] += wanted.col
            add_by_head(grad_coef, wanted.coef, terms, place)
            add_bias(grad_bias, grad, terms, place)
        for r, total in enumerate(of_maps):
            if grad_key is not None:
                seen = query[part.pairs, min(r, last), rows]
                add_product(grad_key[part.pairs, r, cols], total.mT, seen)
            if grad_query is not None:
                target = grad_query[part.pairs, min(r, last), rows]
                add_product(target, total, key[part.pairs, r, cols])
            if grad_scale is not None and noise is not None:
                grad_scale[r] += torch.vdot(total.flatten(), noise[r].flatten())
    return grads


def _blocks(terms: RowTerms, query: Tensor) -> Iterator[tuple[Place, list[Place]]]:
    """Yield blocks of owners that see anything, each with the (sample, head) pairs that read it."""
    owners, heads, device = query.shape[0], terms.num_heads, query.device
    if not terms.common:
        for place in places(terms, owners, device):
            if place.cols:
                yield place, [place]
        return
    for sample in range(owners)[-1:] if is_predicting() else range(owners):  # all use one room
        for part in places(terms, 1, device):
            if part.cols:
                count = heads_at_once(part, heads, device)
                starts = range(0, heads, count)
                readers = [
                    replace(part, first=sample * heads + first, count=min(count, heads - first))
                    for first in starts
                ]
                yield replace(part, first=sample), readers


def _maps(
    query: Tensor,
    key: Tensor,
    part: Place,
    draws: ScoreNoise | None,
    noise_scale: Tensor | None,
    buffer: Buffers,
) -> tuple[list[Tensor], Tensor | None]:
    """Return the maps of a block, each (count, n, l), and their noise, (R, n, l) or None."""
    rows, cols = slice(part.rows.start, part.rows.stop), slice(0, len(part.cols))
    last = query.shape[1] - 1
    maps = [
        product(
            query[part.pairs, min(r, last), rows],
            key[part.pairs, r, cols].mT,
            buffer(r, part.shape),
        )
        for r in range(key.shape[1])
    ]
    if draws is None or noise_scale is None:
        return maps, None
    noise = draws.draw_sample(query, part.first, Block(part.rows, part.cols), len(maps))
    for r, one in enumerate(maps):
        one[0].addcmul_(noise[r], noise_scale[r])
    return maps, noise


def row_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: Masks,
    dropout: AttentionDropout | None,
    *,
    coef: Tensor | None = None,
    row: Tensor | None = None,
    col: Tensor | None = None,
    reduction: Reduction = "soft",
    noise_scale: Tensor | None = None,
    draws: ScoreNoise | None = None,
) -> Tensor:
    """Attend by softmax_j(l_ij), where l is logsumexp_r, max_r, or Σ_r c_r of

        t_ijr = c_r query[i] · key[j, r] + a_ir + β_jr           soft, hard
        t_ijr = query_r[i] · key_r[j] + s_r ε_ijr                 sum

    Args:
        query: (B, H, N, E), in the compute dtype; (B, R, N, E) for `sum`.
        key: (B, H_kv, R, L, E): one for each component, R = K, or one for all, R = 1;
            (B, R, 1, L, E) for `sum`.
        value: (B, H_kv, L, E_v); (B, H, L, E_v) for `sum`.
        masks: what each query may see; a bias gets its gradient.
        dropout: drawn again in backward.
        coef: c, (H, K). None means 1; needed for `sum`.
        row: a, (B, H, N, K). None means 0.
        col: β, (B, H, K, L). None means 0.
        reduction: how components become scores; of equal ones the first takes a maximum's gradient.
        noise_scale: s, (R,), with `draws`.
        draws: ε, drawn again in backward.

    Returns:
        (B, H, N, E_v).
    """
    batch, common = query.shape[0], reduction == "sum"
    heads = value.shape[1] if common else query.shape[1]
    components = next(
        (x.shape[d] for x, d in ((coef, 1), (row, 3), (col, 2)) if x is not None), key.shape[2]
    )
    if common:
        owned = query, key[:, :, 0]
    else:
        owned = query.flatten(0, 1)[:, None], repeat_heads(key, heads).flatten(0, 1)
    flat = [x.contiguous() for x in (*owned, repeat_heads(value, heads).flatten(0, 1))]
    terms = [None if x is None else x.flatten(0, 1).contiguous() for x in (row, col)]
    bias = None if masks.bias is None else masks.bias.to(query.dtype)
    given = RowTerms(
        replace(masks, bias=None if bias is None else bias.detach()),
        dropout,
        heads,
        reduction,
        components,
        shared=not common and flat[1].shape[1] == 1 and components > 1,
        common=common,
        samples=None if dropout is None else dropout.key.samples(batch, query.device),
    )
    coef = None if coef is None else coef.contiguous()
    tensors = (*flat, coef, *terms, noise_scale, bias)
    out: Tensor
    if written() == "compiled":
        words = None if draws is None else draws.words(query)
        pairs = PairCall.of(given, batch, query.device)
        first_row = 0 if draws is None else draws.first_row
        out = _operator(*tensors, words, *pairs, reduction, components, first_row)
    else:
        out = _Rows.apply(given, draws, *tensors)
    return out.unflatten(0, (batch, heads))


class _Inputs(NamedTuple):
    """Tensors of `_Rows`, the words of its noise, and the fields of `PairCall`."""

    query: Tensor
    key: Tensor
    value: Tensor
    coef: Tensor | None
    row: Tensor | None
    col: Tensor | None
    noise_scale: Tensor | None
    bias: Tensor | None
    noise: Tensor | None
    key_mask: Tensor | None
    pair_mask: Tensor | None
    draw: Tensor | None
    is_causal: bool
    heads: int
    threshold: int
    reduction: str
    components: int
    first_row: int

    def parts(self) -> tuple[RowTerms, ScoreNoise | None]:
        """Return the terms and the noise."""
        common = self.reduction == "sum"
        terms = row_terms(
            self,
            reduction=self.reduction,
            num_components=self.components,
            shared=not common and self.key.shape[1] == 1 and self.components > 1,
            common=common,
            row=self.row,
            col=self.col,
        )
        if self.noise is None:
            return terms, None
        key, num_maps = DrawnKey.of(self.noise), self.key.shape[1]
        return terms, ScoreNoise("global", key, num_maps, self.first_row)


def _run_forward(call: _Inputs) -> Tensor:
    return _forward(*call.parts(), call.query, call.key, call.value, call.noise_scale)


_operator = define_row_operator(
    "rows",
    _Inputs,
    _run_forward,
    lambda call, *given: _backward(*call.parts(), *given),
    gradients=("query", "key", "value", "coef", "row", "col", "noise_scale", "bias"),
)
