"""Attention in which every head has maps of its own: one for each component, or one for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_probattn.attention.functional import autocast_off, repeat_heads
from lit_probattn.attention.masks import Masks
from lit_probattn.attention.rowpass.native import rows_backward, rows_forward
from lit_probattn.attention.rowpass.operators import (
    Gradients,
    PairCall,
    define_row_operator,
    row_terms,
)
from lit_probattn.attention.rowpass.products import (
    add_bias,
    add_by_head,
    add_product,
    places,
    product,
)
from lit_probattn.attention.rowpass.tiled import tiled_attention
from lit_probattn.attention.rowpass.terms import Buffers, Place, RowGrads, RowTerms
from lit_probattn.base.graphs import once_differentiable, written
from lit_probattn.randomness import AttentionDropout


class _Mixture(torch.autograd.Function):
    """Every head has maps of its own, one for each component or one for all."""

    @staticmethod
    def forward(
        ctx: Any,
        terms: RowTerms,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        coef: Tensor | None,
        row: Tensor | None,
        col: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        terms = replace(terms, coef=coef, row=row, col=col)
        out = _forward(terms, query, key, value)
        ctx.terms = terms
        ctx.save_for_backward(query, key, value, coef, row, col, bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        with autocast_off(grad_out):  # as in forward, for callers that leave it on
            tensors, needs = ctx.saved_tensors, ctx.needs_input_grad[1:]
            return (None, *_backward(ctx.terms, tensors, needs, grad_out))


def _forward(terms: RowTerms, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the output, (B·H, N, E_v)."""
    out, buffer = value.new_zeros(*query.shape[:2], value.shape[-1]), Buffers(query)
    for place in places(terms, query.shape[0], query.device):
        if not place.cols:
            continue
        maps = _mixture_maps(query, key, place, buffer)
        rows_forward(terms, place, maps, maps[0])
        rows = slice(place.rows.start, place.rows.stop)
        product(maps[0], value[place.pairs, : len(place.cols)], out[place.pairs, rows])
    return out


def _backward(
    terms: RowTerms,
    tensors: Sequence[Any],
    needs: Sequence[bool],
    grad_out: Tensor,
) -> Gradients:
    """Return the gradients of query, key, value, coef, row, col and bias; None where not needed."""
    query, key, value, coef, *_ = tensors
    grad_out = grad_out.contiguous()
    grads = [
        torch.zeros_like(x) if x is not None and n else None
        for x, n in zip(tensors, needs, strict=True)
    ]
    grad_query, grad_key, grad_value, grad_coef, grad_row, grad_col, grad_bias = grads
    buffer, num_maps, components = Buffers(query), key.shape[1], terms.num_components
    for place in places(terms, query.shape[0], query.device):
        if not place.cols:
            continue
        pairs, rows = place.pairs, slice(place.rows.start, place.rows.stop)
        cols, (count, _, length) = slice(0, len(place.cols)), place.shape
        maps = _mixture_maps(query, key, place, buffer)
        weights, part = buffer(num_maps, place.shape), grad_out[pairs, rows]
        grad = product(part, value[pairs, cols].mT, buffer(num_maps + 1, place.shape))
        plain = coef is None and (terms.shared or components == 1)
        wanted = RowGrads(
            [grad] if plain else maps,
            None if grad_row is None else grad_row[pairs, rows],
            None if grad_col is None else grad_col.new_empty(count, components, length),
            None if grad_coef is None else grad_coef.new_empty(count, components),
        )
        rows_backward(terms, place, maps, weights, grad, wanted)
        if grad_value is not None:
            add_product(grad_value[pairs, cols], weights.mT, part)
        for r, grad_map in enumerate(wanted.maps):
            if grad_key is not None:
                add_product(grad_key[pairs, r, cols], grad_map.mT, query[pairs, rows])
            if grad_query is not None:
                add_product(grad_query[pairs, rows], grad_map, key[pairs, r, cols])
        if grad_col is not None and wanted.col is not None:
            grad_col[pairs, :, cols] += wanted.col
        add_by_head(grad_coef, wanted.coef, terms, place)
        add_bias(grad_bias, grad, terms, place)
    return grads


def _mixture_maps(query: Tensor, key: Tensor, place: Place, buffer: Buffers) -> list[Tensor]:
    rows, cols = slice(place.rows.start, place.rows.stop), slice(0, len(place.cols))
    part = query[place.pairs, rows]
    return [
        product(part, key[place.pairs, r, cols].mT, buffer(r, place.shape))
        for r in range(key.shape[1])
    ]


def mixture_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: Masks,
    dropout: AttentionDropout | None,
    *,
    coef: Tensor | None = None,
    row: Tensor | None = None,
    col: Tensor | None = None,
    hard: bool = False,
) -> Tensor:
    """Attend by softmax_j(l_ij) with l = logsumexp_r or max_r of the scores of K components.

        t_ijr = c_r query[i] · key[j, r] + a_ir + β_jr

    Args:
        query: (B, H, N, E), in the compute dtype.
        key: (B, H_kv, R, L, E): one for each component, R = K, or one for all, R = 1.
        value: (B, H_kv, L, E_v).
        masks: what each query may see; a bias gets its gradient.
        dropout: drawn again in backward.
        coef: c, (H, K). None means 1.
        row: a, (B, H, N, K). None means 0.
        col: β, (B, H, K, L). None means 0.
        hard: maximum in place of the sum over components; the first largest takes the gradient.

    Returns:
        (B, H, N, E_v).
    """
    heads = query.shape[1]
    components = next(
        (x.shape[d] for x, d in ((coef, 1), (row, 3), (col, 2)) if x is not None), key.shape[2]
    )
    return tiled_attention(
        *(query, key, value, masks, dropout),
        reduction="hard" if hard else "soft",
        heads=heads,
        components=components,
        coef=coef,
        row=row,
        col=col,
    )


class _Inputs(NamedTuple):
    """Tensors of `_Mixture`, and the fields of `PairCall`."""

    query: Tensor
    key: Tensor
    value: Tensor
    coef: Tensor | None
    row: Tensor | None
    col: Tensor | None
    bias: Tensor | None
    key_mask: Tensor | None
    pair_mask: Tensor | None
    draw: Tensor | None
    is_causal: bool
    heads: int
    threshold: int
    hard: bool
    components: int

    def terms(self) -> RowTerms:
        """Return the terms of the call."""
        return row_terms(
            self,
            reduction="hard" if self.hard else "soft",
            num_components=self.components,
            shared=self.key.shape[1] == 1 and self.components > 1,
            row=self.row,
            col=self.col,
        )


_operator = define_row_operator(
    "rows_mixture",
    _Inputs,
    lambda call: _forward(call.terms(), call.query, call.key, call.value),
    lambda call, *given: _backward(call.terms(), *given),
    gradients=("query", "key", "value", "coef", "row", "col", "bias"),
)
