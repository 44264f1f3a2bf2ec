"""Parts of kernels that all families share: tile loads, masked pairs, Philox, dropout bits.

Rows are queries, columns are keys. Helpers whose `rows` and `cols` are two-dimensional index tiles,
one (BLOCK, 1) and one (1, BLOCK), support both orientations of a score tile. `runtime.py` defines
tensor arguments of kernels as pointers with strides.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

# Scores are in units of log 2, because exp2 is one instruction.
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def number(count):
    """Return a count that was passed as `runtime.unseen`, or a length as `half_seen`."""
    return count >> 1


@triton.jit
def load_rows(
    base, start, stride, limit, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    CHECK: tl.constexpr,
):  # fmt: skip
    """Load rows start … start + BLOCK - 1 of a matrix with unit column stride: (BLOCK, PADDED).

    Columns from WIDTH are zero, and with CHECK also rows from `limit`.
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
def load_head(
    x, b, h, start, limit, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    CHECK: tl.constexpr,
):  # fmt: skip
    """Load rows of head h of sample b of a `HeadRows`, see `load_rows`."""
    base = x.base + b * x.batch + h * x.head
    return load_rows(base, start, x.row, limit, WIDTH, PADDED, BLOCK, CHECK)


@triton.jit
def store_rows(
    base, tile, start, stride, limit, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the rows below `limit` and the columns below WIDTH of a (BLOCK, PADDED) tile."""
    rows, cols = tl.arange(0, BLOCK), tl.arange(0, PADDED)
    pointers = base + tl.cast(start, tl.int64) * stride + rows[:, None] * stride + cols[None, :]
    inside = (start + rows < limit)[:, None] & (cols < WIDTH)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_vector(base, start, limit, other, BLOCK: tl.constexpr):
    """Load numbers start … start + BLOCK - 1; `other` from index `limit`."""
    index = start + tl.arange(0, BLOCK)
    return tl.load(base + index, mask=index < limit, other=other)


@triton.jit
def store_vector(base, values, start, limit, BLOCK: tl.constexpr):
    """Store the numbers below `limit`."""
    index = start + tl.arange(0, BLOCK)
    tl.store(base + index, values, mask=index < limit)


@triton.jit
def zero_tile(ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return a zero tile of float32."""
    return tl.zeros((ROWS, COLS), tl.float32)


@triton.jit
def zero_vector(SIZE: tl.constexpr):
    """Return a zero vector of float32."""
    return tl.zeros((SIZE,), tl.float32)


@triton.jit
def zero_tiles(COUNT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return COUNT zero tiles of float32."""
    out = ()
    for _ in tl.static_range(COUNT):
        out = out + (zero_tile(ROWS, COLS),)
    return out


@triton.jit
def zero_vectors(COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Return COUNT zero vectors of float32."""
    out = ()
    for _ in tl.static_range(COUNT):
        out = out + (zero_vector(SIZE),)
    return out


@triton.jit
def load_pairs(x, b, h, rows, cols, pairs):
    """Load a tile of a `PairTensor`; zero outside its bounds."""
    at = tl.cast(rows, tl.int64) * x.row + tl.cast(cols, tl.int64) * x.col
    inside = (rows < number(pairs.num_queries)) & (cols < number(pairs.num_keys))
    return tl.load(x.base + b * x.batch + h * x.head + at, mask=inside, other=0)


@triton.jit
def visible_pairs(
    pairs, b, h, rows, cols, EDGE: tl.constexpr, CAUSAL: tl.constexpr, LOOK: tl.constexpr,
):  # fmt: skip
    """Return the allowed pairs of a tile; the pair mask is read only with LOOK.

    EDGE: the tile extends beyond the last key or, with CAUSAL, beyond a row's last key; other tiles
    skip both comparisons.
    """
    visible = (rows >= 0) & (cols >= 0)
    if EDGE:
        visible = visible & (cols < number(pairs.num_keys))
        if CAUSAL:
            visible = visible & (
                cols <= rows + (number(pairs.num_keys) - number(pairs.num_queries))
            )
    if pairs.key_mask is not None:
        at = pairs.key_mask + b * number(pairs.num_keys) + cols
        visible = visible & (tl.load(at, mask=cols < number(pairs.num_keys), other=0) != 0)
    if LOOK:
        visible = visible & (load_pairs(pairs.mask, b, h, rows, cols, pairs) != 0)
    return visible


@triton.jit
def marked_range(mask, b, length):
    """Return the first marked position of a sample and one past its last; zeros if none is.

    Args:
        mask: (B, length) uint8.
    """
    first, last = length, 0
    for start in range(0, length, 1024):
        index = start + tl.arange(0, 1024)
        marked = load_vector(mask + b * length, start, length, 0, 1024) != 0
        first = tl.minimum(first, tl.min(tl.where(marked, index, length), 0))
        last = tl.maximum(last, tl.max(tl.where(marked, index + 1, 0), 0))
    return tl.minimum(first, last), last


@triton.jit
def is_needed(pairs, b, row, BLOCK: tl.constexpr):
    """Whether a call with `query_mask` needs the output of some query of a tile."""
    length = number(pairs.num_queries)
    tile = load_vector(pairs.query_mask + b * length, row, length, 0, BLOCK)
    return tl.max(tile.to(tl.int32), 0) != 0


@triton.jit
def needed_rows(pairs, b, by_any, by_all, end, BLOCK: tl.constexpr):
    """Restrict a loop over tiles of queries by_any … by_all … end to those that are needed."""
    if pairs.query_mask is not None:
        first, last = marked_range(pairs.query_mask, b, number(pairs.num_queries))
        end = tl.minimum(end, last)
        by_any = tl.maximum(by_any, first // BLOCK * BLOCK)
        by_all = tl.minimum(tl.maximum(by_all, by_any), end)
    return by_any, by_all, end


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Return the four words of Philox4x32-10; counters and key are uint32, one shape or scalar."""
    for _ in tl.static_range(10):
        high_0, low_0 = tl.umulhi(c0, 0xD2511F53), tl.mul(c0, 0xD2511F53, sanitize_overflow=False)
        high_1, low_1 = tl.umulhi(c2, 0xCD9E8D57), tl.mul(c2, 0xCD9E8D57, sanitize_overflow=False)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def draw_words(DRAW, sample):
    """Return the two key words and the counter word of a sample from [key, key, ids …]."""
    k0, k1 = tl.load(DRAW).to(tl.uint32), tl.load(DRAW + 1).to(tl.uint32)
    return k0, k1, tl.load(DRAW + 2 + sample).to(tl.uint32)


@triton.jit
def kept_pairs(pairs, b, h, row, col, ROWS: tl.constexpr, COLS: tl.constexpr, FLIP: tl.constexpr):
    """Return the keep decisions of `AttentionDropout` for a tile at (row, col): bool.

    Eight neighbouring keys share one Philox call at counter (query, key // 8, head, sample): key j
    reads 16-bit lane j mod 8; lane 2w + h is half h of word w. `col` is a multiple of 8. A pair is
    kept if its lane, as a signed number, is at least the threshold. (ROWS, COLS), or (COLS, ROWS)
    with FLIP; without dropout a single true element.
    """
    if pairs.draw is None:
        keep = tl.full((1, 1), 1, tl.int1)
    else:
        k0, k1, sample_word = draw_words(pairs.draw, b)
        zero = tl.zeros((ROWS, COLS // 8), tl.uint32)
        query = (row + tl.arange(0, ROWS)).to(tl.uint32)[:, None] + zero
        group = (col // 8 + tl.arange(0, COLS // 8)).to(tl.uint32)[None, :] + zero
        head_word = zero + tl.cast(h, tl.uint32)
        x0, x1, x2, x3 = philox4x32(query, group, head_word, sample_word + zero, k0, k1)
        # The last dimensions are (high bit of w, low bit of w, h): reshaping orders the lanes.
        words = tl.join(tl.join(x0, x2), tl.join(x1, x3))
        lanes = tl.reshape(tl.join(words & 0xFFFF, words >> 16), (ROWS, COLS))
        keep = ((lanes ^ 0x8000).to(tl.int32)) - 0x8000 >= number(pairs.threshold)
        if FLIP:
            keep = tl.trans(keep)
    return keep
