"""Attention in which the heads of a sample sum the same maps with weights of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_probattn.attention.draws import normal_noise, philox_words
from lit_probattn.attention.functional import autocast_off
from lit_probattn.attention.masks import Masks
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
from lit_probattn.attention.rowpass.tiled import tiled_attention
from lit_probattn.attention.rowpass.terms import Buffers, Place, RowGrads, RowTerms
from lit_probattn.base.graphs import once_differentiable, written
from lit_probattn.base.memory import is_predicting
from lit_probattn.randomness import STREAM_NOISE, AttentionDropout, RandomKey


@dataclass(frozen=True)
class Draw:
    """Noise ε of a call: the key of its normals, and the position of query 0 among all tokens."""

    key: RandomKey
    first_row: int = 0

    def __call__(self, sample: int, rows: range, cols: range, like: Tensor) -> Tensor:
        """Return ε of a sample's block, (G, n, l), for maps (B, G, …) like these."""
        ids = self.key.samples(like.shape[0], like.device)[sample : sample + 1]
        one = replace(self.key, sample_ids=ids)
        rows = range(rows.start + self.first_row, rows.stop + self.first_row)
        maps, device, dtype = like.shape[1], like.device, like.dtype
        return normal_noise(one, 1, maps, rows, cols, device, dtype)[0]


class _Mixed(torch.autograd.Function):
    """Every head of a sample sums the same G maps with weights of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        terms: RowTerms,
        draw: Draw | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        coef: Tensor,
        noise_scale: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        terms = replace(terms, coef=coef)
        out = _forward(terms, draw, query, key, value, noise_scale)
        ctx.terms, ctx.draw = terms, draw
        ctx.save_for_backward(query, key, value, coef, noise_scale, bias)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        with autocast_off(grad_out):  # as in forward, for callers that leave it on
            tensors, needs = ctx.saved_tensors, ctx.needs_input_grad[2:]
            found = _backward(ctx.terms, ctx.draw, tensors, needs, grad_out)
            return (None, None, *found)


def _forward(
    terms: RowTerms,
    draw: Draw | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    noise_scale: Tensor | None,
) -> Tensor:
    """Return the output, (B·H, N, E_v)."""
    heads, buffer = terms.num_heads, Buffers(query)
    out = value.new_zeros(value.shape[0], query.shape[2], value.shape[2])
    for sample in _samples(query):
        for part in places(terms, 1, query.device):
            if not part.cols:
                continue
            maps, _ = _noisy_maps(query, key, sample, part, draw, noise_scale, buffer)
            for place in _head_groups(part, sample, heads, query.device):
                rows = slice(place.rows.start, place.rows.stop)
                weights = buffer(-1, place.shape)
                rows_forward(terms, place, maps, weights)
                seen = value[place.pairs, : len(place.cols)]
                product(weights, seen, out[place.pairs, rows])
    return out


def _backward(
    terms: RowTerms,
    draw: Draw | None,
    tensors: Sequence[Any],
    needs: Sequence[bool],
    grad_out: Tensor,
) -> Gradients:
    """Return the gradients of query, key, value, coef, noise_scale and bias, None if not needed."""
    query, key, value, _, noise_scale, _ = tensors
    heads, num_maps, grad_out = terms.num_heads, query.shape[1], grad_out.contiguous()
    grads = [
        torch.zeros_like(x) if x is not None and n else None
        for x, n in zip(tensors, needs, strict=True)
    ]
    grad_query, grad_key, grad_value, grad_coef, grad_scale, grad_bias = grads
    buffer = Buffers(query)
    for sample in _samples(query):
        for part in places(terms, 1, query.device):
            if not part.cols:
                continue
            maps, noise = _noisy_maps(query, key, sample, part, draw, noise_scale, buffer)
            totals = [buffer(num_maps + g, part.shape).zero_() for g in range(num_maps)]
            rows, cols = slice(part.rows.start, part.rows.stop), slice(0, len(part.cols))
            for place in _head_groups(part, sample, heads, query.device):
                weights, here = buffer(-1, place.shape), grad_out[place.pairs, rows]
                seen = value[place.pairs, cols].mT
                grad = product(here, seen, buffer(-2, place.shape))
                found = grad.new_empty(place.count, num_maps)
                wanted = RowGrads(totals, coef=found)
                rows_backward(terms, place, maps, weights, grad, wanted)
                if grad_value is not None:
                    add_product(grad_value[place.pairs, cols], weights.mT, here)
                add_by_head(grad_coef, found, terms, place)
                add_bias(grad_bias, grad, terms, place)
            for g, total in enumerate(totals):
                if grad_query is not None:
                    target = grad_query[sample, g, rows][None]
                    add_product(target, total, key[sample, g, cols][None])
                if grad_key is not None:
                    target = grad_key[sample, g, cols][None]
                    add_product(target, total.mT, query[sample, g, rows][None])
                if grad_scale is not None and noise is not None:
                    grad_scale[g] += torch.vdot(total.flatten(), noise[g].flatten())
    return grads


def _samples(query: Tensor) -> range:
    """Return the samples, or one of them in a prediction: all use the same room."""
    return range(query.shape[0])[-1:] if is_predicting() else range(query.shape[0])


def _head_groups(part: Place, sample: int, heads: int, device: torch.device) -> Iterator[Place]:
    """Cut the heads of a sample into blocks of about the same size as one head's."""
    count = heads_at_once(part, heads, device)
    for first in range(0, heads, count):
        here = min(count, heads - first)
        yield Place(sample * heads + first, here, part.rows, part.cols)


