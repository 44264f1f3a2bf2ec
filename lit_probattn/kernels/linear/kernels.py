"""Kernels of causal linear attention over chunks, with several sources of keys per head.

Head h of H reads S sources of keys f_s and values v_s with weights p[h, s] (numerator) and r[h, s]
(denominator); chunk c holds positions c · T …:

    num_h = Σ_s p[h, s] (F_h S_sc + tril(F_h f_sᵀ) v_s),   S_sc = Σ_{earlier chunks} f_sᵀ v_s
    den_h = Σ_s r[h, s] (F_h z_sc + tril(F_h f_sᵀ) 1),     z_sc = Σ_{earlier chunks} f_sᵀ 1

Without weights, H/S neighbouring heads share one source. Calls that are not causal leave the
products within a chunk out: every chunk reads the sums over all. States are float32. Products with
16-bit inputs that involve states or gradients run in TF32: it has float16's digits and float32's
range, which sums over thousands of positions, and gradients divided by them, need.
`call` is a `LinearArguments` and
`form` a `LinearForm` of operators.py.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from lit_probattn.kernels.tiles import (
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
def _weight(WEIGHT, head, source, num_sources):
    """Return the weight of a source in a head; 1 without weights."""
    if WEIGHT is not None:
        return tl.load(WEIGHT + head * num_sources + source)
    else:
        return 1.0


@triton.jit
def _program(call, count):
    """Return the chunk, sample and head (or source) of a program, of `count` heads a sample."""
    chunk, place = (
        tl.program_id(0) % number(call.num_chunks),
        tl.program_id(0) // number(call.num_chunks),
    )
    return chunk, (place // count).to(tl.int64), place % count


@triton.jit
def _features(x, call, b, h, chunk, form: tl.constexpr):
    """Load the features of a chunk of queries or keys."""
    start = chunk * form.chunk
    return load_head(
        x, b, h, start, number(call.num_rows), form.features, form.features_pad, form.chunk, True
    )


@triton.jit
def _values(x, call, b, h, chunk, form: tl.constexpr):
    """Load a chunk of values."""
    start = chunk * form.chunk
    return load_head(
        x, b, h, start, number(call.num_rows), form.width, form.width_pad, form.chunk, True
    )


@triton.jit
def _load_state(STATES, TOTALS, call, b, source, chunk, form: tl.constexpr):
    """Load a chunk's state and totals."""
    at = (b * number(call.num_sources) + source) * number(call.num_chunks) + chunk
    place = STATES + at * form.features * form.width
    state = load_rows(place, 0, form.width, form.features, form.width, form.width_pad,
                      form.features_pad, True)  # fmt: skip
    total = ()
    if form.has_totals:
        total = load_vector(TOTALS + at * form.features, 0, form.features, 0.0, form.features_pad)
    return state, total


@triton.jit
def _load_gradients(DNUM, DDEN, call, place, chunk, form: tl.constexpr):
    """Load the gradients of a chunk's numerators and denominators."""
    start = chunk * form.chunk
    base = DNUM + place * number(call.num_rows) * form.width
    dnum = load_rows(base, start, form.width, number(call.num_rows), form.width, form.width_pad,
                     form.chunk, True)  # fmt: skip
    dden = ()
    if form.has_totals:
        dden = load_vector(
            DDEN + place * number(call.num_rows), start, number(call.num_rows), 0.0, form.chunk
        )
    return dnum, dden


@triton.jit
def _store_chunk(
    base, tile, place, chunk, call, WIDTH: tl.constexpr, PADDED: tl.constexpr, T: tl.constexpr
):
    """Store a chunk of a contiguous tensor (…, rows, WIDTH)."""
    base += place * number(call.num_rows) * WIDTH
    store_rows(base, tile, chunk * T, WIDTH, number(call.num_rows), WIDTH, PADDED, T)


