"""Mixtures of Gaussian keys as PyTorch operators that take points, not terms of scores.

s_ijr = τ_r query_i · key_jr + row_ir + col_jr, whose terms `terms.py` computes and differentiates.
Saved are the inputs, the output and one number per row; the terms are computed again in backward.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_probattn.kernels.dense.operators import (
    Derived,
    MixtureInputs,
    Room,
    Spread,
    is_factored,
    make_arguments,
    new_outputs,
    run_backward,
    run_forward,
)
from lit_probattn.kernels.operator import define_operators, new_gradients
from lit_probattn.kernels.runtime import head_rows, launch, unit_stride, unseen

_GRADIENTS = ("query", "key", "value", "precision", "offset", "shift", "bias")
_BLOCK = 64  # points of a program that makes terms


class PointInputs(NamedTuple):
    """The arguments of the operator; see `mgk_attention`, `PairOptions` for the rest.

    Args:
        query: (B, H, N, E).
        key: (B, H_key, K, L, E), or K = 1 with `shift`.
        value: (B, H_kv, L, E_v); H_kv divides H_key, which divides H.
        precision: τ, (H_key, K), float32.
        offset: (H_key, K, 1 or L), float32, or None.
        shift: b_r, (H_key, K, E), or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    precision: Tensor
    offset: Tensor | None
    shift: Tensor | None
    bias: Tensor | None
    key_mask: Tensor | None
    pair_mask: Tensor | None
    draw: Tensor | None
    gaussian: bool
    equal_precision: bool
    hard: bool
    is_causal: bool
    threshold: int


class TermSizes(NamedTuple):
    """What the kernel that makes terms reads beside tensors; counts are `unseen`."""

    num_queries: int
    num_keys: int
    num_key_heads: int
    heads_per_key: int
    end: None = None  # see `runtime.Pairs`


class Terms(NamedTuple):
    """What kernels need to differentiate terms.

    Args:
        parts: sums over points of every program, (H_key, K, slots, places); slots are precision,
            offset and the entries of the shift. None where nobody wants them.
        first: the place of the first tile of keys, after those of queries.
    """

    shift: Tensor | None
    parts: Tensor | None
    places: int
    first: int
    end: None = None  # see `runtime.Pairs`


