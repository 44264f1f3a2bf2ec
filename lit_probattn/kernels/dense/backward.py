"""Backward kernels of softmax and mixtures: queries, keys and values, and the bias by itself.

Without atomics: the same bits every time.

With P the weights, dP = grad_out · value (dropped pairs: 0), δ = grad_out · out, the gradient of
score s_r is g_r = P_r (dP - δ), P_r the share of component r in P (HARD: all to the largest).
Queries get theirs in one kernel, keys and values in another; both compute the scores again.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from lit_probattn.kernels.dense.tiles import (
    across,
    added,
    component_scores,
    component_weights,
    down,
    load_scales,
    load_terms,
    pair_factor,
    spread,
    zero_tiles,
    zero_vectors,
)
from lit_probattn.kernels.tiles import (
    LN2,
    LOG2E,
    keep_tile,
    load_pairs,
    load_rows,
    store_rows,
    visible_pairs,
)


@triton.jit
def delta_kernel(
    OUT, GRAD, DELTA,
    o_b, o_h, o_n, g_b, g_h, g_n, num_heads, num_queries,
    VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """δ_i = grad_out_i · out_i in float32, (B, H, N)."""
    num_tiles = tl.cdiv(num_queries, BLOCK_Q)
    row, pair_index = tl.program_id(0) % num_tiles * BLOCK_Q, tl.program_id(0) // num_tiles
    b, h = tl.cast(pair_index // num_heads, tl.int64), tl.cast(pair_index % num_heads, tl.int64)
    out = load_rows(
        OUT + b * o_b + h * o_h, row, o_n, num_queries, VALUE_DIM, VALUE_PAD, BLOCK_Q, True
    )
    grad = load_rows(
        GRAD + b * g_b + h * g_h, row, g_n, num_queries, VALUE_DIM, VALUE_PAD, BLOCK_Q, True
    )
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    index = row + tl.arange(0, BLOCK_Q)
    tl.store(DELTA + pair_index.to(tl.int64) * num_queries + index, delta, mask=index < num_queries)


@triton.jit
def grad_query_kernel(
    Q, K, V, GRAD, NORMALISER, DELTA, DQ, DROW,
    SCALES, ROW, COL, SPREAD, KEY_MASK, PAIR_MASK, BIAS, DRAW,
    scale, keep_scale, threshold, spread_limit,
    q_b, q_h, q_n, k_b, k_h, k_c, k_n, v_b, v_h, v_n, g_b, g_h, g_n, dq_b, dq_h, dq_n,
    pair_b, pair_h, pair_n, pair_l, bias_b, bias_h, bias_n, bias_l,
    num_heads, num_queries, num_keys, heads_per_key, heads_per_value,
    COMPONENTS: tl.constexpr, PRODUCTS: tl.constexpr, HARD: tl.constexpr, FACTORED: tl.constexpr,
    EQUAL_SCALES: tl.constexpr, CAUSAL: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_ROW: tl.constexpr, HAS_COL: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    HAS_PAIR_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of queries and of their terms.

    dquery_i = Σ_jr scale_r g_ijr key_jr,    drow_ir = Σ_j g_ijr
    """
    SHOWS_ALL: tl.constexpr = not (HAS_KEY_MASK or HAS_PAIR_MASK)
    num_tiles = tl.cdiv(num_queries, BLOCK_Q)
    tile, pair_index = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    if CAUSAL:  # the longest rows first
        tile = num_tiles - 1 - tile
    row, sample, head = tile * BLOCK_Q, pair_index // num_heads, pair_index % num_heads
    b, h = tl.cast(sample, tl.int64), tl.cast(head, tl.int64)
    key_head, value_head = h // heads_per_key, h // heads_per_value
    K += b * k_b + key_head * k_h
    V += b * v_b + value_head * v_h
    if HAS_COL:
        COL += (b * (num_heads // heads_per_key) + key_head) * COMPONENTS * num_keys
    if HAS_KEY_MASK:
        KEY_MASK += b * num_keys
    if HAS_PAIR_MASK:
        PAIR_MASK += b * pair_b + h * pair_h
    if HAS_BIAS:
        BIAS += b * bias_b + h * bias_h
    query = load_rows(Q + b * q_b + h * q_h, row, q_n, num_queries, KEY_DIM, KEY_PAD, BLOCK_Q, True)
    grad = load_rows(
        GRAD + b * g_b + h * g_h, row, g_n, num_queries, VALUE_DIM, VALUE_PAD, BLOCK_Q, True
    )
    index = row + tl.arange(0, BLOCK_Q)
    first = (b * num_heads + h) * num_queries
    normaliser = tl.load(NORMALISER + first + index, mask=index < num_queries, other=float("inf"))
    delta = tl.load(DELTA + first + index, mask=index < num_queries, other=0.0)
    scales = load_scales(
        SCALES + key_head * COMPONENTS if HAS_SCALES else SCALES,
        scale, COMPONENTS, EQUAL_SCALES, HAS_SCALES,
    )  # fmt: skip
    row_terms = ()
    if HAS_ROW:
        row_terms = load_terms(ROW + first * COMPONENTS, row, num_queries, BLOCK_Q, COMPONENTS)
    if FACTORED:
        row_top, row_factors = spread(row_terms, COMPONENTS)
        narrow = tl.load(SPREAD + pair_index) <= spread_limit

    grad_query = tl.zeros((BLOCK_Q, KEY_PAD), tl.float32)
    grad_row = zero_vectors(COMPONENTS, BLOCK_Q)
    share = zero_vectors(COMPONENTS, BLOCK_Q)  # Σ_j P_ijr
    residual = tl.zeros((BLOCK_Q,), tl.float32)
    rows = index[:, None]
    seen_by_all, seen_by_any = num_keys, num_keys
    if CAUSAL:
        seen_by_all = tl.minimum(tl.maximum(row + 1 + num_keys - num_queries, 0), num_keys)
        seen_by_any = tl.minimum(tl.maximum(row + BLOCK_Q + num_keys - num_queries, 0), num_keys)
    seen_by_all = seen_by_all // BLOCK_K * BLOCK_K
    for EDGE in tl.static_range(2):  # as in forward
        for WIDE in tl.static_range(2 if FACTORED else 1):
            start = seen_by_all if EDGE else 0
            stop = seen_by_any if EDGE else seen_by_all
            if FACTORED:
                stop = tl.where(narrow != (WIDE == 1), stop, start)
            for col in range(start, stop, BLOCK_K):
                cols = (col + tl.arange(0, BLOCK_K))[None, :]
                keys, dots = (), ()
                for r in tl.static_range(PRODUCTS):
                    key = load_rows(
                        K + r * k_c, col, k_n, num_keys, KEY_DIM, KEY_PAD, BLOCK_K, EDGE
                    )
                    keys = keys + (key,)
                    dots = dots + (tl.dot(query, tl.trans(key), input_precision="ieee"),)
                value = load_rows(V, col, v_n, num_keys, VALUE_DIM, VALUE_PAD, BLOCK_K, EDGE)
                grad_weight = tl.dot(grad, tl.trans(value), input_precision="ieee")
                if DROPOUT:
                    keep = keep_tile(DRAW, sample, head, row, col, threshold, BLOCK_Q, BLOCK_K)
                    grad_weight = tl.where(keep, grad_weight * keep_scale, 0.0)
                grad_weight = grad_weight - delta[:, None]
                col_terms = ()
                if HAS_COL:
                    col_terms = load_terms(COL, col, num_keys, BLOCK_K, COMPONENTS)
                extra = 0.0
                if HAS_BIAS:
                    extra = LOG2E * load_pairs(
                        BIAS, rows, cols, num_queries, num_keys, bias_n, bias_l
                    )
                if EDGE or not SHOWS_ALL:
                    visible = visible_pairs(
                        rows, cols, num_queries, num_keys, KEY_MASK, PAIR_MASK, pair_n, pair_l,
                        EDGE, CAUSAL, HAS_KEY_MASK, HAS_PAIR_MASK,
                    )  # fmt: skip
                    extra = tl.where(visible, extra, float("-inf"))
                if FACTORED and not WIDE:
                    col_top, col_factors = spread(col_terms, COMPONENTS)
                    score = dots[0] * scales[0] + col_top[None, :]
                    if EDGE or HAS_BIAS or not SHOWS_ALL:
                        score = score + extra
                    # g_r = A_r C_r · shared, and Σ_r A_r C_r = F
                    shared = tl.exp2(score - (normaliser - row_top)[:, None]) * grad_weight
                    factor = pair_factor(
                        down(row_factors, COMPONENTS), across(col_factors, COMPONENTS), COMPONENTS
                    )
                    if HAS_ROW:
                        sums = ()
                        for r in tl.static_range(COMPONENTS):
                            part = tl.sum(shared * col_factors[r][None, :], 1)
                            sums = sums + (grad_row[r] + part * row_factors[r],)
                        grad_row = sums
                    to_key = (shared * factor).to(key.dtype)
                    grad_query = tl.dot(to_key, keys[0], grad_query, input_precision="ieee")
                else:
                    scores = component_scores(
                        dots, scales, down(row_terms, COMPONENTS if HAS_ROW else 0),
                        across(col_terms, COMPONENTS if HAS_COL else 0), extra,
                        COMPONENTS, PRODUCTS, HAS_ROW, HAS_COL,
                        EDGE or HAS_BIAS or not SHOWS_ALL,
                    )  # fmt: skip
                    weights = component_weights(scores, normaliser[:, None], COMPONENTS, HARD)
                    gradients = ()
                    for r in tl.static_range(COMPONENTS):
                        gradients = gradients + (weights[r] * grad_weight,)
                    if HAS_ROW:
                        sums, shares = (), ()
                        for r in tl.static_range(COMPONENTS):
                            sums = sums + (grad_row[r] + tl.sum(gradients[r], 1),)
                            shares = shares + (share[r] + tl.sum(weights[r], 1),)
                        grad_row, share = sums, shares
                    elif HAS_COL:
                        residual += tl.sum(added(gradients, COMPONENTS), 1)
                    to_key = gradients[0]
                    if not EQUAL_SCALES:
                        to_key = to_key * (scales[0] * LN2)
                    for r in tl.static_range(1, COMPONENTS):
                        part = gradients[r]
                        if not EQUAL_SCALES:
                            part = part * (scales[r] * LN2)
                        if PRODUCTS == 1:
                            to_key = to_key + part
                        else:
                            grad_query = tl.dot(
                                part.to(key.dtype), keys[r], grad_query, input_precision="ieee"
                            )
                    grad_query = tl.dot(
                        to_key.to(key.dtype), keys[0], grad_query, input_precision="ieee"
                    )
    if EQUAL_SCALES:
        grad_query = grad_query * (scales[0] * LN2)
    store_rows(
        DQ + b * dq_b + h * dq_h, grad_query, row, dq_n, num_queries, KEY_DIM, KEY_PAD, BLOCK_Q
    )
    if HAS_ROW:
        residual = added(grad_row, COMPONENTS)
        for r in tl.static_range(COMPONENTS):
            tl.store(
                DROW + first * COMPONENTS + r * num_queries + index,
                grad_row[r] - residual * share[r],
                mask=index < num_queries,
            )
    if HAS_ROW or HAS_COL:
        tl.store(DELTA + first + index, delta + residual, mask=index < num_queries)


@triton.jit
def grad_key_kernel(
    Q, K, V, GRAD, NORMALISER, DELTA, DK, DV, DCOL, DSCALE,
    SCALES, ROW, COL, SPREAD, KEY_MASK, PAIR_MASK, BIAS, DRAW,
    scale, keep_scale, threshold, spread_limit,
    q_b, q_h, q_n, k_b, k_h, k_c, k_n, v_b, v_h, v_n, g_b, g_h, g_n,
    dk_b, dk_h, dk_c, dk_n, dv_b, dv_h, dv_n,
    pair_b, pair_h, pair_n, pair_l, bias_b, bias_h, bias_n, bias_l,
    num_heads, num_queries, num_keys, heads_per_key, heads_per_value,
    COMPONENTS: tl.constexpr, PRODUCTS: tl.constexpr, HARD: tl.constexpr, FACTORED: tl.constexpr,
    EQUAL_SCALES: tl.constexpr, CAUSAL: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_ROW: tl.constexpr, HAS_COL: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    HAS_PAIR_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    WANTS_SCALES: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of keys, its values and terms, over all query heads that share it.

        dvalue_j = Σ_i P_ij grad_out_i,          dkey_jr = scale_r Σ_i g_ijr query_i
        dcol_jr  = Σ_i g_ijr,                    dscale_jr = Σ_i g_ijr (query_i · key_jr)

    Score tiles are transposed, keys by queries, so that no tile of weights has to be.
    """
    SHOWS_ALL: tl.constexpr = not (HAS_KEY_MASK or HAS_PAIR_MASK)
    num_tiles, num_key_heads = tl.cdiv(num_keys, BLOCK_K), num_heads // heads_per_key
    tile, pair_index = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    col, sample, key_index = tile * BLOCK_K, pair_index // num_key_heads, pair_index % num_key_heads
    b, key_head = tl.cast(sample, tl.int64), tl.cast(key_index, tl.int64)
    value_head = key_head * heads_per_key // heads_per_value
    keys = ()
    for r in tl.static_range(PRODUCTS):
        keys = keys + (
            load_rows(K + b * k_b + key_head * k_h + r * k_c, col, k_n, num_keys, KEY_DIM, KEY_PAD,
                      BLOCK_K, True),
        )  # fmt: skip
    value = load_rows(
        V + b * v_b + value_head * v_h, col, v_n, num_keys, VALUE_DIM, VALUE_PAD, BLOCK_K, True
    )
    scales = load_scales(
        SCALES + key_head * COMPONENTS if HAS_SCALES else SCALES,
        scale, COMPONENTS, EQUAL_SCALES, HAS_SCALES,
    )  # fmt: skip
    first_col = (b * num_key_heads + key_head) * COMPONENTS * num_keys
    col_terms = ()
    if HAS_COL:
        col_terms = load_terms(COL + first_col, col, num_keys, BLOCK_K, COMPONENTS)
    if FACTORED:
        col_top, col_factors = spread(col_terms, COMPONENTS)

    grad_keys = zero_tiles(PRODUCTS, BLOCK_K, KEY_PAD)
    grad_value = tl.zeros((BLOCK_K, VALUE_PAD), tl.float32)
    grad_col = zero_vectors(COMPONENTS, BLOCK_K)
    grad_scale = zero_vectors(COMPONENTS, BLOCK_K)
    cols = (col + tl.arange(0, BLOCK_K))[:, None]
    # Rows from sees_any on see a key of this tile, from sees_all on they see the whole tile.
    sees_any, sees_all = 0, 0
    if CAUSAL:
        sees_any = tl.minimum(tl.maximum(col - (num_keys - num_queries), 0), num_queries)
        sees_any = sees_any // BLOCK_Q * BLOCK_Q
        sees_all = tl.maximum(col + BLOCK_K - 1 - (num_keys - num_queries), 0)
        sees_all = tl.minimum(tl.cdiv(sees_all, BLOCK_Q) * BLOCK_Q, num_queries)
    for member in range(0, heads_per_key):
        h = key_head * heads_per_key + member
        first = (b * num_heads + h) * num_queries
        if FACTORED:
            narrow = tl.load(SPREAD + b * num_heads + h) <= spread_limit
        for INSIDE in tl.static_range(2):
            for WIDE in tl.static_range(2 if FACTORED else 1):
                start = sees_all if INSIDE else sees_any
                stop = num_queries if INSIDE else sees_all
                if FACTORED:
                    stop = tl.where(narrow != (WIDE == 1), stop, start)
                for row in range(start, stop, BLOCK_Q):
                    index = row + tl.arange(0, BLOCK_Q)
                    rows = index[None, :]
                    query = load_rows(
                        Q + b * q_b + h * q_h, row, q_n, num_queries, KEY_DIM, KEY_PAD, BLOCK_Q,
                        True,
                    )  # fmt: skip
                    grad = load_rows(
                        GRAD + b * g_b + h * g_h, row, g_n, num_queries, VALUE_DIM, VALUE_PAD,
                        BLOCK_Q, True,
                    )  # fmt: skip
                    normaliser = tl.load(
                        NORMALISER + first + index, mask=index < num_queries, other=float("inf")
                    )
                    delta = tl.load(DELTA + first + index, mask=index < num_queries, other=0.0)
                    row_terms = ()
                    if HAS_ROW:
                        row_terms = load_terms(
                            ROW + first * COMPONENTS, row, num_queries, BLOCK_Q, COMPONENTS
                        )
                    dots = ()
                    for r in tl.static_range(PRODUCTS):
                        dots = dots + (tl.dot(keys[r], tl.trans(query), input_precision="ieee"),)
                    grad_weight = tl.dot(value, tl.trans(grad), input_precision="ieee")
                    if DROPOUT:
                        keep = tl.trans(
                            keep_tile(DRAW, sample, h, row, col, threshold, BLOCK_Q, BLOCK_K)
                        )
                        grad_weight = tl.where(keep, grad_weight * keep_scale, 0.0)
                    grad_weight = grad_weight - delta[None, :]
                    extra = 0.0
                    if HAS_BIAS:
                        extra = LOG2E * load_pairs(
                            BIAS + b * bias_b + h * bias_h, rows, cols, num_queries, num_keys,
                            bias_n, bias_l,
                        )  # fmt: skip
                    # Keys past the last one give gradients that are not stored: only causality
                    # and masks have to be looked at.
                    if (CAUSAL and not INSIDE) or not SHOWS_ALL:
                        visible = visible_pairs(
                            rows, cols, num_queries, num_keys,
                            KEY_MASK + b * num_keys if HAS_KEY_MASK else KEY_MASK,
                            PAIR_MASK + b * pair_b + h * pair_h if HAS_PAIR_MASK else PAIR_MASK,
                            pair_n, pair_l, not INSIDE, CAUSAL, HAS_KEY_MASK, HAS_PAIR_MASK,
                        )  # fmt: skip
                        extra = tl.where(visible, extra, float("-inf"))
                    if FACTORED and not WIDE:
                        row_top, row_factors = spread(row_terms, COMPONENTS)
                        score = dots[0] * scales[0] + col_top[:, None]
                        if HAS_BIAS or (CAUSAL and not INSIDE) or not SHOWS_ALL:
                            score = score + extra
                        factor = pair_factor(
                            across(row_factors, COMPONENTS), down(col_factors, COMPONENTS),
                            COMPONENTS,
                        )  # fmt: skip
                        shared = tl.exp2(score - (normaliser - row_top)[None, :])
                        weight = shared * factor
                        shared = shared * grad_weight
                        sums = ()
                        for r in tl.static_range(COMPONENTS):
                            part = tl.sum(shared * row_factors[r][None, :], 1)
                            sums = sums + (grad_col[r] + part * col_factors[r],)
                        grad_col = sums
                        to_query = (weight * grad_weight).to(query.dtype)
                        grad_keys = (tl.dot(to_query, query, grad_keys[0], input_precision="ieee"),)
                    else:
                        scores = component_scores(
                            dots, scales, across(row_terms, COMPONENTS if HAS_ROW else 0),
                            down(col_terms, COMPONENTS if HAS_COL else 0), extra,
                            COMPONENTS, PRODUCTS, HAS_ROW, HAS_COL,
                            HAS_BIAS or (CAUSAL and not INSIDE) or not SHOWS_ALL,
                        )  # fmt: skip
                        weights = component_weights(scores, normaliser[None, :], COMPONENTS, HARD)
                        weight = added(weights, COMPONENTS)
                        gradients = ()
                        for r in tl.static_range(COMPONENTS):
                            gradients = gradients + (weights[r] * grad_weight,)
                        if HAS_COL:
                            sums = ()
                            for r in tl.static_range(COMPONENTS):
                                sums = sums + (grad_col[r] + tl.sum(gradients[r], 1),)
                            grad_col = sums
                        if WANTS_SCALES:
                            sums = ()
                            for r in tl.static_range(COMPONENTS):
                                part = tl.sum(gradients[r] * dots[r % PRODUCTS], 1)
                                sums = sums + (grad_scale[r] + part,)
                            grad_scale = sums
                        if PRODUCTS == 1:
                            to_query = gradients[0]
                            if not EQUAL_SCALES:
                                to_query = to_query * (scales[0] * LN2)
                            for r in tl.static_range(1, COMPONENTS):
                                part = gradients[r]
                                if not EQUAL_SCALES:
                                    part = part * (scales[r] * LN2)
                                to_query = to_query + part
                            grad_keys = (
                                tl.dot(to_query.to(query.dtype), query, grad_keys[0],
                                       input_precision="ieee"),
                            )  # fmt: skip
                        else:
                            sums = ()
                            for r in tl.static_range(PRODUCTS):
                                sums = sums + (
                                    tl.dot(gradients[r].to(query.dtype), query, grad_keys[r],
                                           input_precision="ieee"),
                                )  # fmt: skip
                            grad_keys = sums
                    if DROPOUT:
                        weight = tl.where(keep, weight * keep_scale, 0.0)
                    grad_value = tl.dot(
                        weight.to(grad.dtype), grad, grad_value, input_precision="ieee"
                    )

    for r in tl.static_range(PRODUCTS):
        grad_key = grad_keys[r]
        if PRODUCTS > 1 or EQUAL_SCALES:
            grad_key = grad_key * (scales[r] * LN2)
        store_rows(DK + b * dk_b + key_head * dk_h + r * dk_c, grad_key, col, dk_n, num_keys,
                   KEY_DIM, KEY_PAD, BLOCK_K)  # fmt: skip
    store_rows(DV + b * dv_b + key_head * dv_h, grad_value, col, dv_n, num_keys,
               VALUE_DIM, VALUE_PAD, BLOCK_K)  # fmt: skip
    index = col + tl.arange(0, BLOCK_K)
    for r in tl.static_range(COMPONENTS):
        at = first_col + r * num_keys + index
        if HAS_COL:
            tl.store(DCOL + at, grad_col[r], mask=index < num_keys)
        if WANTS_SCALES:
            tl.store(DSCALE + at, grad_scale[r], mask=index < num_keys)


@triton.jit
def grad_bias_kernel(
    Q, K, V, GRAD, NORMALISER, DELTA, DBIAS,
    SCALES, ROW, COL, SPREAD, KEY_MASK, PAIR_MASK, BIAS, DRAW,
    scale, keep_scale, threshold, spread_limit,
    q_b, q_h, q_n, k_b, k_h, k_c, k_n, v_b, v_h, v_n, g_b, g_h, g_n,
    pair_b, pair_h, pair_n, pair_l, bias_b, bias_h, bias_n, bias_l,
    num_heads, num_queries, num_keys, heads_per_key, heads_per_value, num_samples,
    bias_samples, bias_heads, bias_rows, bias_cols,
    COMPONENTS: tl.constexpr, PRODUCTS: tl.constexpr, HARD: tl.constexpr, FACTORED: tl.constexpr,
    EQUAL_SCALES: tl.constexpr, CAUSAL: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_ROW: tl.constexpr, HAS_COL: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    HAS_PAIR_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    ONE_ROW: tl.constexpr, ONE_COL: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile of the bias: Σ_r g_ijr, summed over what the bias is broadcast over.

    DBIAS is contiguous, (bias_samples, bias_heads, bias_rows, bias_cols), each 1 or the full size.
    """
    row_tiles = 1 if ONE_ROW else tl.cdiv(num_queries, BLOCK_Q)
    col_tiles = 1 if ONE_COL else tl.cdiv(num_keys, BLOCK_K)
    index = tl.program_id(0)
    first_col = index % col_tiles * BLOCK_K
    first_row = index // col_tiles % row_tiles * BLOCK_Q
    owner = index // (col_tiles * row_tiles)
    last_row = num_queries if ONE_ROW else first_row + 1
    last_col = num_keys if ONE_COL else first_col + 1
    one_sample, one_head = bias_samples == 1, bias_heads == 1
    first_sample = tl.where(one_sample, 0, owner // bias_heads)
    last_sample = tl.where(one_sample, num_samples, first_sample + 1)
    first_head = tl.where(one_head, 0, owner % bias_heads)
    last_head = tl.where(one_head, num_heads, first_head + 1)

    total = tl.zeros((BLOCK_Q, BLOCK_K), tl.float32)
    for sample in range(first_sample, last_sample):
        for head in range(first_head, last_head):
            b, h = tl.cast(sample, tl.int64), tl.cast(head, tl.int64)
            key_head, value_head = h // heads_per_key, h // heads_per_value
            scales = load_scales(
                SCALES + key_head * COMPONENTS if HAS_SCALES else SCALES,
                scale, COMPONENTS, EQUAL_SCALES, HAS_SCALES,
            )  # fmt: skip
            start = (b * num_heads + h) * num_queries
            first_key = (b * (num_heads // heads_per_key) + key_head) * COMPONENTS * num_keys
            for row in range(first_row, last_row, BLOCK_Q):
                at = row + tl.arange(0, BLOCK_Q)
                rows, inside = at[:, None], at < num_queries
                query = load_rows(
                    Q + b * q_b + h * q_h, row, q_n, num_queries, KEY_DIM, KEY_PAD, BLOCK_Q, True
                )
                grad = load_rows(
                    GRAD + b * g_b + h * g_h, row, g_n, num_queries, VALUE_DIM, VALUE_PAD,
                    BLOCK_Q, True,
                )  # fmt: skip
                normaliser = tl.load(NORMALISER + start + at, mask=inside, other=float("inf"))
                delta = tl.load(DELTA + start + at, mask=inside, other=0.0)
                row_terms = ()
                if HAS_ROW:
                    row_terms = load_terms(
                        ROW + start * COMPONENTS, row, num_queries, BLOCK_Q, COMPONENTS
                    )
                for col in range(first_col, last_col, BLOCK_K):
                    cols = (col + tl.arange(0, BLOCK_K))[None, :]
                    dots = ()
                    for r in tl.static_range(PRODUCTS):
                        key = load_rows(
                            K + b * k_b + key_head * k_h + r * k_c, col, k_n, num_keys,
                            KEY_DIM, KEY_PAD, BLOCK_K, True,
                        )  # fmt: skip
                        dots = dots + (tl.dot(query, tl.trans(key), input_precision="ieee"),)
                    value = load_rows(
                        V + b * v_b + value_head * v_h, col, v_n, num_keys, VALUE_DIM, VALUE_PAD,
                        BLOCK_K, True,
                    )  # fmt: skip
                    grad_weight = tl.dot(grad, tl.trans(value), input_precision="ieee")
                    if DROPOUT:
                        keep = keep_tile(DRAW, sample, h, row, col, threshold, BLOCK_Q, BLOCK_K)
                        grad_weight = tl.where(keep, grad_weight * keep_scale, 0.0)
                    col_terms = ()
                    if HAS_COL:
                        col_terms = load_terms(COL + first_key, col, num_keys, BLOCK_K, COMPONENTS)
                    extra = LOG2E * load_pairs(
                        BIAS + b * bias_b + h * bias_h, rows, cols, num_queries, num_keys,
                        bias_n, bias_l,
                    )  # fmt: skip
                    visible = visible_pairs(
                        rows, cols, num_queries, num_keys,
                        KEY_MASK + b * num_keys if HAS_KEY_MASK else KEY_MASK,
                        PAIR_MASK + b * pair_b + h * pair_h if HAS_PAIR_MASK else PAIR_MASK,
                        pair_n, pair_l, True, CAUSAL, HAS_KEY_MASK, HAS_PAIR_MASK,
                    )  # fmt: skip
                    scores = component_scores(
                        dots, scales, down(row_terms, COMPONENTS if HAS_ROW else 0),
                        across(col_terms, COMPONENTS if HAS_COL else 0),
                        tl.where(visible, extra, float("-inf")),
                        COMPONENTS, PRODUCTS, HAS_ROW, HAS_COL, True,
                    )  # fmt: skip
                    weights = component_weights(scores, normaliser[:, None], COMPONENTS, HARD)
                    total += added(weights, COMPONENTS) * (grad_weight - delta[:, None])

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
