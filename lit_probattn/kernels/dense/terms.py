"""Terms of scores that are functions of queries, keys and shifts, and their gradients.

    row_ir = τ_r query_i · b_r [− (τ_r − τ_0) ‖query_i‖² / 2]
    col_jr = offset_jr [− τ_r ‖key_jr + b_r‖² / 2]              (brackets: Gaussian scores)

One launch moves query and key of Gaussian scores by a vector of their head, rounds them, and writes
the terms of the rounded ones. Backward has no launch for the points: the kernels that own a tile of
queries or keys add −τ_r dcol_jr (key_jr + b_r) and the like before they store its gradient, and
write their parts of the sums over points, which one small launch adds.

`call` is a `DenseArguments`, `form` a `Form` of operators.py, `terms` a `Terms` of points.py.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from lit_probattn.kernels.dense.tiles import largest
from lit_probattn.kernels.tiles import (
    LOG2E,
    load_head,
    load_rows,
    load_vector,
    number,
    store_rows,
    store_vector,
    zero_tile,
    zero_vector,
)


@triton.jit
def _shift(SHIFT, key_head, r, form: tl.constexpr):
    """Load b_r of a head."""
    at = SHIFT + (key_head * form.components + r) * form.key_dim
    return load_vector(at, 0, form.key_dim, 0.0, form.key_pad).to(tl.float32)


@triton.jit
def _centre(key, b, key_head, num_keys, form: tl.constexpr, SAMPLE: tl.constexpr):
    """Return the mean of keys of a head: of all, or of SAMPLE positions spread over them.

    Distances do not change whatever vector is taken off, and norms lose fewer digits.
    """
    PRODUCTS: tl.constexpr = form.products
    index, cols = tl.arange(0, SAMPLE), tl.arange(0, form.key_pad)
    index = tl.where(
        num_keys > SAMPLE, (index.to(tl.int64) * num_keys // SAMPLE).to(tl.int32), index
    )
    inside = (index < num_keys)[:, None] & (cols < form.key_dim)[None, :]
    total = zero_vector(form.key_pad)
    for r in tl.static_range(PRODUCTS):
        base = key.base + b * key.batch + key_head * key.head + r * key.part
        at = base + index.to(tl.int64)[:, None] * key.row + cols[None, :]
        total += tl.sum(tl.load(at, mask=inside, other=0.0).to(tl.float32), 0)
    count = tl.minimum(tl.maximum(num_keys, 1), SAMPLE) * PRODUCTS
    return total / count.to(tl.float32)


@triton.jit
def _store_spread(SPREAD, at, terms, start, length, BLOCK: tl.constexpr):
    """Store the largest difference of a point's terms, in log 2; none where all are -inf."""
    if SPREAD is not None:
        top, low = largest(terms), terms[0]
        for r in tl.static_range(1, len(terms)):
            low = tl.minimum(low, terms[r])
        inside = start + tl.arange(0, BLOCK) < length
        found = tl.where(inside & (top > float("-inf")), top - low, 0.0)
        tl.store(SPREAD + at, tl.max(found, 0) * LOG2E)


