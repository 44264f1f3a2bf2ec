"""Backward kernels of softmax and mixtures: queries, keys and values, and a separate bias kernel.

They use no atomics, so results have the same bits in every run.

With P the weights, dP = grad_out · value (dropped pairs: 0), δ = grad_out · out, the gradient of
score s_r is g_r = P_r (dP - δ), where P_r is the share of component r in P (hard: all to the
largest). One kernel computes gradients of queries, another of keys and values; both recompute
scores.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from lit_probattn.kernels.dense.tiles import (
    added,
    added_sums,
    component_scores,
    component_weights,
    factored_score,
    is_narrow,
    key_products,
    load_key,
    load_key_terms,
    load_queries,
    load_scales,
    load_value,
    loop_part,
    pair_extra,
    pair_factor,
    query_program,
    scaled,
    score_gradients,
    seen_keys,
    spread,
    store_ranges,
    view,
    weight_gradient,
    without,
)
from lit_probattn.kernels.tiles import (
    LN2,
    kept_pairs,
    load_head,
    needed_rows,
    number,
    store_rows,
    store_vector,
    zero_tile,
    zero_tiles,
    zero_vectors,
)


@triton.jit
def delta_kernel(
    call, out, grad_out, DELTA, form: tl.constexpr, BLOCK_Q: tl.constexpr
):  # fmt: skip
    """Write δ_i = grad_out_i · out_i in float32, (B, H, N), and the output of `ranges_kernel`.

    A separate launch, because the query kernel has no registers left for it.
    """
    length = number(call.pairs.num_queries)
    row, b, h = query_program(call, BLOCK_Q, False)
    result = load_head(out, b, h, row, length, form.value_dim, form.value_pad, BLOCK_Q, True)
    grad = load_head(grad_out, b, h, row, length, form.value_dim, form.value_pad, BLOCK_Q, True)
    delta = tl.sum(result.to(tl.float32) * grad.to(tl.float32), 1)
    store_vector(DELTA + (b * number(call.num_heads) + h) * length, delta, row, length, BLOCK_Q)
    store_ranges(call, b, h, row, form, BLOCK_Q)


@triton.jit
def _grad_query_tile(
    call, query, grad, normaliser, delta, scales, row_terms, row_top, row_factors,
    grad_query, grad_row, share, residual, b, h, key_head, value_head, row, col,
    EDGE: tl.constexpr, NARROW: tl.constexpr, form: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the sums of a tile of rows plus one tile of keys; EDGE and NARROW as in forward."""
    pairs = call.pairs
    rows = (row + tl.arange(0, BLOCK_Q))[:, None]
    cols = (col + tl.arange(0, BLOCK_K))[None, :]
    kept = kept_pairs(pairs, b, h, row, col, BLOCK_Q, BLOCK_K, False)
    keys, dots = key_products(call, query, b, key_head, col, form, BLOCK_K, EDGE)
    value = load_value(call, b, value_head, col, form, BLOCK_K, EDGE)
    grad_weight = weight_gradient(grad, value, delta[:, None], kept, pairs)
    col_terms = load_key_terms(call, b, key_head, col, form, BLOCK_K)
    extra = pair_extra(pairs, b, h, rows, cols, EDGE, form.causal)
    if NARROW:
        col_top, col_factors = spread(col_terms, NARROW)
        score = factored_score(dots, scales, col_top[None, :], extra)
        # g_r = A_r C_r · shared, and Σ_r A_r C_r = F
        shared = tl.exp2(score - (normaliser - row_top)[:, None]) * grad_weight
        factor = pair_factor(view(row_factors, True), view(col_factors, False))
        sums = ()
        for r in tl.static_range(len(grad_row)):
            part = tl.sum(shared * col_factors[r][None, :], 1)
            sums = sums + (grad_row[r] + part * row_factors[r],)
        grad_row = sums
        to_key = (shared * factor).to(keys[0].dtype)
        grad_query = tl.dot(to_key, keys[0], grad_query, input_precision="ieee")
    else:
        scores = component_scores(
            dots, scales, view(row_terms, True), view(col_terms, False), extra
        )
        weights = component_weights(scores, normaliser[:, None], form.hard)
        gradients = score_gradients(weights, grad_weight)
        if call.row is not None:
            grad_row, share = added_sums(grad_row, gradients), added_sums(share, weights)
        elif call.col is not None:
            residual += tl.sum(added(gradients), 1)
        to_key = scaled(gradients, scales, form.equal_scales)
        if len(keys) == 1:
            to_key = (added(to_key),)
        for r in tl.static_range(1, len(keys)):
            grad_query = tl.dot(
                to_key[r].to(keys[r].dtype), keys[r], grad_query, input_precision="ieee"
            )
        grad_query = tl.dot(
            to_key[0].to(keys[0].dtype), keys[0], grad_query, input_precision="ieee"
        )
    return grad_query, grad_row, share, residual