@triton.jit(do_not_specialize=("num_heads",))
def chunk_sums_kernel(
    x, y, D, P, R, SUMS, TOTALS, call, num_heads, READERS: tl.constexpr, form: tl.constexpr
):
    """Write SUMS[b, s, c] = Σ_h p[h, s] x_hᵀ y_h (F x E), TOTALS[b, s, c] = Σ_h r[h, s] x_hᵀ D_h.

    The sum goes over the READERS heads that read source s, of `num_heads`. D None means 1.
    """
    chunk, b, source = _program(call, number(call.num_sources))
    sums = zero_tile(form.features_pad, form.width_pad)
    totals = zero_vector(form.features_pad)
    for g in tl.range(0, READERS):
        head = g if P is not None else source * READERS + g
        rows = _features(x, call, b, head, chunk, form).to(tl.float32)
        other = _values(y, call, b, head, chunk, form).to(tl.float32)
        part = tl.dot(tl.trans(rows), other, input_precision=form.precision)
        sums += part * _weight(P, head, source, number(call.num_sources))
        if form.has_totals:
            terms = rows
            if D is not None:
                at = D + (b * num_heads + head) * number(call.num_rows)
                d = load_vector(at, chunk * form.chunk, number(call.num_rows), 0.0, form.chunk)
                terms = rows * d[:, None]
            totals += tl.sum(terms, 0) * _weight(R, head, source, number(call.num_sources))
    at = (b * number(call.num_sources) + source) * number(call.num_chunks) + chunk
    place = SUMS + at * form.features * form.width
    store_rows(place, sums, 0, form.width, form.features, form.width, form.width_pad,
               form.features_pad)  # fmt: skip
    if form.has_totals:
        store_vector(TOTALS + at * form.features, totals, 0, form.features, form.features_pad)