@triton.jit
def _query_terms(
    query, TAU, SHIFT, moved, ROW, SPREAD, centre, b, h, key_head, place, tile, length, num_tiles,
    form: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a tile of moved queries of a head, its terms and their spread."""
    K: tl.constexpr = form.components
    row = tile * BLOCK
    points = load_head(query, b, h, row, length, form.key_dim, form.key_pad, BLOCK, True)
    if moved is not None:
        points = (points.to(tl.float32) - centre[None, :]).to(points.dtype)
        store_rows(moved + place * length * form.key_dim, points, row, form.key_dim, length,
                   form.key_dim, form.key_pad, BLOCK)  # fmt: skip
    if ROW is not None:
        wide = _without_padding(points, form)
        squares, first, terms = tl.sum(wide * wide, 1), tl.load(TAU + key_head * K), ()
        for r in tl.static_range(K):
            tau = tl.load(TAU + key_head * K + r)
            term = zero_vector(BLOCK)
            if SHIFT is not None:
                term = tl.sum(wide * _shift(SHIFT, key_head, r, form)[None, :], 1) * tau
            if form.gaussian and not form.equal_scales:
                term = term - (tau - first) * 0.5 * squares
            store_vector(ROW + (place * K + r) * length, term, row, length, BLOCK)
            terms = terms + (term,)
        _store_spread(SPREAD, place * num_tiles + tile, terms, row, length, BLOCK)


@triton.jit
def _without_padding(points, form: tl.constexpr):
    """Return points in float32 with zeros in columns that are only there to fill a tile."""
    width = tl.arange(0, form.key_pad) < form.key_dim
    return tl.where(width[None, :], points.to(tl.float32), 0.0)


@triton.jit
def _moved_keys(
    key, moved, centre, b, key_head, place, r: tl.constexpr, col, length, form: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a tile of moved keys of component r; return them in float32."""
    base = key.base + b * key.batch + key_head * key.head + r * key.part
    found = load_rows(base, col, key.row, length, form.key_dim, form.key_pad, BLOCK, True)
    found = (found.to(tl.float32) - centre[None, :]).to(found.dtype)
    base = moved + (place * form.products + r) * length * form.key_dim
    store_rows(base, found, col, form.key_dim, length, form.key_dim, form.key_pad, BLOCK)
    return _without_padding(found, form)


@triton.jit
def _key_terms(
    key, TAU, OFFSET, SHIFT, moved, COL, SPREAD, centre, b, key_head, place, tile, length,
    num_tiles, form: tl.constexpr, PER_KEY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a tile of moved keys of all components, its terms and their spread."""
    K: tl.constexpr = form.components
    PRODUCTS: tl.constexpr = form.products
    col, points, terms = tile * BLOCK, zero_tile(BLOCK, form.key_pad), ()
    for r in tl.static_range(K):
        if r < PRODUCTS and form.gaussian:
            points = _moved_keys(
                key, moved, centre, b, key_head, place, r, col, length, form, BLOCK
            )
        term = zero_vector(BLOCK)
        if OFFSET is not None:
            if PER_KEY:
                at = OFFSET + (key_head * K + r) * length
                term = term + load_vector(at, col, length, 0.0, BLOCK)
            else:
                term = term + tl.load(OFFSET + key_head * K + r)
        if form.gaussian:
            apart = points
            if SHIFT is not None:
                apart = points + _shift(SHIFT, key_head, r, form)[None, :]
            term = term - tl.load(TAU + key_head * K + r) * 0.5 * tl.sum(apart * apart, 1)
        store_vector(COL + (place * K + r) * length, term, col, length, BLOCK)
        terms = terms + (term,)
    _store_spread(SPREAD, place * num_tiles + tile, terms, col, length, BLOCK)


@triton.jit
def terms_kernel(
    query, key, TAU, OFFSET, SHIFT, moved_query, moved_key, ROW, COL, ROW_SPREAD, COL_SPREAD,
    sizes, form: tl.constexpr, PER_KEY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write moved points and terms of one tile of queries or of keys.

    A program is one of those of a key head: query tiles of the heads that share it, then key tiles.
    OFFSET is (H_key, K, L if PER_KEY, else 1); what is None is not made.
    """
    num_queries, num_keys = number(sizes.num_queries), number(sizes.num_keys)
    num_key_heads, group = number(sizes.num_key_heads), sizes.heads_per_key
    row_tiles, col_tiles = tl.cdiv(num_queries, BLOCK), tl.cdiv(num_keys, BLOCK)
    first_key = 0
    if moved_query is not None or ROW is not None:
        first_key = group * row_tiles
    index, place = (
        tl.program_id(0) % (first_key + col_tiles),
        tl.program_id(0) // (first_key + col_tiles),
    )
    b, key_head = (place // num_key_heads).to(tl.int64), (place % num_key_heads).to(tl.int64)
    centre = zero_vector(form.key_pad)
    if moved_key is not None:
        centre = _centre(key, b, key_head, num_keys, form, 64)
    if index < first_key:
        h = key_head * group + index // row_tiles
        _query_terms(query, TAU, SHIFT, moved_query, ROW, ROW_SPREAD, centre, b, h, key_head,
                     b * num_key_heads * group + h, index % row_tiles, num_queries, row_tiles,
                     form, BLOCK)  # fmt: skip
    else:
        _key_terms(key, TAU, OFFSET, SHIFT, moved_key, COL, COL_SPREAD, centre, b, key_head,
                   b * num_key_heads + key_head, index - first_key, num_keys, col_tiles,
                   form, PER_KEY, BLOCK)  # fmt: skip


@triton.jit
def _store_parts(terms, place, key_head, r, precision, offset, shift, form: tl.constexpr):
    """Store a program's part of the sums for τ_r, its offset, and b_r."""
    places = number(terms.places)
    slots = 2
    if terms.shift is not None:
        slots = 2 + form.key_dim
    at = terms.parts + (key_head * form.components + r) * slots * places + place
    tl.store(at, precision)
    tl.store(at + places, offset)
    if terms.shift is not None:
        cols = tl.arange(0, form.key_pad)
        tl.store(at + (2 + cols).to(tl.int64) * places, shift, mask=cols < form.key_dim)


@triton.jit
def _load_again(base, stride, start, limit, form: tl.constexpr, BLOCK: tl.constexpr):
    """Load a tile of points after the loop, in float32.

    Its addresses are not written as in `load_rows`: the compiler would take them for those of
    before the loop, and keep them in registers over it.
    """
    index, cols = start + tl.arange(0, BLOCK), tl.arange(0, form.key_pad)
    inside = (index[:, None] < limit) & (cols[None, :] < form.key_dim)
    offsets = index[:, None].to(tl.int64) * stride + cols[None, :]
    return tl.load(base + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def add_query_terms(
    call, terms, grad_query, grad_row, b, h, key_head, row, form: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the gradient of a tile of queries with that of its terms."""
    K: tl.constexpr = form.components
    if call.row is not None:
        first, along = tl.load(call.scales + key_head * K), zero_vector(BLOCK)
        for r in tl.static_range(K):
            tau = tl.load(call.scales + key_head * K + r)
            if terms.shift is not None:
                shift = _shift(terms.shift, key_head, r, form)
                grad_query += (grad_row[r] * tau)[:, None] * shift[None, :]
            along += (tau - first) * grad_row[r]
        if form.gaussian and not form.equal_scales:
            base = call.query.base + b * call.query.batch + h * call.query.head
            length = number(call.pairs.num_queries)
            query = _load_again(base, call.query.row, row, length, form, BLOCK)
            grad_query -= along[:, None] * query
    return grad_query


@triton.jit
def store_query_sums(
    call, terms, grad_row, b, h, key_head, row, form: tl.constexpr, BLOCK: tl.constexpr
):
    """Store a tile's parts of the sums over queries, after its gradient: both do not fit."""
    K: tl.constexpr = form.components
    if call.row is not None and terms.parts is not None:
        length, group = number(call.pairs.num_queries), call.heads_per_key
        base = call.query.base + b * call.query.batch + h * call.query.head
        query = _load_again(base, call.query.row, row, length, form, BLOCK)
        squares = tl.sum(query * query, 1)
        place = ((b * group + h % group) * tl.cdiv(length, BLOCK)) + row // BLOCK
        for r in tl.static_range(K):
            factor, for_shift = zero_vector(BLOCK), zero_vector(form.key_pad)
            if terms.shift is not None:
                shift = _shift(terms.shift, key_head, r, form)
                factor = tl.sum(query * shift[None, :], 1)
                tau = tl.load(call.scales + key_head * K + r)
                for_shift = tl.sum(query * grad_row[r][:, None], 0) * tau
            if form.gaussian and not form.equal_scales:
                factor = factor - 0.5 * squares
            total = tl.sum(grad_row[r] * factor, 0)
            _store_parts(terms, place, key_head, r, total, 0.0, for_shift, form)


@triton.jit
def add_key_terms(
    call, terms, grad_key, grad_col, b, key_head, col, product: tl.constexpr, form: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the gradient of a tile of keys with that of its terms."""
    K: tl.constexpr = form.components
    if form.gaussian:
        along = zero_vector(BLOCK)
        for r in tl.static_range(K):
            if form.products == 1 or r == product:
                weight = grad_col[r] * tl.load(call.scales + key_head * K + r)
                along += weight
                if terms.shift is not None:
                    shift = _shift(terms.shift, key_head, r, form)
                    grad_key -= weight[:, None] * shift[None, :]
        grad_key -= along[:, None] * _keys_again(call, b, key_head, col, product, form, BLOCK)
    return grad_key


@triton.jit
def store_key_sums(
    call, terms, grad_col, grad_scale, b, key_head, col, product: tl.constexpr,
    WANTS_SCALES: tl.constexpr, form: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a tile's parts of the sums over keys, after its gradient: both do not fit."""
    K: tl.constexpr = form.components
    if terms.parts is not None:
        num_keys = number(call.pairs.num_keys)
        key = _keys_again(call, b, key_head, col, product, form, BLOCK)
        # Keys past the last one have numbers of no meaning here.
        inside = col + tl.arange(0, BLOCK) < num_keys
        place = number(terms.first) + b * tl.cdiv(num_keys, BLOCK) + col // BLOCK
        for r in tl.static_range(K):
            if form.products == 1 or r == product:
                tau = tl.load(call.scales + key_head * K + r)
                grad = tl.where(inside, grad_col[r], 0.0)
                for_scale, for_shift = 0.0, zero_vector(form.key_pad)
                if WANTS_SCALES:
                    for_scale = tl.sum(tl.where(inside, grad_scale[r], 0.0), 0)
                if form.gaussian:
                    moved = key
                    if terms.shift is not None:
                        moved = key + _shift(terms.shift, key_head, r, form)[None, :]
                    for_shift = -tl.sum(moved * (grad * tau)[:, None], 0)
                    for_scale -= 0.5 * tl.sum(grad * tl.sum(moved * moved, 1), 0)
                total = tl.sum(grad, 0)
                _store_parts(terms, place, key_head, r, for_scale, total, for_shift, form)


@triton.jit
def _keys_again(
    call, b, key_head, col, product: tl.constexpr, form: tl.constexpr, BLOCK: tl.constexpr
):
    """Load a tile of keys of a component after the loop, in float32."""
    x = call.key
    base = x.base + b * x.batch + key_head * x.head + product * x.part
    return _load_again(base, x.row, col, number(call.pairs.num_keys), form, BLOCK)


@triton.jit(do_not_specialize=("places", "slots"))
def sum_parts_kernel(PARTS, PRECISION, OFFSET, SHIFT, places, slots, BLOCK: tl.constexpr):
    """Add the parts of one number: PARTS is (H_key · K, slots, places), in the order of places."""
    slot, owner = tl.program_id(0) % slots, tl.program_id(0) // slots
    base = PARTS + tl.program_id(0).to(tl.int64) * places
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, places, BLOCK):
        total += load_vector(base, start, places, 0.0, BLOCK)
    found = tl.sum(total, 0)
    if PRECISION is not None:
        tl.store(PRECISION + owner, found, mask=slot == 0)
    if OFFSET is not None:
        tl.store(OFFSET + owner, found, mask=slot == 1)
    if SHIFT is not None:
        tl.store(SHIFT + owner * (slots - 2) + slot - 2, found, mask=slot >= 2)
