"""Scores and weights of one tile of softmax or mixture attention, in either orientation.

A score in units of log 2 is

    s_r = scale_r · (query · key_r) + row_r + col_r + bias          r < components

with row_r and col_r one number per query and per key. There are as many query · key tiles
("products") as components, or one that all components share (shifted keys). The weight of a pair is
Σ_r 2^(s_r) (soft) or max_r 2^(s_r) (hard), divided by the row's sum.

Factored (one product, equal scales, soft) needs one exponential per pair:

    Σ_r 2^(s_r) = 2^(t + row_top) · F,   t = scale · (query · key) + col_top + bias
    F = Σ_r A_r C_r,   A_r = 2^(row_r - row_top),   C_r = 2^(col_r - col_top),

where row_top and col_top are the maxima over the components. See kernels/README.md for its range.

Terms and scales are tuples with one entry per component, empty if the call has none; `call` is a
`DenseArguments` and `form` a `Form` of operators.py.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from lit_probattn.kernels.tiles import (
    LN2,
    LOG2E,
    is_needed,
    load_head,
    load_pairs,
    load_rows,
    load_vector,
    marked_range,
    number,
    visible_pairs,
)


@triton.jit
def load_terms(base, head, start, length, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """Load terms (COUNT, length) of a head at start, times log₂ e, as a tuple of vectors."""
    out = ()
    if base is not None:
        for r in tl.static_range(COUNT):
            term = load_vector(base + (head * COUNT + r) * length, start, length, 0.0, BLOCK)
            out = out + (term * LOG2E,)
    return out


@triton.jit
def load_scales(call, key_head, COUNT: tl.constexpr, EQUAL: tl.constexpr):
    """Return the factors of query · key of every component, times log₂ e."""
    out = ()
    for r in tl.static_range(COUNT):
        if call.scales is not None:
            at = call.scales + key_head * number(call.num_scales) + (0 if EQUAL else r)
            out = out + (tl.load(at) * LOG2E,)
        else:
            out = out + (call.scale * LOG2E,)
    return out


@triton.jit
def load_queries(
    call, grad_out, NORMALISER, DELTA, b, h, row, form: tl.constexpr, BLOCK: tl.constexpr
):
    """Return a tile of queries, of grad_out, and their normalisers, δ and terms."""
    length, head = number(call.pairs.num_queries), b * number(call.num_heads) + h
    query = load_head(call.query, b, h, row, length, form.key_dim, form.key_pad, BLOCK, True)
    grad = load_head(grad_out, b, h, row, length, form.value_dim, form.value_pad, BLOCK, True)
    normaliser = load_vector(NORMALISER + head * length, row, length, float("inf"), BLOCK)
    delta = load_vector(DELTA + head * length, row, length, 0.0, BLOCK)
    terms = load_terms(call.row, head, row, length, BLOCK, form.components)
    return query, grad, normaliser, delta, terms


@triton.jit
def load_key(
    call, b, key_head, col, r, form: tl.constexpr, BLOCK: tl.constexpr, CHECK: tl.constexpr
):
    """Load a tile of keys of component r."""
    x, length = call.key, number(call.pairs.num_keys)
    base = x.base + b * x.batch + key_head * x.head + r * x.part
    return load_rows(base, col, x.row, length, form.key_dim, form.key_pad, BLOCK, CHECK)


@triton.jit
def key_products(
    call, query, b, key_head, col, form: tl.constexpr, BLOCK: tl.constexpr, CHECK: tl.constexpr
):
    """Load the keys of all products; return them and the tiles query · key."""
    PRODUCTS: tl.constexpr = form.products
    keys, dots = (), ()
    for r in tl.static_range(PRODUCTS):
        keys = keys + (load_key(call, b, key_head, col, r, form, BLOCK, CHECK),)
        dots = dots + (tl.dot(query, tl.trans(keys[r]), input_precision="ieee"),)
    return keys, dots


@triton.jit
def load_value(
    call, b, value_head, col, form: tl.constexpr, BLOCK: tl.constexpr, CHECK: tl.constexpr
):
    """Load a tile of values."""
    length = number(call.pairs.num_keys)
    return load_head(
        call.value, b, value_head, col, length, form.value_dim, form.value_pad, BLOCK, CHECK
    )


@triton.jit
def load_key_terms(call, b, key_head, col, form: tl.constexpr, BLOCK: tl.constexpr):
    """Load the terms of a tile of keys."""
    head = b * (number(call.num_heads) // call.heads_per_key) + key_head
    return load_terms(call.col, head, col, number(call.pairs.num_keys), BLOCK, form.components)


@triton.jit
def pair_extra(pairs, b, h, rows, cols, EDGE: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the summand that all components' scores share; empty if there is none.

    It is the bias, and -inf for masked pairs; EDGE as in `visible_pairs`.
    """
    extra = ()
    if pairs.bias.base is not None:
        bias = load_pairs(pairs.bias, b, h, rows, cols, pairs).to(tl.float32)
        extra = (LOG2E * bias,)
    if EDGE or pairs.key_mask is not None or pairs.mask.base is not None:
        MASKED: tl.constexpr = pairs.mask.base is not None
        visible = visible_pairs(pairs, b, h, rows, cols, EDGE, CAUSAL, MASKED)
        extra = (tl.where(visible, extra[0] if len(extra) > 0 else 0.0, float("-inf")),)
    return extra


