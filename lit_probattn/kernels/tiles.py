"""Pieces of kernels that every family uses: tile loads, hidden pairs, Philox, dropout bits.

Rows are queries, columns are keys. A helper that takes `rows` and `cols` as two-dimensional index
tiles, one (BLOCK, 1) and one (1, BLOCK), serves both orientations of a score tile.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

LOG2E = tl.constexpr(
    1.4426950408889634
)  # scores are kept in units of log 2: exp2 is one instruction
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(
    base,
    start,
    stride,
    limit,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHECK: tl.constexpr,
):
    """Load rows start … start + BLOCK - 1 of a matrix with unit column stride: (BLOCK, PADDED).

    Columns from WIDTH on are zero, and with CHECK the rows from `limit` on.
    """
    rows, cols = tl.arange(0, BLOCK), tl.arange(0, PADDED)
    pointers = base + tl.cast(start, tl.int64) * stride + rows[:, None] * stride + cols[None, :]
    if CHECK:
        inside = (start + rows < limit)[:, None] & (cols < WIDTH)[None, :]
        tile = tl.load(pointers, mask=inside, other=0.0)
    elif WIDTH < PADDED:
        tile = tl.load(pointers, mask=(rows >= 0)[:, None] & (cols < WIDTH)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def store_rows(
    base,
    tile,
    start,
    stride,
    limit,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the rows below `limit` and the columns below WIDTH of a (BLOCK, PADDED) tile."""
    rows, cols = tl.arange(0, BLOCK), tl.arange(0, PADDED)
    pointers = base + tl.cast(start, tl.int64) * stride + rows[:, None] * stride + cols[None, :]
    inside = (start + rows < limit)[:, None] & (cols < WIDTH)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def visible_pairs(
    rows,
    cols,
    num_queries,
    num_keys,
    KEY_MASK,
    PAIR_MASK,
    pair_stride_row,
    pair_stride_col,
    EDGE: tl.constexpr,
    CAUSAL: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
    HAS_PAIR_MASK: tl.constexpr,
):
    """Return which pairs of a tile may attend. The masks' pointers stand at their sample and head.

    EDGE says that the tile reaches past the last key or, with CAUSAL, past a row's last key; other
    tiles skip both comparisons.
    """
    visible = (rows >= 0) & (cols >= 0)
    if EDGE:
        visible = visible & (cols < num_keys)
        if CAUSAL:
            visible = visible & (cols <= rows + (num_keys - num_queries))
    if HAS_KEY_MASK:
        visible = visible & (tl.load(KEY_MASK + cols, mask=cols < num_keys, other=0) != 0)
    if HAS_PAIR_MASK:
        at = tl.cast(rows, tl.int64) * pair_stride_row + tl.cast(cols, tl.int64) * pair_stride_col
        inside = (rows < num_queries) & (cols < num_keys)
        visible = visible & (tl.load(PAIR_MASK + at, mask=inside, other=0) != 0)
    return visible


@triton.jit
def load_pairs(base, rows, cols, num_queries, num_keys, stride_row, stride_col):
    """Load a tile of a pair tensor (a bias); zero outside."""
    at = tl.cast(rows, tl.int64) * stride_row + tl.cast(cols, tl.int64) * stride_col
    inside = (rows < num_queries) & (cols < num_keys)
    return tl.load(base + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Return the four words of Philox4x32-10; counters and key uint32, of one shape or scalar."""
    for _ in tl.static_range(10):
        high_0, low_0 = tl.umulhi(c0, 0xD2511F53), tl.mul(c0, 0xD2511F53, sanitize_overflow=False)
        high_1, low_1 = tl.umulhi(c2, 0xCD9E8D57), tl.mul(c2, 0xCD9E8D57, sanitize_overflow=False)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def draw_words(DRAW, sample):
    """Return the two key words and the counter word of a sample: DRAW holds [key, key, ids …]."""
    k0, k1 = tl.load(DRAW).to(tl.uint32), tl.load(DRAW + 1).to(tl.uint32)
    return k0, k1, tl.load(DRAW + 2 + sample).to(tl.uint32)


@triton.jit
def keep_tile(DRAW, sample, head, row, col, threshold, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return the keep decisions of `AttentionDropout` for a tile at (row, col): (ROWS, COLS) bool.

    One Philox call at counter (query, key // 8, head, sample) serves eight neighbouring keys: key j
    reads 16-bit lane j mod 8, lane 2w + h being half h of word w. `col` is a multiple of 8.
    A pair is kept when its lane, a signed number, is at least `threshold`.
    """
    k0, k1, sample_word = draw_words(DRAW, sample)
    zero = tl.zeros((ROWS, COLS // 8), tl.uint32)
    query = (row + tl.arange(0, ROWS)).to(tl.uint32)[:, None] + zero
    group = (col // 8 + tl.arange(0, COLS // 8)).to(tl.uint32)[None, :] + zero
    head_word = zero + tl.cast(head, tl.uint32)
    x0, x1, x2, x3 = philox4x32(query, group, head_word, sample_word + zero, k0, k1)
    # The last dimensions are (upper bit of w, lower bit of w, h), so that reshaping orders lanes.
    words = tl.join(tl.join(x0, x2), tl.join(x1, x3))
    lanes = tl.reshape(tl.join(words & 0xFFFF, words >> 16), (ROWS, COLS))
    signed = ((lanes ^ 0x8000).to(tl.int32)) - 0x8000
    return signed >= threshold
