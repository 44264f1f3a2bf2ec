"""What the FiSH kernels share: global score tiles, their noise, the mixing, masks, dropout.

Tiles come in two orientations, (queries, keys) and, where keys are the rows of an accumulator,
(keys, queries). All functions work on index tiles `rows` and `cols` that broadcast against each
other, so that both orientations read the same noise and run the same arithmetic in the same order.

The integer counters are Philox4x32-10's, bit for bit. Box-Muller is evaluated in float32 with
polynomials of our own (fitted for the smallest largest error), because the hardware's approximate
logarithm loses all digits of noise that comes from words near 2³².
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from lit_probattn.kernels.tiles import LN2, draw_words, philox4x32

# float32 bits of √½: below it the logarithm splits off a power of two.
_ROOT_HALF_BITS = tl.constexpr(0x3F3504F3)

# √½ · 2³²
_ROOT_HALF_WORD = tl.constexpr(0xB504F333)
_RADIANS_PER_WORD = tl.constexpr(1.4629180792671596e-09)  # 2π / 2³²
_INV_WORD = tl.constexpr(2.3283064365386963e-10)  # 2⁻³²


@triton.jit
def load_rows(POINTER, index, stride, num_rows, DIM: tl.constexpr, PADDED: tl.constexpr):
    """Load rows `index` of a matrix with contiguous rows, (len(index), PADDED), zeros outside."""
    cols = tl.arange(0, PADDED)
    inside = (index[:, None] < num_rows) & (cols[None, :] < DIM)
    offsets = index[:, None].to(tl.int64) * stride + cols[None, :]
    return tl.load(POINTER + offsets, mask=inside, other=0.0)


@triton.jit
def store_rows(POINTER, index, stride, num_rows, DIM: tl.constexpr, PADDED: tl.constexpr, values):
    """Store rows `index` of a matrix with contiguous rows."""
    cols = tl.arange(0, PADDED)
    inside = (index[:, None] < num_rows) & (cols[None, :] < DIM)
    offsets = index[:, None].to(tl.int64) * stride + cols[None, :]
    tl.store(POINTER + offsets, values.to(POINTER.dtype.element_ty), mask=inside)


@triton.jit
def visible(
    rows,
    cols,
    num_rows,
    num_cols,
    offset,
    KEY_MASK,
    PAIRS,
    pair_row,
    pair_col,
    CAUSAL: tl.constexpr,
    HAS_KEY_MASK: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
):
    """Return the tile of pairs that may attend; `PAIRS` is for a mask that all heads share."""
    seen = (rows < num_rows) & (cols < num_cols)
    if CAUSAL:
        seen = seen & (cols <= rows + offset)
    if HAS_KEY_MASK:
        seen = seen & (tl.load(KEY_MASK + cols, mask=cols < num_cols, other=0) != 0)
    if HAS_PAIRS:
        inside = (rows < num_rows) & (cols < num_cols)
        where = rows.to(tl.int64) * pair_row + cols.to(tl.int64) * pair_col
        seen = seen & (tl.load(PAIRS + where, mask=inside, other=0) != 0)
    return seen


@triton.jit
def add_noise(tiles, noise, SCALE, G: tl.constexpr):
    """Return g_m + s_m ε_m for every global map."""
    noisy = ()
    for m in tl.static_range(G):
        noisy = noisy + (tiles[m] + tl.load(SCALE + m) * noise[m],)
    return noisy


@triton.jit
def mix(tiles, WEIGHT, unit, num_units, G: tl.constexpr):
    """Return Σ_m weight[unit, m] g_m; zero for a unit beyond the last."""
    total = tiles[0] * tl.load(WEIGHT + unit * G, mask=unit < num_units, other=0.0)
    for m in tl.static_range(1, G):
        total += tiles[m] * tl.load(WEIGHT + unit * G + m, mask=unit < num_units, other=0.0)
    return total


@triton.jit
def hidden_unit(
    tiles,
    noise,
    W1,
    B1,
    SCALE,
    u: tl.constexpr,
    U: tl.constexpr,
    G: tl.constexpr,
    NOISE: tl.constexpr,
    HAS_B1: tl.constexpr,
):
    """Return z_u = Σ_m W_1[u, m] g_m (+ c_u ε_u) (+ b_1[u])."""
    z = mix(tiles, W1, u, U, G)
    if NOISE == 2:
        z += tl.load(SCALE + u) * noise[u]
    if HAS_B1:
        z += tl.load(B1 + u)
    return z


@triton.jit
def two_layers(
    tiles,
    noise,
    W1,
    B1,
    W2,
    SCALE,
    first,
    num_heads,
    G: tl.constexpr,
    U: tl.constexpr,
    HG: tl.constexpr,
    NOISE: tl.constexpr,
    HAS_B1: tl.constexpr,
):
    """Return a_h = Σ_u W_2[h, u] ReLU(z_u) for heads first … first + HG - 1."""
    local = ()
    for u in tl.static_range(U):
        z = hidden_unit(tiles, noise, W1, B1, SCALE, u, U, G, NOISE, HAS_B1)
        y = tl.maximum(z, 0.0)
        summed = ()
        for h in tl.static_range(HG):
            weight = tl.load(W2 + (first + h) * U + u, mask=first + h < num_heads, other=0.0)
            if u == 0:
                summed = summed + (y * weight,)
            else:
                summed = summed + (local[h] + y * weight,)
        local = summed
    return local


@triton.jit
def unit_noise(
    DRAW,
    sample,
    rows,
    cols,
    first,
    G: tl.constexpr,
    U: tl.constexpr,
    HG: tl.constexpr,
    NOISE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Return the noise tiles of a pair tile: per global map, per hidden unit, or per local head."""
    if NOISE == 1:
        return noise_tiles(DRAW, sample, rows, cols, 0, G, True)
    elif NOISE == 2:
        if U > 0:
            return noise_tiles(DRAW, sample, rows, cols, 0, U, True)
        else:
            return noise_tiles(DRAW, sample, rows, cols, first, HG, ALIGNED)
    else:
        return ()