@triton.jit(do_not_specialize=("num_chunks", "size"))
def scan_kernel(
    SUMS, START, END, num_chunks, size,
    REVERSE: tl.constexpr, TOTAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace the sums of every chunk by those of all chunks before it (after it: REVERSE).

    SUMS is (places, chunks, size), START and END (places, size): the sum before the first chunk and
    past the last. TOTAL: every chunk gets the sum of all chunks instead.
    """
    blocks = tl.cdiv(size, BLOCK)
    place = (tl.program_id(0) // blocks).to(tl.int64)
    index = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    running = tl.zeros((BLOCK,), tl.float32)
    if START is not None:
        running = tl.load(START + place * size + index, mask=inside, other=0.0)
    for step in range(num_chunks):
        chunk = num_chunks - 1 - step if REVERSE else step
        at = SUMS + (place * num_chunks + chunk) * size + index
        found = tl.load(at, mask=inside, other=0.0)
        if not TOTAL:
            tl.store(at, running, mask=inside)
        running += found
    if TOTAL:
        for step in range(num_chunks):
            tl.store(SUMS + (place * num_chunks + step) * size + index, running, mask=inside)
    tl.store(END + place * size + index, running, mask=inside)


@triton.jit
def read_kernel(call, STATES, TOTALS, NUM, DEN, SOURCES: tl.constexpr, form: tl.constexpr):
    """Write num (B, H, N, E) and den (B, H, N) of one chunk of one head."""
    chunk, b, head = _program(call, number(call.num_heads))
    index = chunk * form.chunk + tl.arange(0, form.chunk)
    rows = _features(call.query, call, b, head, chunk, form)
    wide = rows.to(tl.float32)
    num = zero_tile(form.chunk, form.width_pad)
    den = zero_vector(form.chunk)
    for g in tl.range(0, SOURCES):
        source = g if call.weight is not None else head // form.readers
        state, total = _load_state(STATES, TOTALS, call, b, source, chunk, form)
        part = tl.dot(wide, state, input_precision=form.precision)
        if form.causal:
            keys = _features(call.key, call, b, source, chunk, form)
            values = _values(call.value, call, b, source, chunk, form)
            pairs = tl.dot(rows, tl.trans(keys), input_precision="ieee")
            pairs = tl.where(index[:, None] >= index[None, :], pairs, 0.0)
            part = tl.dot(pairs.to(values.dtype), values, part, input_precision="ieee")
        num += part * _weight(call.weight, head, source, number(call.num_sources))
        if form.has_totals:
            seen = tl.sum(wide * total[None, :], 1)
            if form.causal:
                seen += tl.sum(pairs, 1)
            den += seen * _weight(call.norm_weight, head, source, number(call.num_sources))
    place = b * number(call.num_heads) + head
    _store_chunk(NUM, num, place, chunk, call, form.width, form.width_pad, form.chunk)
    if form.has_totals:
        num_rows = number(call.num_rows)
        store_vector(DEN + place * num_rows, den, chunk * form.chunk, num_rows, form.chunk)


@triton.jit
def query_gradient_kernel(
    call, STATES, TOTALS, DNUM, DDEN, DQ, SUMS, SOURCES: tl.constexpr, form: tl.constexpr
):
    """Write dF of one chunk of one head, and its part of the weights' gradients.

    The gradient of p[h, s] is Σ_i F_i · X_i, where X is source s's part of dF before its weight;
    SUMS is (B, H, chunks, 2, S).
    """
    chunk, b, head = _program(call, number(call.num_heads))
    index = chunk * form.chunk + tl.arange(0, form.chunk)
    place = b * number(call.num_heads) + head
    rows = _features(call.query, call, b, head, chunk, form).to(tl.float32)
    dnum, dden = _load_gradients(DNUM, DDEN, call, place, chunk, form)
    earlier = index[:, None] >= index[None, :]
    grad = zero_tile(form.chunk, form.features_pad)
    for g in tl.range(0, SOURCES):
        source = g if call.weight is not None else head // form.readers
        state, total = _load_state(STATES, TOTALS, call, b, source, chunk, form)
        part = tl.dot(dnum, tl.trans(state), input_precision=form.precision)
        if form.causal:
            keys = _features(call.key, call, b, source, chunk, form).to(tl.float32)
            values = _values(call.value, call, b, source, chunk, form).to(tl.float32)
            pairs = tl.dot(dnum, tl.trans(values), input_precision=form.precision)
            pairs = tl.where(earlier, pairs, 0.0)
            part = tl.dot(pairs, keys, part, input_precision=form.precision)
        grad += part * _weight(call.weight, head, source, number(call.num_sources))
        slot = (
            SUMS + (place * number(call.num_chunks) + chunk) * 2 * number(call.num_sources) + source
        )
        if call.weight is not None:
            tl.store(slot, tl.sum(tl.sum(rows * part, 1), 0))
        if form.has_totals:
            part = dden[:, None] * total[None, :]
            if form.causal:
                pairs = tl.where(earlier, dden[:, None], 0.0)
                part = tl.dot(pairs, keys, part, input_precision=form.precision)
            grad += part * _weight(call.norm_weight, head, source, number(call.num_sources))
            if call.weight is not None:
                tl.store(slot + number(call.num_sources), tl.sum(tl.sum(rows * part, 1), 0))
    _store_chunk(DQ, grad, place, chunk, call, form.features, form.features_pad, form.chunk)


@triton.jit
def key_gradient_kernel(call, STATES, TOTALS, DNUM, DDEN, DK, DV, form: tl.constexpr):
    """Write df and dv of one chunk of one source; STATES and TOTALS are sums over later chunks."""
    chunk, b, source = _program(call, number(call.num_sources))
    index = chunk * form.chunk + tl.arange(0, form.chunk)
    keys = _features(call.key, call, b, source, chunk, form).to(tl.float32)
    values = _values(call.value, call, b, source, chunk, form).to(tl.float32)
    state, total = _load_state(STATES, TOTALS, call, b, source, chunk, form)
    grad_k = tl.dot(values, tl.trans(state), input_precision=form.precision)
    grad_v = tl.dot(keys, state, input_precision=form.precision)
    if form.has_totals:
        grad_k += total[None, :]
    if form.causal:
        later = index[None, :] >= index[:, None]  # (keys, queries)
        for g in tl.range(0, form.readers):
            head = g if call.weight is not None else source * form.readers + g
            place = b * number(call.num_heads) + head
            rows = _features(call.query, call, b, head, chunk, form).to(tl.float32)
            dnum, dden = _load_gradients(DNUM, DDEN, call, place, chunk, form)
            weight = _weight(call.weight, head, source, number(call.num_sources))
            pairs = tl.dot(values, tl.trans(dnum), input_precision=form.precision) * weight
            if form.has_totals:
                norm_weight = _weight(call.norm_weight, head, source, number(call.num_sources))
                pairs += dden[None, :] * norm_weight
            pairs = tl.where(later, pairs, 0.0)
            grad_k = tl.dot(pairs, rows, grad_k, input_precision=form.precision)
            pairs = tl.dot(keys, tl.trans(rows), input_precision=form.precision) * weight
            pairs = tl.where(later, pairs, 0.0)
            grad_v = tl.dot(pairs, dnum, grad_v, input_precision=form.precision)
    place = b * number(call.num_sources) + source
    _store_chunk(DK, grad_k, place, chunk, call, form.features, form.features_pad, form.chunk)
    _store_chunk(DV, grad_v, place, chunk, call, form.width, form.width_pad, form.chunk)