def _with_terms(x: PointInputs) -> tuple[MixtureInputs, Derived]:
    """Return scores with terms of their own, and what is known of these."""
    from lit_probattn.kernels.dense.terms import terms_kernel

    query, key, shift = unit_stride(x.query), unit_stride(x.key), x.shift
    (batch, heads, rows, _), components = query.shape, x.precision.shape[1]
    key_heads, num_keys = key.shape[1], key.shape[3]
    row = col = moved_query = moved_key = spread = None
    has_rows = x.gaussian and not x.equal_precision and components > 1
    if shift is not None or has_rows:
        row = query.new_empty(batch, heads, components, rows, dtype=torch.float32)
    if x.gaussian or shift is not None or x.offset is not None:
        col = query.new_empty(batch, key_heads, components, num_keys, dtype=torch.float32)
    if x.gaussian:
        moved_query, moved_key = query.new_empty(query.shape), key.new_empty(key.shape)
    inner = MixtureInputs(
        query=query if moved_query is None else moved_query,
        key=key if moved_key is None else moved_key,
        value=x.value,
        scales=x.precision,
        row_bias=row,
        key_bias=col,
        bias=x.bias,
        key_mask=x.key_mask,
        pair_mask=x.pair_mask,
        draw=x.draw,
        scale=1.0,
        is_causal=x.is_causal,
        hard=x.hard,
        equal_scales=x.equal_precision,
        threshold=x.threshold,
    )
    if col is None or not rows or not num_keys:
        return inner, Derived(None, x.gaussian)
    row_tiles, col_tiles = math.ceil(rows / _BLOCK), math.ceil(num_keys / _BLOCK)
    if is_factored(inner):
        spread = Spread(
            query.new_empty(batch, heads, row_tiles, dtype=torch.float32),
            query.new_empty(batch, key_heads, col_tiles, dtype=torch.float32),
            unseen(row_tiles),
            unseen(col_tiles),
        )
    derived = Derived(spread, x.gaussian)
    _, form = make_arguments(inner, derived)
    programs = col_tiles
    if row is not None or moved_query is not None:
        programs += row_tiles * (heads // key_heads)
    launch(
        *(terms_kernel, batch * key_heads * programs),
        (
            *(head_rows(query), head_rows(key), x.precision, x.offset, shift),
            *(moved_query, moved_key, row, col, None if spread is None else spread.rows),
            None if spread is None else spread.cols,
            TermSizes(unseen(rows), unseen(num_keys), unseen(key_heads), heads // key_heads),
        ),
        {
            "form": form,
            "PER_KEY": x.offset is not None and x.offset.shape[2] > 1,
            "BLOCK": _BLOCK,
            "num_warps": 4,
        },
    )
    return inner, derived


def _contiguous(x: PointInputs) -> PointInputs:
    """Return the inputs with parameters as kernels read them."""
    offset, shift = (None if p is None else p.contiguous() for p in (x.offset, x.shift))
    return x._replace(precision=x.precision.contiguous(), offset=offset, shift=shift)


def _forward(x: PointInputs) -> tuple[Tensor, Tensor]:
    return run_forward(*_with_terms(_contiguous(x)))


def _backward(
    x: PointInputs, grad_out: Tensor, out: Tensor, normaliser: Tensor, skipped: list[str]
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key, value, precision, offset, shift and bias."""
    from lit_probattn.kernels.dense.terms import sum_parts_kernel

    grads = new_gradients(x, _GRADIENTS, skipped, keep_strides=True)
    if not out.numel() or not x.key.shape[3]:
        return tuple(grad.zero_() for grad in grads)
    query, key, value, *_, bias = grads
    precision, offset, shift = wanted = [grad if grad.numel() else None for grad in grads[3:6]]
    x = _contiguous(x)
    inner, derived = _with_terms(x)
    (batch, heads, rows, width), (_, key_heads, _, num_keys, _) = x.query.shape, x.key.shape
    components, per_key = x.precision.shape[1], None
    if offset is not None and offset.shape[2] > 1:
        per_key = query.new_empty(batch, key_heads, components, num_keys, dtype=torch.float32)
    slots = 2 if x.shift is None else 2 + width
    made: list[Tensor] = []

    def terms(block_q: int, block_k: int) -> Terms:
        first = 0
        if inner.row_bias is not None:
            first = batch * (heads // key_heads) * math.ceil(rows / block_q)
        places = first + batch * math.ceil(num_keys / block_k)
        if any(grad is not None for grad in wanted):
            made.append(query.new_empty(key_heads, components, slots, places, dtype=torch.float32))
        return Terms(x.shift, made[0] if made else None, unseen(places), unseen(first))

    # Precisions that want a gradient need that of the products, per key, as a flag only.
    room = Room(query, key, value, None, per_key, precision, bias if bias.numel() else None)
    run_backward(inner, room, (grad_out, out, normaliser), replace(derived, terms=terms))
    if made:
        launch(
            *(sum_parts_kernel, key_heads * components * slots),
            (made[0], precision, None if per_key is not None else offset, shift)
            + (made[0].shape[3], slots),
            {"BLOCK": 256, "num_warps": 4},
        )
    if per_key is not None:
        torch.sum(per_key, 0, out=offset)
    return grads


def _flops(x: Any, backward: bool) -> int:
    """Return FLOPs of scores, and of weights · values; twice the latter and thrice the former.

    Shifts meet every query once, and with Gaussian scores every key; twice that in backward.
    """
    batch, heads, rows, width = x.query
    pairs = 2 * batch * heads * rows * x.key[3]
    scores, values = pairs * x.key[2] * width, pairs * x.value[-1]
    shifts = 0
    if x.shift is not None:
        points = heads * rows + (x.key[1] * x.key[3] if x.gaussian else 0)
        shifts = 2 * batch * points * x.precision[1] * width
    return 3 * scores + 2 * values + 2 * shifts if backward else scores + values + shifts


point_attention = define_operators(
    ("point_attention", "point_attention_backward"),
    PointInputs,
    _forward,
    _backward,
    new_outputs=new_outputs,
    gradients=_GRADIENTS,
    flops=_flops,
    optional=(("precision",), ("offset",), ("shift",), ("bias",)),
    keep_strides=True,
)