@triton.jit
def _log1p(f):
    """Return log(1 + f) for f in [√½ - 1, √2 - 1]; error below 6e-9 |f| before rounding."""
    q = -0.07859615981578827
    q = q * f + 0.12881654500961304
    q = q * f - 0.1312875598669052
    q = q * f + 0.14181190729141235
    q = q * f - 0.16624553501605988
    q = q * f + 0.2000228613615036
    q = q * f - 0.25000810623168945
    q = q * f + 0.33333316445350647
    square = f * f
    return f - 0.5 * square + f * square * q


@triton.jit
def _radius(word):
    """Return sqrt(-2 log u), u = (word + 1) / 2³², to float32 relative precision for every word."""
    near_one = word >= _ROOT_HALF_WORD
    # Near 1 the distance 1 - u is the exact small integer; u itself would have lost it.
    from_one = (word ^ 0xFFFFFFFF).to(tl.float32) * -_INV_WORD
    u = (word + 1).to(tl.float32) * _INV_WORD
    bits = u.to(tl.int32, bitcast=True)
    exponent = (bits - _ROOT_HALF_BITS) >> 23
    mantissa = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    f = tl.where(near_one, from_one, mantissa - 1.0)
    shift = tl.where(near_one, 0.0, exponent.to(tl.float32) * LN2)
    return tl.sqrt(tl.maximum(-2.0 * (_log1p(f) + shift), 0.0))


@triton.jit
def _cos_sin(word):
    """Return cos and sin of 2π · word / 2³²; the quadrant is taken off as an integer, exactly."""
    turned = word + 0x20000000
    quadrant = turned >> 30
    rest = (turned & 0x3FFFFFFF).to(tl.int32) - 0x20000000
    x = rest.to(tl.float32) * _RADIANS_PER_WORD
    z = x * x
    s = -0.00019517297914717346
    s = s * z + 0.008332177996635437
    s = s * z - 0.16666655242443085
    s = x + x * z * s
    c = 2.4438451873720624e-05
    c = c * z - 0.001388736767694354
    c = c * z + 0.04166664555668831
    c = 1.0 - 0.5 * z + z * z * c
    odd = (quadrant & 1) != 0
    cos = tl.where(odd, s, c)
    sin = tl.where(odd, c, s)
    cos = tl.where((quadrant == 1) | (quadrant == 2), -cos, cos)
    sin = tl.where(quadrant >= 2, -sin, sin)
    return cos, sin


@triton.jit
def normal_pair(word_0, word_1):
    """Return two standard normals from two words (uint32)."""
    radius = _radius(word_0)
    cos, sin = _cos_sin(word_1)
    return radius * cos, radius * sin


@triton.jit
def philox_words(DRAW, sample, rows, cols, third):
    """Return four uint32 words of counter (rows, cols, third, sample).

    Args:
        DRAW: int64: two key words, then the counter word of every sample.
        sample: index into the batch.
        rows: int32 tile or vector.
        cols: int32, broadcastable to `rows`.
        third: scalar.
    """
    k0, k1, last = draw_words(DRAW, sample)
    zero = (rows + cols) * 0
    c0 = (rows + zero).to(tl.uint32)
    c1 = (cols + zero).to(tl.uint32)
    c2 = (zero + third).to(tl.uint32)
    c3 = zero.to(tl.uint32) + last
    return philox4x32(c0, c1, c2, c3, k0, k1)


@triton.jit
def noise_tiles(DRAW, sample, rows, cols, first, COUNT: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the noise of maps first … first + COUNT - 1 for one tile, a tuple of COUNT tiles.

    Args:
        DRAW: see `philox_words`.
        sample: index into the batch.
        rows: positions of the queries, int32, shaped to broadcast with `cols`.
        cols: positions of the keys.
        first: first map.
        COUNT: number of maps.
        ALIGNED: `first` is a multiple of 4. Otherwise COUNT is 1 or 2 and divides `first`.
    """
    tiles = ()
    if ALIGNED:
        for group in tl.static_range((COUNT + 3) // 4):
            x0, x1, x2, x3 = philox_words(DRAW, sample, rows, cols, first // 4 + group)
            n0, n1 = normal_pair(x0, x1)
            tiles = tiles + (n0,)
            if group * 4 + 1 < COUNT:
                tiles = tiles + (n1,)
            if group * 4 + 2 < COUNT:
                n2, n3 = normal_pair(x2, x3)
                tiles = tiles + (n2,)
                if group * 4 + 3 < COUNT:
                    tiles = tiles + (n3,)
    else:
        x0, x1, x2, x3 = philox_words(DRAW, sample, rows, cols, first // 4)
        low = (first & 2) == 0
        n0, n1 = normal_pair(tl.where(low, x0, x2), tl.where(low, x1, x3))
        if COUNT == 2:
            tiles = (n0, n1)
        else:
            tiles = (tl.where((first & 1) == 0, n0, n1),)
    return tiles
