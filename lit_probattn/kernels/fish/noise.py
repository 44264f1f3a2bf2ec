"""Score noise inside a kernel: the same draw as `lit_probattn.randomness.normal_noise`.

The integer counters are Philox4x32-10's, bit for bit. Box-Muller is evaluated in float32 with
polynomials of our own (fitted for the smallest largest error), because the hardware's approximate
logarithm loses all digits of noise that comes from words near 2³².
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from lit_probattn.kernels.tiles import draw_words, philox4x32

# float32 bits of √½: below it the logarithm splits off a power of two.
_ROOT_HALF_BITS = tl.constexpr(0x3F3504F3)
# √½ · 2³²
_ROOT_HALF_WORD = tl.constexpr(0xB504F333)
_LN2 = tl.constexpr(0.6931471805599453)
_RADIANS_PER_WORD = tl.constexpr(1.4629180792671596e-09)  # 2π / 2³²
_INV_WORD = tl.constexpr(2.3283064365386963e-10)  # 2⁻³²


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
    shift = tl.where(near_one, 0.0, exponent.to(tl.float32) * _LN2)
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
