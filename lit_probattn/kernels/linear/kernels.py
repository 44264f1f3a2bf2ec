"""Kernels of linear attention over chunks, with several sources of keys per head.

Head h of H reads S sources of key features f_s and values v_s with weights p[h, s] (numerator) and
r[h, s] (denominator); f_s = Σ_r π_r φ(k_sr) is computed when keys are loaded. Chunk c starts at
position c · T; a segment is several chunks:

    num_h = F_h S_hc + Σ_s p[h, s] tril(F_h f_sᵀ) v_s,   S_hc = Σ_s p[h, s] Σ_{earlier} f_sᵀ v_s
    den_h = F_h z_hc + Σ_s r[h, s] tril(F_h f_sᵀ) 1,     z_hc = Σ_s r[h, s] Σ_{earlier} f_sᵀ 1
    out_h = factor · num_h / (den_h + eps)

Sums of segments are stored; within a segment a program carries its state from chunk to chunk.
Without weights, H/S adjacent heads share one source. Calls that are not causal omit the products
within a chunk: every chunk reads the total sums. States are float32. Products of 16-bit inputs with
states or gradients use TF32, which has float16's digits and float32's range; sums over thousands of
positions, and gradients divided by them, need both.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from lit_probattn.kernels.linear.tiles import (
    chunks_of,
    feature_gradient,
    features_of,
    kept_values,
    key_features,
    key_share,
    load_gradient,
    load_inverse,
    load_key,
    load_numbers,
    load_query,
    load_state,
    load_total,
    load_values,
    mixed_key,
    mixed_state,
    query_features,
    real_keys,
    segment_program,
    store_numbers,
    store_positions,
    store_state,
    store_total,
    sums_place,
    weight_of,
)
from lit_probattn.kernels.tiles import number, zero_tile, zero_vector


@triton.jit
def chunk_sums_kernel(call, SUMS, form: tl.constexpr):
    """Write Σ_j f_j v_jᵀ and Σ_j f_j of one segment of one source."""
    segment, b, source = segment_program(call, number(call.num_sources))
    sums, totals = zero_tile(form.key_pad, form.value_pad), zero_vector(form.key_pad)
    for step in range(0, chunks_of(call, segment, form)):
        chunk = segment * (form.segment // form.chunk) + step
        keys = key_features(call, b, source, chunk, form).to(tl.float32)
        values = load_values(call, b, source, chunk, 0, form.value_pad, form).to(tl.float32)
        sums = tl.dot(tl.trans(keys), values, sums, input_precision=form.precision)
        totals += tl.sum(keys, 0)
    place = b * number(call.num_sources) + source
    base = sums_place(SUMS, place, segment, call, form)
    store_state(base, sums, 0, form.value_pad, form)
    store_total(base, totals, form)


@triton.jit(do_not_specialize=("num_segments", "num_sources", "cells", "size"))
def scan_kernel(
    SUMS, OUT, START, END, WEIGHT, NORM_WEIGHT, num_segments, num_sources, cells, size,
    READERS: tl.constexpr, REVERSE: tl.constexpr, TOTAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sums of all segments before each one (after it: REVERSE; TOTAL: of all, once).

    SUMS is (B, sources · READERS or heads, segments, size), OUT (B, sources, segments or 1, size):
    READERS heads are added, weighted by their weights for the first `cells` numbers, then by their
    weights for totals. START (B, sources, cells) is the sum before the first segment, and END the
    sum after the last.
    """
    blocks = tl.cdiv(size, BLOCK)
    place = (tl.program_id(0) // blocks).to(tl.int64)
    b, source = place // num_sources, place % num_sources
    heads = READERS if WEIGHT is not None else num_sources * READERS
    index = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    running = tl.zeros((BLOCK,), tl.float32)
    if START is not None:
        running = tl.load(START + place * cells + index, mask=index < cells, other=0.0)
    for step in tl.range(0, num_segments, num_stages=4):
        segment = num_segments - 1 - step if REVERSE else step
        if not TOTAL:
            tl.store(OUT + (place * num_segments + segment) * size + index, running, mask=inside)
        for g in tl.range(0, READERS):
            head = g if WEIGHT is not None else source * READERS + g
            at = SUMS + ((b * heads + head) * num_segments + segment) * size + index
            found = tl.load(at, mask=inside, other=0.0)
            if WEIGHT is not None:
                weight = tl.load(WEIGHT + head * num_sources + source)
                if NORM_WEIGHT is not None:
                    other = tl.load(NORM_WEIGHT + head * num_sources + source)
                    found *= tl.where(index < cells, weight, other)
                else:
                    found *= weight
            running += found
    if TOTAL:
        tl.store(OUT + place * size + index, running, mask=inside)
    if END is not None:
        tl.store(END + place * cells + index, running, mask=index < cells)


@triton.jit
def read_kernel(call, STATES, out, DEN, SOURCES: tl.constexpr, form: tl.constexpr):
    """Write the output (B, H, N, E) and den (B, H, N) of one segment of one head."""
    segment, b, head = segment_program(call, number(call.num_heads))
    index = tl.arange(0, form.chunk)
    state, total = mixed_state(STATES, call, b, head, segment, SOURCES, form)
    num_rows = number(call.num_queries)
    for step in range(0, chunks_of(call, segment, form)):
        chunk = segment * (form.segment // form.chunk) + step
        rows = query_features(call, b, head, chunk, form)
        wide = rows.to(tl.float32)
        num = tl.dot(wide, state, input_precision=form.precision)
        den = tl.sum(wide * total[None, :], 1)
        if form.causal:
            for g in tl.range(0, SOURCES):
                source = g if call.weight is not None else head // form.readers
                weight = weight_of(call.weight, head, source, number(call.num_sources))
                other = weight_of(call.norm_weight, head, source, number(call.num_sources))
                keys = key_features(call, b, source, chunk, form)
                values = load_values(call, b, source, chunk, 0, form.value_pad, form)
                pairs = tl.dot(rows, tl.trans(keys), input_precision="ieee")
                pairs = tl.where(index[:, None] >= index[None, :], pairs, 0.0)
                num += weight * tl.dot(pairs.to(values.dtype), values, input_precision="ieee")
                den += other * tl.sum(pairs, 1)
                if form.segment > form.chunk:
                    keys, values = keys.to(tl.float32), values.to(tl.float32)
                    part = tl.dot(tl.trans(keys), values, input_precision=form.precision)
                    state += weight * part
                    total += other * tl.sum(keys, 0)
        start = chunk * form.chunk - number(call.query_start)
        place = b * number(call.num_heads) + head
        if form.totals:
            store_numbers(DEN + place * num_rows, den, start, num_rows, form.chunk)
        if form.divides:
            empty = den == 0.0
            num = num * tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, den + call.eps))[:, None]
        base = out.base + b * out.batch + tl.cast(head, tl.int64) * out.head
        store_positions(base, num * call.factor, start, out.row, num_rows,
                        form.value_dim, form.value_pad, form.chunk)  # fmt: skip