@triton.jit
def loop_part(
    first, middle, last, narrow, PART: tl.constexpr, ONE_LOOP: tl.constexpr, FACTORED: tl.constexpr
):
    """Return start and stop of a part of the loop over first … middle … last.

    Part 0 ends at middle, part 1 starts there, or is the whole loop with ONE_LOOP. Factored scores
    have a part 2, the whole loop, which is the only part that runs in heads that are not `narrow`,
    whose F could underflow.
    """
    start = middle if PART == 1 and not ONE_LOOP else first
    stop = middle if PART == 0 else last
    if FACTORED:
        stop = tl.where(narrow != (PART == 2), stop, start)
    return start, stop


@triton.jit
def is_narrow(call, b, h, FACTORED: tl.constexpr):
    """Whether F cannot underflow in a head."""
    narrow = True
    if FACTORED:
        x, heads = call.spread, number(call.num_heads)
        parts, key_head = number(x.parts), h // call.heads_per_key
        key_head += b * (heads // call.heads_per_key)
        rows = _largest_part(x.rows + (b * heads + h) * parts, parts)
        cols = _largest_part(x.cols + key_head * parts, parts)
        narrow = tl.minimum(rows, cols) <= call.spread_limit
    return narrow


@triton.jit
def _largest_part(base, count):
    """Return the maximum of nonnegative numbers."""
    top = 0.0
    for start in range(0, count, 64):
        top = tl.maximum(top, tl.max(load_vector(base, start, count, 0.0, 64), 0))
    return top


@triton.jit
def spread(terms, FACTORED: tl.constexpr):
    """Return the maximum of the terms and the factors 2^(term - maximum), each at most 1.

    If all are -inf, the factors are 0.
    """
    top, factors = (), ()
    if FACTORED:
        top = largest(terms)
        base = tl.maximum(top, -1e30)
        for r in tl.static_range(len(terms)):
            factors = factors + (tl.exp2(terms[r] - base),)
    return top, factors


@triton.jit
def view(terms, DOWN: tl.constexpr):
    """View vectors as (BLOCK, 1) tiles, or as (1, BLOCK) tiles."""
    out = ()
    for r in tl.static_range(len(terms)):
        out = out + (terms[r][:, None] if DOWN else terms[r][None, :],)
    return out


@triton.jit
def component_scores(dots, scales, rows, cols, extra):
    """Return s_r of every component; terms are tiles that broadcast."""
    out = ()
    for r in tl.static_range(len(scales)):
        score = dots[r % len(dots)] * scales[r]
        if len(cols) > 0:
            score = score + cols[r]
        if len(rows) > 0:
            score = score + rows[r]
        if len(extra) > 0:
            score = score + extra[0]
        out = out + (score,)
    return out


@triton.jit
def factored_score(dots, scales, col_top, extra):
    """Return t, the exponent of a pair of factored scores."""
    score = dots[0] * scales[0] + col_top
    if len(extra) > 0:
        score = score + extra[0]
    return score


@triton.jit
def largest(scores):
    """Return the elementwise maximum over the components."""
    top = scores[0]
    for r in tl.static_range(1, len(scores)):
        top = tl.maximum(top, scores[r])
    return top


@triton.jit
def pair_factor(row_factors, col_factors):
    """Return F = Σ_r A_r C_r."""
    total = row_factors[0] * col_factors[0]
    for r in tl.static_range(1, len(row_factors)):
        total = total + row_factors[r] * col_factors[r]
    return total


@triton.jit
def added(tiles):
    """Return the sum of tiles."""
    total = tiles[0]
    for r in tl.static_range(1, len(tiles)):
        total = total + tiles[r]
    return total


@triton.jit
def added_sums(sums, tiles):
    """Return `sums` plus the sums of the tiles over their second dimension."""
    out = ()
    for r in tl.static_range(len(sums)):
        out = out + (sums[r] + tl.sum(tiles[r], 1),)
    return out


@triton.jit
def without(sums, residual, share):
    """Return sums minus their share of the rounding residual."""
    out = ()
    for r in tl.static_range(len(sums)):
        out = out + (sums[r] - residual * share[r],)
    return out


@triton.jit
def scaled(gradients, scales, EQUAL: tl.constexpr):
    """Return the gradients of the products; with EQUAL, their sum is scaled afterwards."""
    out = ()
    for r in tl.static_range(len(gradients)):
        out = out + (gradients[r] if EQUAL else gradients[r] * (scales[r] * LN2),)
    return out


@triton.jit
def component_weights(scores, normaliser, HARD: tl.constexpr):
    """Return P_r = 2^(s_r - normaliser); HARD: 0 except for the first largest component."""
    weights = ()
    if HARD and len(scores) > 1:
        top, winner = scores[0], tl.zeros_like(scores[0]).to(tl.int32)
        for r in tl.static_range(1, len(scores)):
            winner = tl.where(scores[r] > top, r, winner)
            top = tl.maximum(top, scores[r])
        weight = tl.exp2(top - normaliser)
        for r in tl.static_range(len(scores)):
            weights = weights + (tl.where(winner == r, weight, 0.0),)
    else:
        for r in tl.static_range(len(scores)):
            weights = weights + (tl.exp2(scores[r] - normaliser),)
    return weights


@triton.jit
def weight_gradient(left, right, delta, kept, pairs):
    """Return dP - δ of a tile, from grad_out and the values in the tile's orientation."""
    grad_weight = tl.dot(left, tl.trans(right), input_precision="ieee")
    if pairs.draw is not None:
        grad_weight = tl.where(kept, grad_weight * pairs.keep_scale, 0.0)
    return grad_weight - delta


@triton.jit
def score_gradients(weights, grad_weight):
    """Return g_r = P_r (dP - δ)."""
    out = ()
    for r in tl.static_range(len(weights)):
        out = out + (weights[r] * grad_weight,)
    return out


@triton.jit
def query_program(call, BLOCK: tl.constexpr, CAUSAL: tl.constexpr):
    """Return first row, sample and head of a program with one tile of queries."""
    num_tiles = tl.cdiv(number(call.pairs.num_queries), BLOCK)
    tile, place = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    if CAUSAL:  # the longest rows first
        tile = num_tiles - 1 - tile
    b, h = place // number(call.num_heads), place % number(call.num_heads)
    return tile * BLOCK, tl.cast(b, tl.int64), tl.cast(h, tl.int64)


@triton.jit
def _difference(terms, start, length, BLOCK: tl.constexpr):
    """Return the largest difference between a point's terms; 0 if all are -inf."""
    top, low = largest(terms), terms[0]
    for r in tl.static_range(1, len(terms)):
        low = tl.minimum(low, terms[r])
    inside = start + tl.arange(0, BLOCK) < length
    return tl.max(tl.where(inside & (top > float("-inf")), top - low, 0.0), 0)


@triton.jit
def store_ranges(call, b, h, row, form: tl.constexpr, BLOCK: tl.constexpr):
    """Store inputs of later launches: the range of a sample's real keys, and parts of the spread.

    The program of a tile of rows stores one part of the queries; if its head is the first of a key
    head, it also stores every n-th tile of keys, for n tiles of rows.
    """
    if call.key_range is not None:  # noqa: SIM102 - a constant, then a branch
        if row + h == 0:  # one program per sample
            first, last = marked_range(call.pairs.key_mask, b, number(call.pairs.num_keys))
            tl.store(call.key_range + 2 * b, first)
            tl.store(call.key_range + 2 * b + 1, last)
    if form.factored:
        x, rows, keys = call.spread, number(call.pairs.num_queries), number(call.pairs.num_keys)
        parts, part, head = number(x.parts), row // BLOCK, b * number(call.num_heads) + h
        terms = load_terms(call.row, head, row, rows, BLOCK, form.components)
        tl.store(x.rows + head * parts + part, _difference(terms, row, rows, BLOCK))
        if h % call.heads_per_key == 0:
            key_head, widest = head // call.heads_per_key, 0.0
            for col in range(part * BLOCK, keys, parts * BLOCK):
                terms = load_terms(call.col, key_head, col, keys, BLOCK, form.components)
                widest = tl.maximum(widest, _difference(terms, col, keys, BLOCK))
            tl.store(x.cols + key_head * parts + part, widest)


@triton.jit
def seen_keys(call, b, row, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the range of keys, in whole tiles, that some row of a tile attends to.

    The second result is the end of the keys that all rows attend to by position, in whole tiles.
    A tile of rows that are not needed attends to no keys.
    """
    pairs = call.pairs
    first, by_all, by_any = 0, number(pairs.num_keys), number(pairs.num_keys)
    if CAUSAL:
        offset = number(pairs.num_keys) - number(pairs.num_queries)
        by_all = tl.minimum(tl.maximum(row + 1 + offset, 0), number(pairs.num_keys))
        by_any = tl.minimum(tl.maximum(row + BLOCK_Q + offset, 0), number(pairs.num_keys))
    by_all = by_all // BLOCK_K * BLOCK_K
    if call.key_range is not None:
        first = tl.load(call.key_range + 2 * b) // BLOCK_K * BLOCK_K
        last = tl.load(call.key_range + 2 * b + 1)
        by_any = tl.minimum(by_any, last)
        by_all = tl.maximum(tl.minimum(by_all, tl.cdiv(last, BLOCK_K) * BLOCK_K), first)
    if pairs.query_mask is not None:
        needed = is_needed(pairs, b, row, BLOCK_Q)
        by_all, by_any = tl.where(needed, by_all, first), tl.where(needed, by_any, first)
    return first, by_all, by_any
