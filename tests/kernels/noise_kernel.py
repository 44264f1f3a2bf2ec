"""A kernel that writes the noise of FiSH down."""

# mypy: ignore-errors
import triton
import triton.language as tl

from lit_probattn.kernels.fish.tiles import noise_tiles, philox_counters
from lit_probattn.kernels.tiles import philox4x32


@triton.jit
def write_noise(
    DRAW, OUT, WORDS, first, COUNT: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    rows, cols = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    at = rows * COLS + cols
    tiles = noise_tiles(DRAW, 1, rows + 5, cols + 3, first, COUNT, ALIGNED)
    for i in tl.static_range(COUNT):
        tl.store(OUT + i * ROWS * COLS + at, tiles[i])
    c0, c1, c2, c3, k0, k1 = philox_counters(DRAW, 1, rows + 5, cols + 3, first // 4)
    x0, x1, x2, x3 = philox4x32(c0, c1, c2, c3, k0, k1)
    tl.store(WORDS + at, x0.to(tl.int64))
    tl.store(WORDS + ROWS * COLS + at, x1.to(tl.int64))
    tl.store(WORDS + 2 * ROWS * COLS + at, x2.to(tl.int64))
    tl.store(WORDS + 3 * ROWS * COLS + at, x3.to(tl.int64))