@triton.jit
def query_gradient_kernel(
    call, STATES, grad_out, DEN, DQ, DDEN, LATER, SUMS, SOURCES: tl.constexpr, form: tl.constexpr
):
    """Write dq of one segment of one head, dden, and the gradients of keys from later positions.

    With X_s the part of numerators in dF and X'_s of denominators, dF = Σ_s p X_s + r dden X'_s and
    num · dnum = Σ_s p F · X_s for every row: dden is computed from X, so the rounded output is not
    read. LATER gets Σ_i F_i dnum_iᵀ and Σ_i F_i dden_i of the segment. The gradient of p[h, s] is
    Σ_i F_i · X_si, of r[h, s] Σ_i dden_i F_i · X'_si: SUMS is (B, H, segments, 2, S), with segments
    of one chunk. Such segments read their state and write LATER by columns, because neither fits
    into registers.
    """
    segment, b, head = segment_program(call, number(call.num_heads))
    index = tl.arange(0, form.chunk)
    earlier = index[:, None] >= index[None, :]
    place = b * number(call.num_heads) + head
    num_rows, num_sources = number(call.num_queries), number(call.num_sources)
    carries: tl.constexpr = form.segment > form.chunk
    later_base = sums_place(LATER, place, segment, call, form)
    later_total = zero_vector(form.key_pad)
    if carries:
        state, total = mixed_state(STATES, call, b, head, segment, SOURCES, form)
        later = zero_tile(form.key_pad, form.value_pad)
    slot = SUMS + (place * number(call.num_segments) + segment) * 2 * num_sources
    for step in range(0, chunks_of(call, segment, form)):
        chunk = segment * (form.segment // form.chunk) + step
        start = chunk * form.chunk - number(call.query_start)
        inverse = zero_vector(form.chunk) + 1.0
        if form.divides:
            inverse = load_inverse(call, DEN, place, chunk, form)
        grad = zero_tile(form.chunk, form.key_pad)
        for g in tl.range(0, SOURCES):
            source = g if call.weight is not None else head // form.readers
            at = b * num_sources + source
            own = zero_tile(form.chunk, form.key_pad)
            pairs = zero_tile(form.chunk, form.chunk)
            for first in tl.range(0, form.value_pad, form.columns):
                dnum = load_gradient(call, grad_out, b, head, chunk, first, form.columns, form)
                dnum = dnum * inverse[:, None]
                if carries:
                    own = tl.dot(dnum, tl.trans(state), own, input_precision=form.precision)
                else:
                    one = load_state(STATES, at, segment, first, call, form.columns, form)
                    own = tl.dot(dnum, tl.trans(one), own, input_precision=form.precision)
                if form.causal:
                    values = load_values(call, b, source, chunk, first, form.columns, form)
                    values = tl.trans(values.to(tl.float32))
                    pairs = tl.dot(dnum, values, pairs, input_precision=form.precision)
            if form.causal:
                keys = key_features(call, b, source, chunk, form).to(tl.float32)
                pairs = tl.where(earlier, pairs, 0.0)
                own = tl.dot(pairs, keys, own, input_precision=form.precision)
            grad += own * weight_of(call.weight, head, source, num_sources)
            if call.weight is not None:
                rows = query_features(call, b, head, chunk, form).to(tl.float32)
                tl.store(slot + source, tl.sum(tl.sum(rows * own, 1), 0))
        if form.totals:
            rows = query_features(call, b, head, chunk, form).to(tl.float32)
            dden = -tl.sum(rows * grad, 1) * inverse
            store_numbers(DDEN + place * num_rows, dden, start, num_rows, form.chunk)
            later_total += tl.sum(rows * dden[:, None], 0)
            for g in tl.range(0, SOURCES):
                source = g if call.weight is not None else head // form.readers
                if carries:
                    seen = zero_tile(form.chunk, form.key_pad) + total[None, :]
                else:
                    ones = load_total(STATES, b * num_sources + source, segment, call, form)
                    seen = zero_tile(form.chunk, form.key_pad) + ones[None, :]
                if form.causal:
                    keys = key_features(call, b, source, chunk, form).to(tl.float32)
                    ones = tl.where(earlier, 1.0, 0.0)
                    seen = tl.dot(ones, keys, seen, input_precision=form.precision)
                seen *= dden[:, None]
                grad += seen * weight_of(call.norm_weight, head, source, num_sources)
                if call.weight is not None:
                    rows = query_features(call, b, head, chunk, form).to(tl.float32)
                    share = tl.sum(tl.sum(rows * seen, 1), 0)
                    tl.store(slot + num_sources + source, share)
        x, inside = load_query(call, b, head, chunk, form)
        base = DQ + place * num_rows * form.key_dim
        store_positions(base, feature_gradient(x, grad, inside, form), start, form.key_dim,
                        num_rows, form.key_dim, form.key_pad, form.chunk)  # fmt: skip
        rows = query_features(call, b, head, chunk, form).to(tl.float32)
        for first in tl.range(0, form.value_pad, form.columns):
            dnum = load_gradient(call, grad_out, b, head, chunk, first, form.columns, form)
            dnum = dnum * inverse[:, None]
            if carries:
                later = tl.dot(tl.trans(rows), dnum, later, input_precision=form.precision)
            else:
                part = tl.dot(tl.trans(rows), dnum, input_precision=form.precision)
                store_state(later_base, part, first, form.columns, form)
        if carries and form.causal:
            source = head // form.readers
            keys = key_features(call, b, source, chunk, form).to(tl.float32)
            values = load_values(call, b, source, chunk, 0, form.value_pad, form).to(tl.float32)
            state = tl.dot(tl.trans(keys), values, state, input_precision=form.precision)
            total += tl.sum(keys, 0)
    if carries:
        store_state(later_base, later, 0, form.value_pad, form)
    store_total(later_base, later_total, form)


@triton.jit
def key_gradient_kernel(
    call, STATES, grad_out, DEN, DDEN, DK, DV, PRIOR, SHIFT, form: tl.constexpr
):
    """Write dk and dv of one segment of one source; STATES are sums over later segments.

    In a chunk, dk is stored before dv is computed, because both do not fit into registers.
    PRIOR is (B, S, chunks, K) or, for priors per position, (B, S, K, L); SHIFT (B, S, chunks, K E).
    """
    segment, b, source = segment_program(call, number(call.num_sources))
    index = tl.arange(0, form.chunk)
    later = index[None, :] >= index[:, None]  # (keys, queries)
    at = b * number(call.num_sources) + source
    num_keys = number(call.num_keys)
    carries: tl.constexpr = form.segment > form.chunk
    total = load_total(STATES, at, segment, call, form)
    if carries:
        state = load_state(STATES, at, segment, 0, call, form.value_pad, form)
    num_chunks = chunks_of(call, segment, form)
    for step in range(0, num_chunks):
        chunk = segment * (form.segment // form.chunk) + num_chunks - 1 - step
        start = chunk * form.chunk - number(call.key_start)
        grad = zero_tile(form.chunk, form.key_pad) + total[None, :]
        for first in tl.range(0, form.value_pad, form.columns):
            values = load_values(call, b, source, chunk, first, form.columns, form)
            values = values.to(tl.float32)
            if carries:
                grad = tl.dot(values, tl.trans(state), grad, input_precision=form.precision)
            else:
                one = load_state(STATES, at, segment, first, call, form.columns, form)
                grad = tl.dot(values, tl.trans(one), grad, input_precision=form.precision)
        if form.causal:
            for g in tl.range(0, form.readers):
                head = g if call.weight is not None else source * form.readers + g
                pairs = zero_tile(form.chunk, form.chunk)
                for first in tl.range(0, form.value_pad, form.columns):
                    values = load_values(call, b, source, chunk, first, form.columns, form)
                    values = values.to(tl.float32)
                    dnum = _weighed_gradient(call, grad_out, DEN, b, head, source, chunk, first,
                                             form.columns, form)  # fmt: skip
                    pairs = tl.dot(values, tl.trans(dnum), pairs, input_precision=form.precision)
                if form.totals:
                    dden = _weighed_total(call, DDEN, b, head, source, chunk, form)
                    pairs += dden[None, :]
                pairs = tl.where(later, pairs, 0.0)
                rows = query_features(call, b, head, chunk, form).to(tl.float32)
                grad = tl.dot(pairs, rows, grad, input_precision=form.precision)
        if call.key_mask is not None:
            grad = tl.where(real_keys(call, b, start, form), grad, 0.0)
        _store_keys(call, grad, DK, PRIOR, SHIFT, b, source, chunk, form)

        keys = key_features(call, b, source, chunk, form).to(tl.float32)
        if carries:
            grad = tl.dot(keys, state, input_precision=form.precision)
        else:
            one = load_state(STATES, at, segment, 0, call, form.value_pad, form)
            grad = tl.dot(keys, one, input_precision=form.precision)
        if form.causal:
            for g in tl.range(0, form.readers):
                head = g if call.weight is not None else source * form.readers + g
                rows = query_features(call, b, head, chunk, form).to(tl.float32)
                pairs = tl.dot(keys, tl.trans(rows), input_precision=form.precision)
                pairs = tl.where(later, pairs, 0.0)
                dnum = _weighed_gradient(call, grad_out, DEN, b, head, source, chunk, 0,
                                         form.value_pad, form)  # fmt: skip
                grad = tl.dot(pairs, dnum, grad, input_precision=form.precision)
                if carries:
                    state = tl.dot(tl.trans(rows), dnum, state, input_precision=form.precision)
                    if form.totals:
                        dden = _weighed_total(call, DDEN, b, head, source, chunk, form)
                        total += tl.sum(rows * dden[:, None], 0)
        if call.keep is not None:
            grad *= kept_values(call, b, source, start, form)
        store_positions(DV + at * num_keys * form.value_dim, grad, start, form.value_dim,
                        num_keys, form.value_dim, form.value_pad, form.chunk)  # fmt: skip


@triton.jit
def _weighed_gradient(
    call, grad_out, DEN, b, head, source, chunk, first,
    COLUMNS: tl.constexpr, form: tl.constexpr,
):  # fmt: skip
    """Return columns of p[h, s] dnum of a chunk."""
    weight = weight_of(call.weight, head, source, number(call.num_sources))
    dnum = load_gradient(call, grad_out, b, head, chunk, first, COLUMNS, form) * weight
    if form.divides:
        place = b * number(call.num_heads) + head
        dnum = dnum * load_inverse(call, DEN, place, chunk, form)[:, None]
    return dnum


@triton.jit
def _weighed_total(call, DDEN, b, head, source, chunk, form: tl.constexpr):
    """Return r[h, s] dden of a chunk."""
    start, num_rows = chunk * form.chunk - number(call.query_start), number(call.num_queries)
    base = DDEN + (b * number(call.num_heads) + head) * num_rows
    dden = load_numbers(base, start, num_rows, 0.0, form.chunk)
    return dden * weight_of(call.norm_weight, head, source, number(call.num_sources))


@triton.jit
def _store_keys(call, grad, DK, PRIOR, SHIFT, b, source, chunk, form: tl.constexpr):
    """Store the gradients of a chunk of keys, of its priors and shifts, from feature gradients."""
    COMPONENTS: tl.constexpr = form.components
    start = chunk * form.chunk - number(call.key_start)
    num_keys, at = number(call.num_keys), b * number(call.num_sources) + source
    cols = tl.arange(0, form.key_pad)
    if form.mix_before:
        x, inside = mixed_key(call, b, source, start, form)
        grad = feature_gradient(x, grad, inside, form)
    both = zero_tile(form.chunk, form.key_pad)
    for r in tl.static_range(COMPONENTS):
        x, inside = load_key(call, b, source, start, r, form)
        mine = grad
        if call.prior is not None:
            mine = grad * key_share(call, source, start, r, form)
            y = x
            if not form.mix_before:
                y = features_of(x, inside, form)
            share = tl.sum(tl.where(inside, grad * y, 0.0), 1)
            if form.prior_rows:
                base = PRIOR + (at * COMPONENTS + r) * num_keys
                store_numbers(base, share, start, num_keys, form.chunk)
            else:
                place = (at * number(call.num_chunks) + chunk) * COMPONENTS + r
                tl.store(PRIOR + place, tl.sum(share, 0))
        if not form.mix_before:
            mine = feature_gradient(x, mine, inside, form)
        if call.shift is not None:
            both += mine
            place = (at * number(call.num_chunks) + chunk) * COMPONENTS + r
            own = tl.sum(tl.where(inside, mine, 0.0), 0)
            tl.store(SHIFT + place * form.key_dim + cols, own, mask=cols < form.key_dim)
        else:
            base = DK + (at * COMPONENTS + r) * num_keys * form.key_dim
            store_positions(base, mine, start, form.key_dim, num_keys,
                            form.key_dim, form.key_pad, form.chunk)  # fmt: skip
    if call.shift is not None:
        base = DK + at * num_keys * form.key_dim
        store_positions(base, both, start, form.key_dim, num_keys,
                        form.key_dim, form.key_pad, form.chunk)  # fmt: skip


_COUNTS = ("num_batch", "num_places")
_FIRST = ("first_parts", "first_size", "first_stride")
_SECOND = ("second_parts", "second_size", "second_stride")


@triton.jit(do_not_specialize=(*_COUNTS, *_FIRST, *_SECOND))
def add_parts_kernel(
    FIRST, FIRST_OUT, first_parts, first_size, first_stride,
    SECOND, SECOND_OUT, second_parts, second_size, second_stride,
    num_batch, num_places, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sums of two tensors (B, places, parts, size) over samples and parts.

    A stride is the distance between two parts, at least their size.
    """
    blocks = tl.cdiv(first_size, BLOCK) * num_places
    if tl.program_id(0) < blocks:
        _add_parts(FIRST, FIRST_OUT, tl.program_id(0), num_batch, num_places,
                   first_parts, first_size, first_stride, PARTS, BLOCK)  # fmt: skip
    else:
        _add_parts(SECOND, SECOND_OUT, tl.program_id(0) - blocks, num_batch, num_places,
                   second_parts, second_size, second_stride, PARTS, BLOCK)  # fmt: skip


@triton.jit
def _add_parts(
    TENSOR, OUT, block, num_batch, num_places, num_parts, size, stride,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sums of BLOCK numbers of one place, in float64 and in a fixed order."""
    blocks = tl.cdiv(size, BLOCK)
    place, index = block // blocks, block % blocks * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((PARTS, BLOCK), tl.float64)
    for start in range(0, num_batch * num_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        row = (part // num_parts * num_places + place) * num_parts + part % num_parts
        at = TENSOR + row[:, None].to(tl.int64) * stride + index[None, :]
        inside = (part < num_batch * num_parts)[:, None] & (index < size)[None, :]
        total += tl.load(at, mask=inside, other=0.0).to(tl.float64)
    found = tl.sum(total, 0).to(tl.float32)
    tl.store(OUT + place.to(tl.int64) * size + index, found, mask=index < size)
