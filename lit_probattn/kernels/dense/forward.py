"""Forward kernel of softmax and mixture attention: one online softmax over all components."""

# mypy: ignore-errors
import triton
import triton.language as tl

from lit_probattn.kernels.dense.tiles import (
    across,
    component_scores,
    down,
    largest,
    load_scales,
    load_terms,
    pair_factor,
    spread,
)
from lit_probattn.kernels.tiles import (
    LOG2E,
    keep_tile,
    load_pairs,
    load_rows,
    store_rows,
    visible_pairs,
)


@triton.jit
def forward_kernel(
    Q, K, V, OUT, NORMALISER,
    SCALES, ROW, COL, SPREAD, KEY_MASK, PAIR_MASK, BIAS, DRAW,
    scale, keep_scale, threshold, spread_limit, headroom,
    q_b, q_h, q_n, k_b, k_h, k_c, k_n, v_b, v_h, v_n, o_b, o_h, o_n,
    pair_b, pair_h, pair_n, pair_l, bias_b, bias_h, bias_n, bias_l,
    num_heads, num_queries, num_keys, heads_per_key, heads_per_value,
    COMPONENTS: tl.constexpr, PRODUCTS: tl.constexpr, HARD: tl.constexpr, FACTORED: tl.constexpr,
    EQUAL_SCALES: tl.constexpr, CAUSAL: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_ROW: tl.constexpr, HAS_COL: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    HAS_PAIR_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of queries of one head.

    Saves the output and, per row, log₂ of its sum of weights; +inf for a row that sees nothing, so
    that all its weights are 0 when they are computed again.
    """
    PLAIN: tl.constexpr = COMPONENTS == 1 and not (HAS_ROW or HAS_COL or HAS_BIAS)
    SHOWS_ALL: tl.constexpr = not (HAS_KEY_MASK or HAS_PAIR_MASK)
    num_tiles = tl.cdiv(num_queries, BLOCK_Q)
    tile, pair_index = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    if CAUSAL:  # the longest rows first
        tile = num_tiles - 1 - tile
    row, sample, head = tile * BLOCK_Q, pair_index // num_heads, pair_index % num_heads
    b, h = tl.cast(sample, tl.int64), tl.cast(head, tl.int64)
    key_head, value_head = h // heads_per_key, h // heads_per_value
    num_key_heads = num_heads // heads_per_key
    K += b * k_b + key_head * k_h
    V += b * v_b + value_head * v_h
    if HAS_COL:
        COL += (b * num_key_heads + key_head) * COMPONENTS * num_keys
    if HAS_KEY_MASK:
        KEY_MASK += b * num_keys
    if HAS_PAIR_MASK:
        PAIR_MASK += b * pair_b + h * pair_h
    if HAS_BIAS:
        BIAS += b * bias_b + h * bias_h
    query = load_rows(Q + b * q_b + h * q_h, row, q_n, num_queries, KEY_DIM, KEY_PAD, BLOCK_Q, True)
    scales = load_scales(
        SCALES + key_head * COMPONENTS if HAS_SCALES else SCALES,
        scale, COMPONENTS, EQUAL_SCALES, HAS_SCALES,
    )  # fmt: skip
    row_terms = ()
    if HAS_ROW:
        row_terms = load_terms(
            ROW + (b * num_heads + h) * COMPONENTS * num_queries,
            row, num_queries, BLOCK_Q, COMPONENTS,
        )  # fmt: skip
    if FACTORED:
        row_top, row_factors = spread(row_terms, COMPONENTS)
        narrow = tl.load(SPREAD + pair_index) <= spread_limit

    total = tl.zeros((BLOCK_Q, VALUE_PAD), tl.float32)
    weight_sum = tl.zeros((BLOCK_Q,), tl.float32)
    top = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    rows = (row + tl.arange(0, BLOCK_Q))[:, None]
    seen_by_all, seen_by_any = num_keys, num_keys
    if CAUSAL:
        seen_by_all = tl.minimum(tl.maximum(row + 1 + num_keys - num_queries, 0), num_keys)
        seen_by_any = tl.minimum(tl.maximum(row + BLOCK_Q + num_keys - num_queries, 0), num_keys)
    seen_by_all = seen_by_all // BLOCK_K * BLOCK_K
    # Tiles that every row sees whole, then those at the edge, which compare positions. With
    # FACTORED each in two versions of which one runs: WIDE where F could underflow.
    for EDGE in tl.static_range(2):
        for WIDE in tl.static_range(2 if FACTORED else 1):
            start = seen_by_all if EDGE else 0
            stop = seen_by_any if EDGE else seen_by_all
            if FACTORED:
                stop = tl.where(narrow != (WIDE == 1), stop, start)
            for col in range(start, stop, BLOCK_K):
                cols = (col + tl.arange(0, BLOCK_K))[None, :]
                dots = ()
                for r in tl.static_range(PRODUCTS):
                    key = load_rows(
                        K + r * k_c, col, k_n, num_keys, KEY_DIM, KEY_PAD, BLOCK_K, EDGE
                    )
                    dots = dots + (tl.dot(query, tl.trans(key), input_precision="ieee"),)
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
                # `score` is the largest log₂-weight of a pair's components (PLAIN: unscaled).
                scores = dots
                if FACTORED and not WIDE:
                    col_top, col_factors = spread(col_terms, COMPONENTS)
                    score = dots[0] * scales[0] + col_top[None, :]
                    if EDGE or HAS_BIAS or not SHOWS_ALL:
                        score = score + extra
                elif PLAIN:
                    score = dots[0]
                    if EDGE or not SHOWS_ALL:
                        score = score + extra
                else:
                    scores = component_scores(
                        dots, scales, down(row_terms, COMPONENTS if HAS_ROW else 0),
                        across(col_terms, COMPONENTS if HAS_COL else 0), extra,
                        COMPONENTS, PRODUCTS, HAS_ROW, HAS_COL,
                        EDGE or HAS_BIAS or not SHOWS_ALL,
                    )  # fmt: skip
                    score = largest(scores, COMPONENTS)
                tile_top = tl.max(score, 1)
                if PLAIN:
                    tile_top = tile_top * scales[0]
                if FACTORED and not WIDE:
                    tile_top = tile_top - headroom
                new_top = tl.maximum(top, tile_top)
                base = new_top
                if EDGE or HAS_BIAS or not SHOWS_ALL:  # a row that has seen nothing yet
                    base = tl.where(new_top == float("-inf"), 0.0, new_top)
                if FACTORED and not WIDE:
                    factor = pair_factor(
                        down(row_factors, COMPONENTS), across(col_factors, COMPONENTS), COMPONENTS
                    )
                    weight = tl.exp2(score - base[:, None]) * factor
                elif PLAIN:
                    weight = tl.exp2(score * scales[0] - base[:, None])
                elif HARD:
                    weight = tl.exp2(score - base[:, None])
                else:
                    weight = tl.exp2(scores[0] - base[:, None])
                    for r in tl.static_range(1, COMPONENTS):
                        weight = weight + tl.exp2(scores[r] - base[:, None])
                shrink = tl.exp2(top - base)
                weight_sum = weight_sum * shrink + tl.sum(weight, 1)
                if DROPOUT:
                    keep = keep_tile(DRAW, sample, head, row, col, threshold, BLOCK_Q, BLOCK_K)
                    weight = tl.where(keep, weight, 0.0)
                value = load_rows(V, col, v_n, num_keys, VALUE_DIM, VALUE_PAD, BLOCK_K, EDGE)
                total = tl.dot(
                    weight.to(value.dtype), value, total * shrink[:, None], input_precision="ieee"
                )
                top = new_top

    empty = weight_sum == 0.0
    out = total / tl.where(empty, 1.0, weight_sum)[:, None]
    if DROPOUT:
        out = out * keep_scale
    store_rows(OUT + b * o_b + h * o_h, out, row, o_n, num_queries, VALUE_DIM, VALUE_PAD, BLOCK_Q)
    normaliser = top + tl.log2(tl.where(empty, 1.0, weight_sum))
    if FACTORED:
        normaliser = tl.where(narrow, normaliser + row_top, normaliser)
    normaliser = tl.where(empty, float("inf"), normaliser)
    index = row + tl.arange(0, BLOCK_Q)
    tl.store(NORMALISER + pair_index.to(tl.int64) * num_queries + index, normaliser,
             mask=index < num_queries)  # fmt: skip
