"""Kernels of `lowering.py`: moved points with their terms, and the gradients of the inputs.

The term of component r of a point p, query or key, is

    s_r p · b_r + n_r ‖p‖² + o_r

    queries     s = τ_r      n = −(τ_r − τ_0) / 2    o = 0
    keys        s = −τ_r     n = −τ_r / 2            o = o_r − τ_r ‖b_r‖² / 2        gaussian
                s = 0        n = 0                   o = o_r                         otherwise

A program computes one tile of points. Kernels use no atomics: each writes its part of sums over
points. τ_0 gets no gradient here: the gradients of a query's terms add up to 0, as in any softmax.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from lit_probattn.kernels.tiles import (
    load_rows,
    load_vector,
    number,
    store_rows,
    store_vector,
    zero_vector,
)


@triton.jit
def _place(queries, keys, BLOCK: tl.constexpr):
    """Return sample, key head, head, first point, index of the part, whether it is a query tile.

    Programs of a sample and key head are ordered: tiles of its query heads, then of its keys.
    """
    row_tiles = tl.maximum(tl.cdiv(number(queries.num_points), BLOCK), 1)
    key_heads = number(keys.num_heads)
    group = number(queries.num_heads) // key_heads
    of_queries = group * tl.cdiv(number(queries.num_points), BLOCK)
    programs = of_queries + tl.cdiv(number(keys.num_points), BLOCK)
    index, owner = tl.program_id(0) % programs, tl.program_id(0) // programs
    b, key_head, is_query = owner // key_heads, owner % key_heads, index < of_queries
    head = tl.where(is_query, key_head * group + index // row_tiles, key_head)
    tile = tl.where(is_query, index % row_tiles, index - of_queries)
    b, key_head, head = tl.cast(b, tl.int64), tl.cast(key_head, tl.int64), tl.cast(head, tl.int64)
    return b, key_head, head, tile * BLOCK, b * programs + index, is_query


@triton.jit
def _load(x, b, head, product, start, length, form: tl.constexpr, BLOCK: tl.constexpr):
    base = x.base + b * x.batch + head * x.head + product * x.part
    return load_rows(base, start, x.row, length, form.key_dim, form.key_pad, BLOCK, True)


@triton.jit
def _store(x, tile, b, head, product, start, length, form: tl.constexpr, BLOCK: tl.constexpr):
    base = x.base + b * x.batch + head * x.head + product * x.part
    store_rows(base, tile, start, x.row, length, form.key_dim, form.key_pad, BLOCK)


@triton.jit
def _centre(key, b, key_head, num_keys, form: tl.constexpr, SAMPLE: tl.constexpr):
    """Return the mean of a head's keys at SAMPLE evenly spaced positions.

    Distances are invariant to the subtracted vector, and norms lose fewer digits.
    """
    PRODUCTS: tl.constexpr = form.products
    index, cols = tl.arange(0, SAMPLE).to(tl.int64) * num_keys // SAMPLE, tl.arange(0, form.key_pad)
    inside = (index < num_keys)[:, None] & (cols < form.key_dim)[None, :]
    total = zero_vector(form.key_pad)
    for r in tl.static_range(PRODUCTS):
        base = key.base + b * key.batch + key_head * key.head + r * key.part
        at = base + index[:, None] * key.row + cols[None, :]
        total += tl.sum(tl.load(at, mask=inside, other=0.0).to(tl.float32), 0)
    return total / (SAMPLE * PRODUCTS)


@triton.jit
def _numbers(NUMBERS, key_head, r, form: tl.constexpr, QUERIES: tl.constexpr):
    """Return s_r, n_r, o_r and b_r of queries or keys, and τ_r."""
    SLOTS: tl.constexpr = 2 + form.key_dim if form.shifted else 2
    first = NUMBERS + key_head * form.components * SLOTS
    at, shift = first + r * SLOTS, zero_vector(form.key_pad)
    tau, offset = tl.load(at), tl.load(at + 1)
    if form.shifted:
        shift = load_vector(at + 2, 0, form.key_dim, 0.0, form.key_pad)
    along, square = tau * 0.0, tau * 0.0
    if QUERIES:
        along, offset = tau, tau * 0.0  # an offset may be -inf
        square = (tl.load(first) - tau) * (0.5 if form.gaussian else 0.0)
    elif form.gaussian:
        along, square, offset = -tau, tau * -0.5, offset - tau * 0.5 * tl.sum(shift * shift, 0)
    return along, square, offset, shift, tau


@triton.jit
def _terms_tile(
    x, NUMBERS, centre, at, form: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write a tile of moved points (for keys, of every component) and its terms."""
    K: tl.constexpr = form.components
    PRODUCTS: tl.constexpr = 1 if QUERIES else form.products
    b, key_head, head, start, _ = at
    length, terms = number(x.num_points), (b * number(x.num_heads) + head) * K
    for product in tl.static_range(PRODUCTS):
        points = _load(x.given, b, head, product, start, length, form, BLOCK)
        points = (points.to(tl.float32) - centre[None, :]).to(points.dtype)
        _store(x.moved, points, b, head, product, start, length, form, BLOCK)
        wide = points.to(tl.float32)
        squares = tl.sum(wide * wide, 1)
        for r in tl.static_range(K if x.terms is not None else 0):
            if PRODUCTS == 1 or r == product:
                along, square, offset, shift, _ = _numbers(NUMBERS, key_head, r, form, QUERIES)
                term = offset + square * squares
                if form.shifted:
                    term += along * tl.sum(wide * shift[None, :], 1)
                store_vector(x.terms + (terms + r) * length, term, start, length, BLOCK)