def _noisy_maps(
    query: Tensor,
    key: Tensor,
    sample: int,
    part: Place,
    draw: Draw | None,
    noise_scale: Tensor | None,
    buffer: Buffers,
) -> tuple[list[Tensor], Tensor | None]:
    """Return the maps of a sample's block, each (1, n, l), and their noise, (G, n, l) or None."""
    rows, cols = slice(part.rows.start, part.rows.stop), slice(0, len(part.cols))
    maps = [
        product(query[sample, g, rows][None], key[sample, g, cols].mT[None], buffer(g, part.shape))
        for g in range(query.shape[1])
    ]
    if draw is None or noise_scale is None:
        return maps, None
    noise = draw(sample, part.rows, part.cols, query)
    for g, one in enumerate(maps):
        one[0].addcmul_(noise[g], noise_scale[g])
    return maps, noise


def mixed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: Masks,
    dropout: AttentionDropout | None,
    *,
    mixing: Tensor,
    noise_scale: Tensor | None = None,
    draw: Draw | None = None,
) -> Tensor:
    """Attend by softmax_j(Σ_g p_hg (query_g[i] · key_g[j] + s_g ε_gij)).

    Args:
        query: (B, G, N, E), in the compute dtype.
        key: (B, G, L, E).
        value: (B, H, L, E_v).
        masks: what each query may see; a bias gets its gradient.
        dropout: drawn again in backward.
        mixing: p, (H, G).
        noise_scale: s, (G,), with `draw`.
        draw: ε, drawn again in backward.

    Returns:
        (B, H, N, E_v).
    """
    return tiled_attention(
        *(query, key[:, None], value, masks, dropout),
        reduction="sum",
        heads=value.shape[1],
        components=query.shape[1],
        coef=mixing,
        noise_scale=noise_scale,
        noise=None if draw is None else (draw.key, draw.first_row),
    )


class _Inputs(NamedTuple):
    """Tensors of `_Mixed`, the words of its noise, and the fields of `PairCall`."""

    query: Tensor
    key: Tensor
    value: Tensor
    coef: Tensor
    noise_scale: Tensor | None
    bias: Tensor | None
    noise: Tensor | None
    key_mask: Tensor | None
    pair_mask: Tensor | None
    draw: Tensor | None
    is_causal: bool
    heads: int
    threshold: int
    first_row: int

    def parts(self) -> tuple[RowTerms, Draw | None]:
        """Return the terms and the noise."""
        terms = row_terms(self, reduction="sum", num_components=self.query.shape[1], common=True)
        draw = None if self.noise is None else Draw(DrawnKey.of(self.noise), self.first_row)
        return terms, draw


def _run_forward(call: _Inputs) -> Tensor:
    terms, draw = call.parts()
    return _forward(terms, draw, call.query, call.key, call.value, call.noise_scale)


_operator = define_row_operator(
    "rows_mixed",
    _Inputs,
    _run_forward,
    lambda call, *given: _backward(*call.parts(), *given),
    gradients=("query", "key", "value", "coef", "noise_scale", "bias"),
)
