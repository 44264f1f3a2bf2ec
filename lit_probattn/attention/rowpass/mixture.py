"""Attention in which every head has maps of its own: one for each component, or one for all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lit_probattn.attention.functional import autocast_off, repeat_heads
from lit_probattn.attention.masks import Masks
from lit_probattn.attention.rowpass.products import (
    add_bias,
    add_by_head,
    add_product,
    places,
    product,
)
from lit_probattn.attention.rowpass.terms import Buffers, Place, RowGrads, RowPass, RowTerms
from lit_probattn.base.graphs import once_differentiable
from lit_probattn.randomness import AttentionDropout


class _Mixture(torch.autograd.Function):
    """Every head has maps of its own, one for each component or one for all."""

    @staticmethod
    def forward(
        ctx: Any,
        run: RowPass,
        terms: RowTerms,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        coef: Tensor | None,
        row: Tensor | None,
        col: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        out, buffer = value.new_zeros(*query.shape[:2], value.shape[-1]), Buffers(query)
        terms = replace(terms, coef=coef, row=row, col=col)
        here = run.prepare(terms)
        for place in places(here, query.shape[0], query.device, run.least_rows):
            if not place.cols:
                continue
            maps = _mixture_maps(query, key, place, buffer)
            run.forward(here, place, maps, maps[0], buffer)
            rows = slice(place.rows.start, place.rows.stop)
            product(maps[0], value[place.pairs, : len(place.cols)], out[place.pairs, rows])
        ctx.run, ctx.terms = run, terms
        ctx.save_for_backward(query, key, value, coef, row, col, bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        with autocast_off(grad_out):  # as in forward, for callers that leave it on
            return _Mixture._backward(ctx, grad_out)

    @staticmethod
    def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, coef, row, col, bias = ctx.saved_tensors
        run, needs = ctx.run, ctx.needs_input_grad[2:]
        terms = run.prepare(ctx.terms)
        grad_out = grad_out.contiguous()
        grads = [
            torch.zeros_like(x) if x is not None and n else None
            for x, n in zip((query, key, value, coef, row, col, bias), needs, strict=True)
        ]
        grad_query, grad_key, grad_value, grad_coef, grad_row, grad_col, grad_bias = grads
        buffer, num_maps, components = Buffers(query), key.shape[1], terms.num_components
        for place in places(terms, query.shape[0], query.device, run.least_rows):
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
            run.backward(terms, place, maps, weights, grad, wanted, buffer)
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
        return (None, None, *grads)


def _mixture_maps(query: Tensor, key: Tensor, place: Place, buffer: Buffers) -> list[Tensor]:
    rows, cols = slice(place.rows.start, place.rows.stop), slice(0, len(place.cols))
    part = query[place.pairs, rows]
    return [
        product(part, key[place.pairs, r, cols].mT, buffer(r, place.shape))
        for r in range(key.shape[1])
    ]


def mixture_attention(
    run: RowPass,
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
        run: who passes over the rows.
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
    batch, heads = query.shape[:2]
    components = next(
        (x.shape[d] for x, d in ((coef, 1), (row, 3), (col, 2)) if x is not None), key.shape[2]
    )
    flat = [repeat_heads(x, heads).flatten(0, 1).contiguous() for x in (query, key, value)]
    terms = [None if x is None else x.flatten(0, 1).contiguous() for x in (row, col)]
    common = RowTerms(
        masks,
        dropout,
        heads,
        "hard" if hard else "soft",
        components,
        shared=flat[1].shape[1] == 1 and components > 1,
        samples=None if dropout is None else dropout.key.samples(batch, query.device),
    )
    coef = None if coef is None else coef.contiguous()
    bias = None if masks.bias is None else masks.bias.to(query.dtype)
    common = replace(common, masks=replace(masks, bias=None if bias is None else bias.detach()))
    out: Tensor = _Mixture.apply(run, common, *flat, coef, *terms, bias)
    return out.unflatten(0, (batch, heads))
