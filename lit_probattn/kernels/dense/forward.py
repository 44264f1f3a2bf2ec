"""Forward kernel of softmax and mixture attention: one online softmax over all components."""

# mypy: ignore-errors
import triton
import triton.language as tl

from lit_probattn.kernels.dense.tiles import (
    component_scores,
    factored_score,
    is_narrow,
    key_products,
    largest,
    load_key_terms,
    load_scales,
    load_terms,
    load_value,
    loop_part,
    pair_extra,
    pair_factor,
    query_program,
    seen_keys,
    spread,
    store_ranges,
    view,
)
from lit_probattn.kernels.tiles import (
    kept_pairs,
    load_head,
    number,
    store_rows,
    store_vector,
    zero_tile,
)


@triton.jit
def ranges_kernel(call, form: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Write the range of a sample's real keys, and the spread of terms."""
    row, b, h = query_program(call, BLOCK_Q, False)
    store_ranges(call, b, h, row, form, BLOCK_Q)


@triton.jit
def _forward_tile(
    call, query, scales, row_terms, row_factors, total, weight_sum, top,
    b, h, key_head, value_head, row, col,
    EDGE: tl.constexpr, NARROW: tl.constexpr, form: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the sums and maxima of a tile of rows plus one tile of keys.

    EDGE: the tile compares positions. NARROW: factored scores, if F cannot underflow.
    """
    pairs = call.pairs
    rows = (row + tl.arange(0, BLOCK_Q))[:, None]
    cols = (col + tl.arange(0, BLOCK_K))[None, :]
    kept = kept_pairs(pairs, b, h, row, col, BLOCK_Q, BLOCK_K, False)
    _keys, dots = key_products(call, query, b, key_head, col, form, BLOCK_K, EDGE)
    col_terms = load_key_terms(call, b, key_head, col, form, BLOCK_K)
    extra = pair_extra(pairs, b, h, rows, cols, EDGE, form.causal)
    # Plain scores are scaled after the maximum is computed.
    PLAIN: tl.constexpr = form.plain
    # `score` is the largest log₂-weight of a pair's components.
    scores = dots
    if NARROW:
        col_top, col_factors = spread(col_terms, NARROW)
        score = factored_score(dots, scales, col_top[None, :], extra)
    elif PLAIN:
        score = dots[0]
        if len(extra) > 0:
            score = score + extra[0]
    else:
        scores = component_scores(
            dots, scales, view(row_terms, True), view(col_terms, False), extra
        )
        score = largest(scores)
    tile_top = tl.max(score, 1)
    if PLAIN:
        tile_top = tile_top * scales[0]
    if NARROW:
        tile_top = tile_top - call.headroom
    new_top = tl.maximum(top, tile_top)
    base = new_top
    if len(extra) > 0 or call.col is not None:  # a row without keys so far
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    if NARROW:
        factor = pair_factor(view(row_factors, True), view(col_factors, False))
        weight = tl.exp2(score - base[:, None]) * factor
    elif PLAIN:
        weight = tl.exp2(score * scales[0] - base[:, None])
    elif form.hard:
        weight = tl.exp2(score - base[:, None])
    else:
        weight = tl.exp2(scores[0] - base[:, None])
        for r in tl.static_range(1, len(scores)):
            weight = weight + tl.exp2(scores[r] - base[:, None])
    shrink = tl.exp2(top - base)
    weight_sum = weight_sum * shrink + tl.sum(weight, 1)
    if pairs.draw is not None:
        weight = tl.where(kept, weight, 0.0)
    value = load_value(call, b, value_head, col, form, BLOCK_K, EDGE)
    total = tl.dot(weight.to(value.dtype), value, total * shrink[:, None], input_precision="ieee")
    return total, weight_sum, new_top


@triton.jit
def forward_kernel(
    call, out, NORMALISER,
    form: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute attention of one tile of queries of one head.

    Stores the output and, per row, log₂ of its sum of weights; +inf for fully masked rows, so that
    their recomputed weights are 0.
    """
    FACTORED: tl.constexpr = form.factored
    HALF: tl.constexpr = BLOCK_K // 2 if BLOCK_K > 16 else BLOCK_K
    pairs, num_queries = call.pairs, number(call.pairs.num_queries)
    row, b, h = query_program(call, BLOCK_Q, form.causal)
    key_head, value_head = h // call.heads_per_key, h // call.heads_per_value
    query = load_head(call.query, b, h, row, num_queries, form.key_dim, form.key_pad, BLOCK_Q, True)
    scales = load_scales(call, key_head, form.components, form.equal_scales)
    head = b * number(call.num_heads) + h
    row_terms = load_terms(call.row, head, row, num_queries, BLOCK_Q, form.components)
    row_top, row_factors = spread(row_terms, FACTORED)
    narrow = is_narrow(call, b, h, FACTORED)

    total = zero_tile(BLOCK_Q, form.value_pad)
    weight_sum = tl.zeros((BLOCK_Q,), tl.float32)
    top = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    first, by_all, by_any = seen_keys(call, b, row, BLOCK_Q, BLOCK_K, form.causal)
    # First the tiles that all rows attend to, then the edge tiles, which compare positions. With
    # dropout, comparing costs little in comparison: one loop needs fewer registers.
    ONE_LOOP: tl.constexpr = pairs.draw is not None
    for PART in tl.static_range(1 if ONE_LOOP else 0, 3 if FACTORED else 2):
        start, stop = loop_part(first, by_all, by_any, narrow, PART, ONE_LOOP, FACTORED)
        for col in range(start, stop, HALF if PART == 2 else BLOCK_K):
            total, weight_sum, top = _forward_tile(
                call, query, scales, row_terms, row_factors, total, weight_sum, top,
                b, h, key_head, value_head, row, col,
                PART > 0, FACTORED and PART < 2, form, BLOCK_Q, HALF if PART == 2 else BLOCK_K,
            )  # fmt: skip

    empty = weight_sum == 0.0
    result = total / tl.where(empty, 1.0, weight_sum)[:, None]
    if pairs.draw is not None:
        result = result * pairs.keep_scale
    store_rows(out.base + b * out.batch + h * out.head, result, row, out.row, num_queries,
               form.value_dim, form.value_pad, BLOCK_Q)  # fmt: skip
    normaliser = top + tl.log2(tl.where(empty, 1.0, weight_sum))
    if FACTORED:
        normaliser = tl.where(narrow, normaliser + row_top, normaliser)
    normaliser = tl.where(empty, float("inf"), normaliser)
    store_vector(NORMALISER + head * num_queries, normaliser, row, num_queries, BLOCK_Q)