@triton.jit
def terms_kernel(queries, keys, NUMBERS, form: tl.constexpr, BLOCK: tl.constexpr):
    """Write moved points and terms of one tile of queries or of keys."""
    b, key_head, head, start, part, is_query = _place(queries, keys, BLOCK)
    at, centre = (b, key_head, head, start, part), zero_vector(form.key_pad)
    if form.gaussian:
        centre = _centre(keys.given, b, key_head, number(keys.num_points), form, 64)
    if is_query:
        _terms_tile(queries, NUMBERS, centre, at, form, True, BLOCK)
    else:
        _terms_tile(keys, NUMBERS, centre, at, form, False, BLOCK)


@triton.jit
def _gradients_tile(
    x, NUMBERS, PARTS, count, at, form: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the gradient of a tile of points, and its part of the sums for τ_r, o_r and b_r."""
    K: tl.constexpr = form.components
    PRODUCTS: tl.constexpr = 1 if QUERIES else form.products
    MINUS_HALF: tl.constexpr = -0.5 if form.gaussian else 0.0
    SLOTS: tl.constexpr = 2 + form.key_dim if form.shifted else 2
    b, key_head, head, start, part = at
    length, terms = number(x.num_points), (b * number(x.num_heads) + head) * K
    for product in tl.static_range(PRODUCTS):
        points = _load(x.moved, b, head, product, start, length, form, BLOCK).to(tl.float32)
        total = _load(x.grad, b, head, product, start, length, form, BLOCK).to(tl.float32)
        for r in tl.static_range(K):
            if PRODUCTS == 1 or r == product:
                along, square, _, shift, tau = _numbers(NUMBERS, key_head, r, form, QUERIES)
                term = zero_vector(BLOCK)
                if x.terms is not None:
                    term = load_vector(x.terms + (terms + r) * length, start, length, 0.0, BLOCK)
                total += (2.0 * square * term)[:, None] * points
                for_along, for_shift = 0.0, zero_vector(form.key_pad)
                if form.shifted:
                    total += (along * term)[:, None] * shift[None, :]
                    for_along = tl.sum(term * tl.sum(points * shift[None, :], 1), 0)
                    for_shift = along * tl.sum(points * term[:, None], 0)
                for_tau = tl.sum(term * tl.sum(points * points, 1), 0) * MINUS_HALF
                for_offset = tl.sum(term, 0)
                if QUERIES:
                    for_tau, for_offset = for_tau + for_along, 0.0
                elif form.gaussian:
                    for_tau -= for_along + 0.5 * for_offset * tl.sum(shift * shift, 0)
                    for_shift -= tau * for_offset * shift
                if PARTS is not None:
                    to = PARTS + (key_head * K + r) * SLOTS * count + part
                    tl.store(to, for_tau)
                    tl.store(to + count, for_offset)
                    if form.shifted:
                        cols = tl.arange(0, form.key_pad)
                        to += (2 + cols).to(tl.int64) * count
                        tl.store(to, for_shift, mask=cols < form.key_dim)
        _store(x.given, total, b, head, product, start, length, form, BLOCK)


@triton.jit
def terms_backward_kernel(
    queries, keys, NUMBERS, PARTS, num_parts, form: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the gradients of a tile of queries or keys: dp + Σ_r dterm_r (s_r b_r + 2 n_r p).

    It also writes its part of the sums for `numbers`, over the `num_parts` programs of a key head.
    """
    b, key_head, head, start, part, is_query = _place(queries, keys, BLOCK)
    at, count = (b, key_head, head, start, part), number(num_parts)
    if is_query:
        _gradients_tile(queries, NUMBERS, PARTS, count, at, form, True, BLOCK)
    else:
        _gradients_tile(keys, NUMBERS, PARTS, count, at, form, False, BLOCK)
