"""Scores and weights of one tile of softmax or mixture attention, in either orientation.

A score in units of log 2 is

    s_r = scale_r · (query · key_r) + row_r + col_r + bias          r < COMPONENTS

with row_r and col_r one number per query and per key. PRODUCTS is the number of query · key tiles:
COMPONENTS, or 1 when all components share one product (shifted keys). The weight of a pair is
Σ_r 2^(s_r) (soft) or max_r 2^(s_r) (HARD) over the row's sum.

FACTORED (one product, equal scales, soft) needs one exponential per pair:

    Σ_r 2^(s_r) = 2^(t + row_top) · F,   t = scale · (query · key) + col_top + bias
    F = Σ_r A_r C_r,   A_r = 2^(row_r - row_top),   C_r = 2^(col_r - col_top),

where row_top and col_top are the largest over the components. See docs/kernels.md for its range.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from lit_probattn.kernels.tiles import LOG2E


@triton.jit
def load_terms(base, start, length, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    """Load terms (COUNT, length) of one head at start, times log₂ e: a tuple of vectors."""
    out = ()
    index = start + tl.arange(0, BLOCK)
    for r in tl.static_range(COUNT):
        term = tl.load(base + r * length + index, mask=index < length, other=0.0)
        out = out + (term * LOG2E,)
    return out


@triton.jit
def load_scales(base, scale, COUNT: tl.constexpr, EQUAL: tl.constexpr, HAS: tl.constexpr):
    """Return the factors of query · key of every component, times log₂ e."""
    out = ()
    for r in tl.static_range(COUNT):
        if HAS:
            out = out + (tl.load(base + (0 if EQUAL else r)) * LOG2E,)
        else:
            out = out + (scale * LOG2E,)
    return out


@triton.jit
def spread(terms, COMPONENTS: tl.constexpr):
    """Return the largest of the terms and the factors 2^(term - largest), each at most 1."""
    top = terms[0]
    for r in tl.static_range(1, COMPONENTS):
        top = tl.maximum(top, terms[r])
    factors = ()
    for r in tl.static_range(COMPONENTS):
        factors = factors + (tl.exp2(terms[r] - top),)
    return top, factors


@triton.jit
def down(terms, COUNT: tl.constexpr):
    """View vectors as (BLOCK, 1) tiles."""
    out = ()
    for r in tl.static_range(COUNT):
        out = out + (terms[r][:, None],)
    return out


@triton.jit
def across(terms, COUNT: tl.constexpr):
    """View vectors as (1, BLOCK) tiles."""
    out = ()
    for r in tl.static_range(COUNT):
        out = out + (terms[r][None, :],)
    return out


@triton.jit
def component_scores(
    dots,
    scales,
    rows,
    cols,
    extra,
    COMPONENTS: tl.constexpr,
    PRODUCTS: tl.constexpr,
    HAS_ROW: tl.constexpr,
    HAS_COL: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
):
    """Return s_r of every component; `extra` carries the bias and -inf at hidden pairs."""
    out = ()
    for r in tl.static_range(COMPONENTS):
        score = dots[r % PRODUCTS] * scales[r]
        if HAS_COL:
            score = score + cols[r]
        if HAS_ROW:
            score = score + rows[r]
        if HAS_EXTRA:
            score = score + extra
        out = out + (score,)
    return out


@triton.jit
def largest(scores, COMPONENTS: tl.constexpr):
    """Return the elementwise maximum over the components."""
    top = scores[0]
    for r in tl.static_range(1, COMPONENTS):
        top = tl.maximum(top, scores[r])
    return top


@triton.jit
def pair_factor(row_factors, col_factors, COMPONENTS: tl.constexpr):
    """Return F = Σ_r A_r C_r."""
    total = row_factors[0] * col_factors[0]
    for r in tl.static_range(1, COMPONENTS):
        total = total + row_factors[r] * col_factors[r]
    return total


@triton.jit
def zero_tiles(COUNT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return COUNT zero tiles of float32."""
    out = ()
    for _ in tl.static_range(COUNT):
        out = out + (tl.zeros((ROWS, COLS), tl.float32),)
    return out


@triton.jit
def zero_vectors(COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Return COUNT zero vectors of float32."""
    out = ()
    for _ in tl.static_range(COUNT):
        out = out + (tl.zeros((SIZE,), tl.float32),)
    return out


@triton.jit
def added(tiles, COUNT: tl.constexpr):
    """Return the sum of tiles."""
    total = tiles[0]
    for r in tl.static_range(1, COUNT):
        total = total + tiles[r]
    return total


@triton.jit
def component_weights(scores, normaliser, COMPONENTS: tl.constexpr, HARD: tl.constexpr):
    """Return P_r = 2^(s_r - normaliser); HARD: of the first largest component, 0 for the others."""
    weights = ()
    if HARD and COMPONENTS > 1:
        top, winner = scores[0], tl.zeros_like(scores[0]).to(tl.int32)
        for r in tl.static_range(1, COMPONENTS):
            winner = tl.where(scores[r] > top, r, winner)
            top = tl.maximum(top, scores[r])
        weight = tl.exp2(top - normaliser)
        for r in tl.static_range(COMPONENTS):
            weights = weights + (tl.where(winner == r, weight, 0.0),)
    else:
        for r in tl.static_range(COMPONENTS):
            weights = weights + (tl.exp2(scores[r] - normaliser),)
    return weights