@triton.jit
def grad_query_kernel(
    call, grad_out, NORMALISER, DELTA, DQ, DROW,
    form: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write the gradients of one tile of queries and of their terms.

    dquery_i = Σ_jr scale_r g_ijr key_jr,    drow_ir = Σ_j g_ijr
    """
    FACTORED: tl.constexpr = form.factored
    HALF: tl.constexpr = BLOCK_K // 2 if BLOCK_K > 16 else BLOCK_K
    length = number(call.pairs.num_queries)
    row, b, h = query_program(call, BLOCK_Q, form.causal)
    key_head, value_head = h // call.heads_per_key, h // call.heads_per_value
    query, grad, normaliser, delta, row_terms = load_queries(
        call, grad_out, NORMALISER, DELTA, b, h, row, form, BLOCK_Q
    )
    scales = load_scales(call, key_head, form.components, form.equal_scales)
    row_top, row_factors = spread(row_terms, FACTORED)
    narrow = is_narrow(call, b, h, FACTORED)

    grad_query = zero_tile(BLOCK_Q, form.key_pad)
    grad_row = zero_vectors(form.components, BLOCK_Q)
    share = zero_vectors(form.components, BLOCK_Q)  # Σ_j P_ijr
    residual = tl.zeros((BLOCK_Q,), tl.float32)
    first, by_all, by_any = seen_keys(call, b, row, BLOCK_Q, BLOCK_K, form.causal)
    ONE_LOOP: tl.constexpr = call.pairs.draw is not None
    for PART in tl.static_range(1 if ONE_LOOP else 0, 3 if FACTORED else 2):  # as in forward
        start, stop = loop_part(first, by_all, by_any, narrow, PART, ONE_LOOP, FACTORED)
        for col in range(start, stop, HALF if PART == 2 else BLOCK_K):
            grad_query, grad_row, share, residual = _grad_query_tile(
                call, query, grad, normaliser, delta, scales, row_terms, row_top, row_factors,
                grad_query, grad_row, share, residual, b, h, key_head, value_head, row, col,
                PART > 0, FACTORED and PART < 2, form, BLOCK_Q, HALF if PART == 2 else BLOCK_K,
            )  # fmt: skip
    if form.equal_scales:
        grad_query = grad_query * (scales[0] * LN2)
    if call.row is not None:
        residual = added(grad_row)
        grad_row = without(grad_row, residual, share)
    store_rows(DQ.base + b * DQ.batch + h * DQ.head, grad_query, row, DQ.row, length,
               form.key_dim, form.key_pad, BLOCK_Q)  # fmt: skip
    head = b * number(call.num_heads) + h
    if call.row is not None:
        for r in tl.static_range(len(grad_row)):
            at = DROW + (head * len(grad_row) + r) * length
            store_vector(at, grad_row[r], row, length, BLOCK_Q)
    if call.row is not None or call.col is not None:
        store_vector(DELTA + head * length, delta + residual, row, length, BLOCK_Q)


@triton.jit
def _grad_key_tile(
    call, grad_out, NORMALISER, DELTA, keys, value, scales, col_terms, col_top, col_factors,
    grad_keys, grad_value, grad_col, grad_scale, b, h, row, col,
    EDGE: tl.constexpr, NARROW: tl.constexpr, WANTS_SCALES: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, form: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the sums of a tile of keys plus one tile of rows."""
    pairs = call.pairs
    rows = (row + tl.arange(0, BLOCK_Q))[None, :]
    cols = (col + tl.arange(0, BLOCK_K))[:, None]
    kept = kept_pairs(pairs, b, h, row, col, BLOCK_Q, BLOCK_K, True)
    query, grad, normaliser, delta, row_terms = load_queries(
        call, grad_out, NORMALISER, DELTA, b, h, row, form, BLOCK_Q
    )
    if KEYS and not VALUES:  # keep decisions are used before the scores are computed
        grad_weight = weight_gradient(value, grad, delta[None, :], kept, pairs)
    dots = ()
    for r in tl.static_range(len(keys)):
        dots = dots + (tl.dot(keys[r], tl.trans(query), input_precision="ieee"),)
    if KEYS and VALUES:
        grad_weight = weight_gradient(value, grad, delta[None, :], kept, pairs)
    # Gradients of keys beyond the last one are not stored.
    extra = pair_extra(pairs, b, h, rows, cols, EDGE, form.causal)
    if NARROW:
        row_top, row_factors = spread(row_terms, NARROW)
        score = factored_score(dots, scales, col_top[:, None], extra)
        factor = pair_factor(view(row_factors, False), view(col_factors, True))
        shared = tl.exp2(score - (normaliser - row_top)[None, :])
        weight = shared * factor
        if KEYS:
            shared = shared * grad_weight
            sums = ()
            for r in tl.static_range(len(grad_col)):
                part = tl.sum(shared * row_factors[r][None, :], 1)
                sums = sums + (grad_col[r] + part * col_factors[r],)
            grad_col = sums
            to_query = (weight * grad_weight,)
    else:
        scores = component_scores(
            dots, scales, view(row_terms, False), view(col_terms, True), extra
        )
        weights = component_weights(scores, normaliser[None, :], form.hard)
        weight = added(weights)
        if KEYS:
            to_query = score_gradients(weights, grad_weight)
            if call.col is not None:
                grad_col = added_sums(grad_col, to_query)
            if WANTS_SCALES:
                products = ()
                for r in tl.static_range(len(to_query)):
                    products = products + (to_query[r] * dots[r % len(dots)],)
                grad_scale = added_sums(grad_scale, products)
            if len(keys) == 1:
                to_query = (added(scaled(to_query, scales, form.equal_scales)),)
    if KEYS:
        sums = ()
        for r in tl.static_range(len(keys)):
            part = to_query[r].to(query.dtype)
            sums = sums + (tl.dot(part, query, grad_keys[r], input_precision="ieee"),)
        grad_keys = sums
    if VALUES:
        if pairs.draw is not None:
            weight = tl.where(kept, weight * pairs.keep_scale, 0.0)
        grad_value = tl.dot(weight.to(grad.dtype), grad, grad_value, input_precision="ieee")
    return grad_keys, grad_value, grad_col, grad_scale


@triton.jit
def grad_key_kernel(
    call, grad_out, NORMALISER, DELTA, DK, DV, DCOL, DSCALE,
    form: tl.constexpr, WANTS_SCALES: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a tile of keys, values and terms, over all query heads sharing it.

    A launch computes gradients of KEYS and terms, of VALUES, or both: the sums of several wide
    components and of the values together exceed the registers.

        dvalue_j = Σ_i P_ij grad_out_i,          dkey_jr = scale_r Σ_i g_ijr query_i
        dcol_jr  = Σ_i g_ijr,                    dscale_jr = Σ_i g_ijr (query_i · key_jr)

    Score tiles are transposed, keys by queries, so that weights need no transposition.
    """
    FACTORED: tl.constexpr = form.factored
    HALF: tl.constexpr = BLOCK_Q // 2 if BLOCK_Q > 16 else BLOCK_Q
    PRODUCTS: tl.constexpr = form.products
    num_queries, num_keys = number(call.pairs.num_queries), number(call.pairs.num_keys)
    num_tiles = tl.cdiv(num_keys, BLOCK_K)
    num_key_heads = number(call.num_heads) // call.heads_per_key
    place = tl.program_id(0) // num_tiles
    col = tl.program_id(0) % num_tiles * BLOCK_K
    b, key_head = place // num_key_heads, place % num_key_heads
    b, key_head = tl.cast(b, tl.int64), tl.cast(key_head, tl.int64)
    value_head = key_head * call.heads_per_key // call.heads_per_value
    keys = ()
    for r in tl.static_range(PRODUCTS):
        keys = keys + (load_key(call, b, key_head, col, r, form, BLOCK_K, True),)
    value = load_value(call, b, value_head, col, form, BLOCK_K, True)
    scales = load_scales(call, key_head, form.components, form.equal_scales)
    col_terms = load_key_terms(call, b, key_head, col, form, BLOCK_K)
    col_top, col_factors = spread(col_terms, FACTORED)

    grad_keys = zero_tiles(PRODUCTS, BLOCK_K, form.key_pad)
    grad_value = zero_tile(BLOCK_K, form.value_pad)
    grad_col = zero_vectors(form.components, BLOCK_K)
    grad_scale = zero_vectors(form.components, BLOCK_K)
    # Rows from sees_any attend to some key of this tile, rows from sees_all to the whole tile.
    sees_any, sees_all = 0, 0
    if form.causal:
        sees_any = tl.minimum(tl.maximum(col - (num_keys - num_queries), 0), num_queries)
        sees_any = sees_any // BLOCK_Q * BLOCK_Q
        sees_all = tl.maximum(col + BLOCK_K - 1 - (num_keys - num_queries), 0)
        sees_all = tl.minimum(tl.cdiv(sees_all, BLOCK_Q) * BLOCK_Q, num_queries)
    end = num_queries
    if call.key_range is not None:  # no row attends to a tile of padding
        first, last = tl.load(call.key_range + 2 * b), tl.load(call.key_range + 2 * b + 1)
        end = tl.where((first < col + BLOCK_K) & (col < last), end, 0)
        sees_all = tl.minimum(sees_all, end)
    sees_any, sees_all, end = needed_rows(call.pairs, b, sees_any, sees_all, end, BLOCK_Q)
    # Part 0 is the edge: the first rows that attend to a key of this tile.
    ONE_LOOP: tl.constexpr = call.pairs.draw is not None
    for member in range(0, call.heads_per_key):
        h = key_head * call.heads_per_key + member
        narrow = is_narrow(call, b, h, FACTORED)
        for PART in tl.static_range(0 if form.causal and not ONE_LOOP else 1, 3 if FACTORED else 2):
            start, stop = loop_part(sees_any, sees_all, end, narrow, PART, ONE_LOOP, FACTORED)
            for row in range(start, stop, HALF if PART == 2 else BLOCK_Q):
                grad_keys, grad_value, grad_col, grad_scale = _grad_key_tile(
                    call, grad_out, NORMALISER, DELTA,
                    keys, value, scales, col_terms, col_top, col_factors,
                    grad_keys, grad_value, grad_col, grad_scale, b, h, row, col,
                    form.causal and (ONE_LOOP or PART != 1), FACTORED and PART < 2, WANTS_SCALES,
                    KEYS, VALUES, form, HALF if PART == 2 else BLOCK_Q, BLOCK_K,
                )  # fmt: skip

    for r in tl.static_range(PRODUCTS if KEYS else 0):
        grad_key = grad_keys[r]
        if PRODUCTS > 1 or form.equal_scales:
            grad_key = grad_key * (scales[r] * LN2)
        store_rows(DK.base + b * DK.batch + key_head * DK.head + r * DK.part, grad_key, col, DK.row,
                   num_keys, form.key_dim, form.key_pad, BLOCK_K)  # fmt: skip
    if VALUES:
        store_rows(DV.base + b * DV.batch + key_head * DV.head, grad_value, col, DV.row, num_keys,
                   form.value_dim, form.value_pad, BLOCK_K)  # fmt: skip
    first = (b * num_key_heads + key_head) * len(grad_col)
    for r in tl.static_range(len(grad_col) if KEYS else 0):
        if DCOL is not None:
            store_vector(DCOL + (first + r) * num_keys, grad_col[r], col, num_keys, BLOCK_K)
        if WANTS_SCALES:
            store_vector(DSCALE + (first + r) * num_keys, grad_scale[r], col, num_keys, BLOCK_K)


_BIAS_SIZES = ("num_samples", "bias_samples", "bias_heads", "bias_rows", "bias_cols")


@triton.jit(do_not_specialize=_BIAS_SIZES)
def grad_bias_kernel(
    call, grad_out, NORMALISER, DELTA, DBIAS,
    num_samples, bias_samples, bias_heads, bias_rows, bias_cols,
    form: tl.constexpr, ONE_ROW: tl.constexpr, ONE_COL: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one tile of the bias: Σ_r g_ijr, summed over broadcast dimensions.

    DBIAS is contiguous, (bias_samples, bias_heads, bias_rows, bias_cols), each 1 or the full size.
    """
    pairs = call.pairs
    row_tiles = 1 if ONE_ROW else tl.cdiv(number(pairs.num_queries), BLOCK_Q)
    col_tiles = 1 if ONE_COL else tl.cdiv(number(pairs.num_keys), BLOCK_K)
    index = tl.program_id(0)
    first_col = index % col_tiles * BLOCK_K
    first_row = index // col_tiles % row_tiles * BLOCK_Q
    owner = index // (col_tiles * row_tiles)
    last_row = number(pairs.num_queries) if ONE_ROW else first_row + 1
    last_col = number(pairs.num_keys) if ONE_COL else first_col + 1
    one_sample, one_head = bias_samples == 1, bias_heads == 1
    first_sample = tl.where(one_sample, 0, owner // bias_heads)
    last_sample = tl.where(one_sample, num_samples, first_sample + 1)
    first_head = tl.where(one_head, 0, owner % bias_heads)
    last_head = tl.where(one_head, number(call.num_heads), first_head + 1)

    total = tl.zeros((BLOCK_Q, BLOCK_K), tl.float32)
    for sample in range(first_sample, last_sample):
        for head in range(first_head, last_head):
            b, h = tl.cast(sample, tl.int64), tl.cast(head, tl.int64)
            key_head, value_head = h // call.heads_per_key, h // call.heads_per_value
            scales = load_scales(call, key_head, form.components, form.equal_scales)
            for row in range(first_row, last_row, BLOCK_Q):
                rows = (row + tl.arange(0, BLOCK_Q))[:, None]
                query, grad, normaliser, delta, row_terms = load_queries(
                    call, grad_out, NORMALISER, DELTA, b, h, row, form, BLOCK_Q
                )
                for col in range(first_col, last_col, BLOCK_K):
                    cols = (col + tl.arange(0, BLOCK_K))[None, :]
                    _keys, dots = key_products(call, query, b, key_head, col, form, BLOCK_K, True)
                    value = load_value(call, b, value_head, col, form, BLOCK_K, True)
                    kept = kept_pairs(pairs, b, h, row, col, BLOCK_Q, BLOCK_K, False)
                    grad_weight = weight_gradient(grad, value, delta[:, None], kept, pairs)
                    col_terms = load_key_terms(call, b, key_head, col, form, BLOCK_K)
                    scores = component_scores(
                        dots, scales, view(row_terms, True), view(col_terms, False),
                        pair_extra(pairs, b, h, rows, cols, True, form.causal),
                    )  # fmt: skip
                    weights = component_weights(scores, normaliser[:, None], form.hard)
                    total += added(weights) * grad_weight

    out_rows, out_cols = first_row + tl.arange(0, BLOCK_Q), first_col + tl.arange(0, BLOCK_K)
    DBIAS += tl.cast(owner, tl.int64) * bias_rows * bias_cols
    if ONE_ROW and ONE_COL:
        tl.store(DBIAS, tl.sum(tl.sum(total, 1), 0))
    elif ONE_ROW:
        tl.store(DBIAS + out_cols, tl.sum(total, 0), mask=out_cols < bias_cols)
    elif ONE_COL:
        tl.store(DBIAS + out_rows, tl.sum(total, 1), mask=out_rows < bias_rows)
    else:
        where = tl.cast(out_rows, tl.int64)[:, None] * bias_cols + out_cols[None, :]
        kept = (out_rows < bias_rows)[:, None] & (out_cols < bias_cols)[None, :]
        tl.store(DBIAS + where, total, mask=kept)
