"""Kernels of causal linear attention over chunks, with several sources of keys per head.

Head h of H reads S sources of keys f_s and values v_s with weights p[h, s] (numerator) and r[h, s]
(denominator); chunk c holds positions c · T …:

    num_h = Σ_s p[h, s] (F_h S_sc + tril(F_h f_sᵀ) v_s),   S_sc = Σ_{earlier chunks} f_sᵀ v_s
    den_h = Σ_s r[h, s] (F_h z_sc + tril(F_h f_sᵀ) 1),     z_sc = Σ_{earlier chunks} f_sᵀ 1

Without weights, H/S neighbouring heads share one source. INTRA = False leaves the products within a
chunk out: not causal, every chunk reads the sums over all. States are float32. Products with 16-bit
inputs that involve states or gradients run in TF32: it has float16's digits and float32's range,
which sums over thousands of positions, and gradients divided by them, need.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from lit_probattn.kernels.tiles import load_rows, store_rows


@triton.jit
def _source_weight(WEIGHT, head, source, num_sources, WEIGHTED: tl.constexpr):
    """Return the weight of a source in a head; 1 without weights."""
    if WEIGHTED:
        return tl.load(WEIGHT + head * num_sources + source)
    else:
        return 1.0


@triton.jit
def chunk_sums_kernel(
    X, Y, D, P, R, SUMS, TOTALS,
    x_batch, x_head, x_row, y_batch, y_head, y_row,
    num_heads, num_sources, num_rows, num_chunks,
    READERS: tl.constexpr, WEIGHTED: tl.constexpr, HAS_TOTALS: tl.constexpr, ONES: tl.constexpr,
    F: tl.constexpr, FP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, T: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write SUMS[b, s, c] = Σ_h p[h, s] X_hᵀ Y_h (F x E), TOTALS[b, s, c] = Σ_h r[h, s] X_hᵀ D_h.

    The sum goes over the READERS heads that read source s. ONES: D is one everywhere.
    """
    chunk = tl.program_id(0) % num_chunks
    place = tl.program_id(0) // num_chunks
    batch, source = (place // num_sources).to(tl.int64), place % num_sources
    index = chunk * T + tl.arange(0, T)
    sums = tl.zeros((FP, EP), tl.float32)
    totals = tl.zeros((FP,), tl.float32)
    for g in tl.range(0, READERS):
        if WEIGHTED:
            head = g
        else:
            head = source * READERS + g
        x = load_rows(
            X + batch * x_batch + head * x_head, chunk * T, x_row, num_rows, F, FP, T, True
        )
        y = load_rows(
            Y + batch * y_batch + head * y_head, chunk * T, y_row, num_rows, E, EP, T, True
        )
        x = x.to(tl.float32)
        part = tl.dot(tl.trans(x), y.to(tl.float32), input_precision=PRECISION)
        sums += part * _source_weight(P, head, source, num_sources, WEIGHTED)
        if HAS_TOTALS:
            if ONES:
                terms = x
            else:
                at = (batch * num_heads + head) * num_rows + index
                d = tl.load(D + at, mask=index < num_rows, other=0.0)
                terms = x * d[:, None]
            totals += tl.sum(terms, 0) * _source_weight(R, head, source, num_sources, WEIGHTED)
    at = tl.program_id(0).to(tl.int64)
    at = (batch * num_sources + source) * num_chunks + chunk
    store_rows(SUMS + at * F * E, sums, 0, E, F, E, EP, FP)
    if HAS_TOTALS:
        columns = tl.arange(0, FP)
        tl.store(TOTALS + at * F + columns, totals, mask=columns < F)


@triton.jit
def scan_kernel(
    SUMS, START, END, num_chunks, size,
    REVERSE: tl.constexpr, HAS_START: tl.constexpr, TOTAL: tl.constexpr, BLOCK: tl.constexpr,
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
    if HAS_START:
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
def read_kernel(
    Q, K, V, P, R, STATES, TOTALS, NUM, DEN,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    num_heads, num_sources, num_rows, num_chunks,
    SOURCES: tl.constexpr, GROUP: tl.constexpr, WEIGHTED: tl.constexpr, HAS_TOTALS: tl.constexpr,
    INTRA: tl.constexpr,
    F: tl.constexpr, FP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, T: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write num (B, H, N, E) and den (B, H, N) of one chunk of one head."""
    chunk = tl.program_id(0) % num_chunks
    place = tl.program_id(0) // num_chunks
    batch, head = (place // num_heads).to(tl.int64), place % num_heads
    index = chunk * T + tl.arange(0, T)
    columns = tl.arange(0, FP)
    rows = load_rows(
        Q + batch * q_batch + head * q_head, chunk * T, q_row, num_rows, F, FP, T, True
    )
    wide = rows.to(tl.float32)
    num = tl.zeros((T, EP), tl.float32)
    den = tl.zeros((T,), tl.float32)
    for g in tl.range(0, SOURCES):
        if WEIGHTED:
            source = g
        else:
            source = head // GROUP
        at = (batch * num_sources + source) * num_chunks + chunk
        state = load_rows(STATES + at * F * E, 0, E, F, E, EP, FP, True)
        part = tl.dot(wide, state, input_precision=PRECISION)
        if INTRA:
            keys = load_rows(
                K + batch * k_batch + source * k_head, chunk * T, k_row, num_rows, F, FP, T, True
            )
            values = load_rows(
                V + batch * v_batch + source * v_head, chunk * T, v_row, num_rows, E, EP, T, True
            )
            pairs = tl.dot(rows, tl.trans(keys), input_precision="ieee")
            pairs = tl.where(index[:, None] >= index[None, :], pairs, 0.0)
            part = tl.dot(pairs.to(values.dtype), values, part, input_precision="ieee")
        num += part * _source_weight(P, head, source, num_sources, WEIGHTED)
        if HAS_TOTALS:
            total = tl.load(TOTALS + at * F + columns, mask=columns < F, other=0.0)
            seen = tl.sum(wide * total[None, :], 1)
            if INTRA:
                seen += tl.sum(pairs, 1)
            den += seen * _source_weight(R, head, source, num_sources, WEIGHTED)
    place_n = batch * num_heads + head
    store_rows(NUM + place_n * num_rows * E, num, chunk * T, E, num_rows, E, EP, T)
    if HAS_TOTALS:
        tl.store(DEN + place_n * num_rows + index, den, mask=index < num_rows)


@triton.jit
def query_gradient_kernel(
    Q, K, V, P, R, STATES, TOTALS, DNUM, DDEN, DQ, SUMS,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    num_heads, num_sources, num_rows, num_chunks,
    SOURCES: tl.constexpr, GROUP: tl.constexpr, WEIGHTED: tl.constexpr, HAS_TOTALS: tl.constexpr,
    INTRA: tl.constexpr,
    F: tl.constexpr, FP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, T: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dF of one chunk of one head, and its part of the weights' gradients.

    The gradient of p[h, s] is Σ_i F_i · X_i, where X is source s's part of dF before its weight;
    SUMS is (B, H, chunks, 2, S).
    """
    chunk = tl.program_id(0) % num_chunks
    place = tl.program_id(0) // num_chunks
    batch, head = (place // num_heads).to(tl.int64), place % num_heads
    index = chunk * T + tl.arange(0, T)
    columns = tl.arange(0, FP)
    place_n = batch * num_heads + head
    rows = load_rows(
        Q + batch * q_batch + head * q_head, chunk * T, q_row, num_rows, F, FP, T, True
    )
    rows = rows.to(tl.float32)
    dnum = load_rows(DNUM + place_n * num_rows * E, chunk * T, E, num_rows, E, EP, T, True)
    dden = tl.zeros((T,), tl.float32)
    if HAS_TOTALS:
        dden = tl.load(DDEN + place_n * num_rows + index, mask=index < num_rows, other=0.0)
    earlier = index[:, None] >= index[None, :]
    grad = tl.zeros((T, FP), tl.float32)
    for g in tl.range(0, SOURCES):
        if WEIGHTED:
            source = g
        else:
            source = head // GROUP
        at = (batch * num_sources + source) * num_chunks + chunk
        state = load_rows(STATES + at * F * E, 0, E, F, E, EP, FP, True)
        part = tl.dot(dnum, tl.trans(state), input_precision=PRECISION)
        if INTRA:
            keys = load_rows(
                K + batch * k_batch + source * k_head, chunk * T, k_row, num_rows, F, FP, T, True
            ).to(tl.float32)
            values = load_rows(
                V + batch * v_batch + source * v_head, chunk * T, v_row, num_rows, E, EP, T, True
            )
            pairs = tl.dot(dnum, tl.trans(values.to(tl.float32)), input_precision=PRECISION)
            pairs = tl.where(earlier, pairs, 0.0)
            part = tl.dot(pairs, keys, part, input_precision=PRECISION)
        grad += part * _source_weight(P, head, source, num_sources, WEIGHTED)
        slot = (place_n * num_chunks + chunk) * 2 * num_sources + source
        if WEIGHTED:
            tl.store(SUMS + slot, tl.sum(tl.sum(rows * part, 1), 0))
        if HAS_TOTALS:
            total = tl.load(TOTALS + at * F + columns, mask=columns < F, other=0.0)
            part = dden[:, None] * total[None, :]
            if INTRA:
                pairs = tl.where(earlier, dden[:, None], 0.0)
                part = tl.dot(pairs, keys, part, input_precision=PRECISION)
            grad += part * _source_weight(R, head, source, num_sources, WEIGHTED)
            if WEIGHTED:
                tl.store(SUMS + slot + num_sources, tl.sum(tl.sum(rows * part, 1), 0))
    store_rows(DQ + place_n * num_rows * F, grad, chunk * T, F, num_rows, F, FP, T)


@triton.jit
def key_gradient_kernel(
    Q, K, V, P, R, STATES, TOTALS, DNUM, DDEN, DK, DV,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    num_heads, num_sources, num_rows, num_chunks,
    READERS: tl.constexpr, WEIGHTED: tl.constexpr, HAS_TOTALS: tl.constexpr, INTRA: tl.constexpr,
    F: tl.constexpr, FP: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, T: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write df and dv of one chunk of one source; STATES and TOTALS are sums over later chunks."""
    chunk = tl.program_id(0) % num_chunks
    place = tl.program_id(0) // num_chunks
    batch, source = (place // num_sources).to(tl.int64), place % num_sources
    index = chunk * T + tl.arange(0, T)
    columns = tl.arange(0, FP)
    keys = load_rows(
        K + batch * k_batch + source * k_head, chunk * T, k_row, num_rows, F, FP, T, True
    ).to(tl.float32)
    values = load_rows(
        V + batch * v_batch + source * v_head, chunk * T, v_row, num_rows, E, EP, T, True
    ).to(tl.float32)
    at = (batch * num_sources + source) * num_chunks + chunk
    state = load_rows(STATES + at * F * E, 0, E, F, E, EP, FP, True)
    grad_k = tl.dot(values, tl.trans(state), input_precision=PRECISION)
    grad_v = tl.dot(keys, state, input_precision=PRECISION)
    if HAS_TOTALS:
        total = tl.load(TOTALS + at * F + columns, mask=columns < F, other=0.0)
        grad_k += total[None, :]
    if INTRA:
        later = index[None, :] >= index[:, None]  # (keys, queries)
        for g in tl.range(0, READERS):
            if WEIGHTED:
                head = g
            else:
                head = source * READERS + g
            place_n = batch * num_heads + head
            rows = load_rows(
                Q + batch * q_batch + head * q_head, chunk * T, q_row, num_rows, F, FP, T, True
            ).to(tl.float32)
            dnum = load_rows(DNUM + place_n * num_rows * E, chunk * T, E, num_rows, E, EP, T, True)
            weight = _source_weight(P, head, source, num_sources, WEIGHTED)
            pairs = tl.dot(values, tl.trans(dnum), input_precision=PRECISION) * weight
            if HAS_TOTALS:
                dden = tl.load(DDEN + place_n * num_rows + index, mask=index < num_rows, other=0.0)
                pairs += dden[None, :] * _source_weight(R, head, source, num_sources, WEIGHTED)
            pairs = tl.where(later, pairs, 0.0)
            grad_k = tl.dot(pairs, rows, grad_k, input_precision=PRECISION)
            pairs = tl.dot(keys, tl.trans(rows), input_precision=PRECISION) * weight
            pairs = tl.where(later, pairs, 0.0)
            grad_v = tl.dot(pairs, dnum, grad_v, input_precision=PRECISION)
    place_k = batch * num_sources + source
    store_rows(DK + place_k * num_rows * F, grad_k, chunk * T, F, num_rows, F, FP, T)
    store_rows(DV + place_k * num_rows * E, grad_v, chunk * T, E, num_rows, E, EP, T)
