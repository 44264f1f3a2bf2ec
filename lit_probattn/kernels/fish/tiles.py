"""Functions that FiSH kernels share: global score tiles, their noise, the mixing, masks, dropout.

Tiles have two orientations: (queries, keys) and, if keys are the rows of an accumulator,
(keys, queries). All functions use index tiles `rows` and `cols` that broadcast against each other,
so that both orientations use the same noise and the same arithmetic in the same order. `call` is a
`FishArguments` and `form` a `FishForm` of plan.py.

The integer counters equal Philox4x32-10 bit for bit. Box-Muller is evaluated in float32 with
minimax polynomials fitted for this package, because the hardware's approximate logarithm loses all
digits of noise from words near 2³².
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from lit_probattn.kernels.runtime import interpreted
from lit_probattn.kernels.tiles import (
    LN2,
    LOG2E,
    draw_words,
    is_needed,
    kept_pairs,
    load_head,
    load_pairs,
    load_vector,
    number,
    philox4x32,
    visible_pairs,
)

# float32 bits of √½: below it the logarithm splits off a power of two.
_ROOT_HALF_BITS = tl.constexpr(0x3F3504F3)

# √½ · 2³²
_ROOT_HALF_WORD = tl.constexpr(0xB504F333)
_RADIANS_PER_WORD = tl.constexpr(1.4629180792671596e-09)  # 2π / 2³²
_INV_WORD = tl.constexpr(2.3283064365386963e-10)  # 2⁻³²
INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def tile_program(call, length, BLOCK: tl.constexpr):
    """Return first row, sample and head group of a program with one tile of rows."""
    num_tiles = tl.cdiv(length, BLOCK)
    place = tl.program_id(0) // num_tiles
    start = tl.program_id(0) % num_tiles * BLOCK
    return start, (place // number(call.num_groups)).to(tl.int64), place % number(call.num_groups)


@triton.jit
def _real_keys(pairs, b):
    """Return the number of keys of a sample before its first padding, and up to its last real key.

    Every program reads the sample's mask, which is small compared with the keys.
    """
    num_keys = number(pairs.num_keys)
    whole, last = num_keys, num_keys
    if pairs.key_mask is not None:
        last = 0
        for start in range(0, num_keys, 1024):
            index = start + tl.arange(0, 1024)
            real = load_vector(pairs.key_mask + b * num_keys, start, num_keys, 0, 1024) != 0
            whole = tl.minimum(whole, tl.min(tl.where(real, num_keys, index), 0))
            last = tl.maximum(last, tl.max(tl.where(real, index + 1, 0), 0))
    return whole, last


@triton.jit
def seen_keys(pairs, b, row, form: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the end of the tiles without edges for a tile of rows, and the end of its keys.

    A tile without edges has no causal edge, no end of the keys and no padding. A tile of rows that
    are not needed attends to no keys.
    """
    whole, last = _real_keys(pairs, b)
    if form.causal:
        offset = number(pairs.num_keys) - number(pairs.num_queries)
        whole = tl.minimum(whole, tl.maximum(row + 1 + offset, 0))
        last = tl.minimum(last, tl.maximum(row + BLOCK_Q + offset, 0))
    if pairs.query_mask is not None:
        needed = is_needed(pairs, b, row, BLOCK_Q)
        whole, last = tl.where(needed, whole, 0), tl.where(needed, last, 0)
    return whole // BLOCK_K * BLOCK_K, last


@triton.jit
def seeing_rows(pairs, col, form: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the first tiles of rows that attend to some key of a tile, and to all of it.

    Only by the causal mask: `real_rows` handles padding and the end of the keys.
    """
    by_any, by_all = 0, 0
    if form.causal:
        num_rows = number(pairs.num_queries)
        offset = number(pairs.num_keys) - num_rows
        by_any = tl.maximum(col - offset, 0) // BLOCK_Q * BLOCK_Q
        by_all = tl.cdiv(tl.maximum(col + BLOCK_K - 1 - offset, 0), BLOCK_Q) * BLOCK_Q
        by_all = tl.minimum(by_all, num_rows)
    return by_any, by_all


@triton.jit
def real_rows(pairs, b, col, BLOCK_K: tl.constexpr):
    """Return the real keys of a tile, whose gradients are not zero."""
    num_keys = number(pairs.num_keys)
    real = col + tl.arange(0, BLOCK_K) < num_keys
    if pairs.key_mask is not None:
        real = load_vector(pairs.key_mask + b * num_keys, col, num_keys, 0, BLOCK_K) != 0
    return real


@triton.jit
def hide_keys(pairs, tile, real, form: tl.constexpr):
    """Return sums of keys with zeros for masked keys, whose sums may be infinite."""
    if form.late and pairs.key_mask is not None:
        tile = tl.where(real[:, None], tile, 0.0)
    return tile


@triton.jit
def stored_head(call, head):
    """Return the head to read: heads beyond the last read the last head and store nothing."""
    return tl.minimum(head, number(call.num_heads) - 1).to(tl.int64)


@triton.jit
def _load_head(
    x, b, h, start, limit, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    CHECK: tl.constexpr, HOIST: tl.constexpr,
):  # fmt: skip
    """Load rows of a head; without HOIST the offsets are recomputed for every tile.

    Offsets that are kept over a loop need registers, which forward does not have.
    """
    if HOIST:
        tile = load_head(x, b, h, start, limit, WIDTH, PADDED, BLOCK, CHECK)
    else:
        index, cols = start + tl.arange(0, BLOCK), tl.arange(0, PADDED)
        offsets = index[:, None].to(tl.int64) * x.row + cols[None, :]
        place = x.base + b * x.batch + h * x.head + offsets
        if CHECK or WIDTH < PADDED:
            inside = (index[:, None] < limit) & (cols[None, :] < WIDTH)
            tile = tl.load(place, mask=inside, other=0.0)
        else:
            tile = tl.load(place)
    return tile


@triton.jit
def load_map(x, b, m, start, limit, form: tl.constexpr, BLOCK: tl.constexpr, CHECK: tl.constexpr):
    """Load a tile of queries or keys of global map m; CHECK: zero from index `limit`."""
    return _load_head(x, b, m, start, limit, form.key_dim, form.key_pad, BLOCK, CHECK, form.hoist)


@triton.jit
def load_value(call, b, head, col, form: tl.constexpr, BLOCK: tl.constexpr, CHECK: tl.constexpr):
    """Load a tile of values of a local head."""
    source, limit = stored_head(call, head), number(call.pairs.num_keys)
    return _load_head(
        call.value, b, source, col, limit, form.value_dim, form.value_pad, BLOCK, CHECK, form.hoist
    )


@triton.jit
def load_maps(x, b, start, limit, form: tl.constexpr, BLOCK: tl.constexpr):
    """Load a tile of queries or keys of every global map."""
    MAPS: tl.constexpr = form.maps
    out = ()
    for m in tl.static_range(MAPS):
        out = out + (load_map(x, b, m, start, limit, form, BLOCK, True),)
    return out


@triton.jit
def map_products(
    call, left, x, b, start, limit, form: tl.constexpr, BLOCK: tl.constexpr,
    CHECK: tl.constexpr,
):  # fmt: skip
    """Return the global scores of tiles `left` with rows of x: g_m = on_global · q_m · k_m."""
    out = ()
    for m in tl.static_range(len(left)):
        right = load_map(x, b, m, start, limit, form, BLOCK, CHECK)
        product = tl.dot(left[m], tl.trans(right), input_precision="ieee")
        out = out + (product * call.on_global,)
    return out


@triton.jit
def add_products(
    sums, tiles, x, b, start, limit, form: tl.constexpr, BLOCK: tl.constexpr,
    CHECK: tl.constexpr,
):  # fmt: skip
    """Return sums_m + tiles_m @ rows of x_m."""
    out = ()
    for m in tl.static_range(len(sums)):
        right = load_map(x, b, m, start, limit, form, BLOCK, CHECK)
        tile = tiles[m].to(right.dtype)
        out = out + (tl.dot(tile, right, sums[m], input_precision="ieee"),)
    return out


@triton.jit
def added_to(totals, terms):
    """Return totals + terms, tile by tile."""
    out = ()
    for i in tl.static_range(len(terms)):
        out = out + (totals[i] + terms[i],)
    return out


@triton.jit
def load_weight(W, row, num_rows, col, num_cols):
    """Load one weight; zero for rows beyond the last."""
    return tl.load(W + row * num_cols + col, mask=row < num_rows, other=0.0)


@triton.jit
def mix(tiles, WEIGHT, unit, num_units):
    """Return Σ_m weight[unit, m] g_m; zero for units beyond the last."""
    total = tiles[0] * load_weight(WEIGHT, unit, num_units, 0, len(tiles))
    for m in tl.static_range(1, len(tiles)):
        total += tiles[m] * load_weight(WEIGHT, unit, num_units, m, len(tiles))
    return total


@triton.jit
def hidden_unit(call, tiles, noise, u: tl.constexpr, form: tl.constexpr):
    """Return z_u = Σ_m W_1[u, m] g_m (+ c_u ε_u) (+ b_1[u])."""
    z = mix(tiles, call.first, u, form.units)
    if form.noise == 2:
        z += tl.load(call.scale + u) * noise[u]
    if call.bias_1 is not None:
        z += tl.load(call.bias_1 + u)
    return z


@triton.jit
def unit_noise(call, b, rows, cols, first, form: tl.constexpr):
    """Return the noise tiles of a pair tile: per global map, hidden unit or local head."""
    positions = rows + number(call.first_row)
    if form.noise == 1:
        return noise_tiles(call.noise_draw, b, positions, cols, 0, form.maps, True)
    elif form.noise == 2:
        if form.units > 0:
            return noise_tiles(call.noise_draw, b, positions, cols, 0, form.units, True)
        else:
            return noise_tiles(call.noise_draw, b, positions, cols, first, form.group, form.aligned)
    else:
        return ()


@triton.jit
def seen_pairs(call, b, rows, cols, EDGE: tl.constexpr, LATE: tl.constexpr, form: tl.constexpr):
    """Return the allowed pairs of a tile for all heads, in a tuple; empty if all are allowed.

    EDGE: the tile may contain masked positions. LATE: keys masked for all rows are excluded later.
    """
    pairs, seen = call.pairs, ()
    SHARED: tl.constexpr = pairs.mask.base is not None and not form.mask_per_head
    if EDGE and not LATE:
        seen = (visible_pairs(pairs, b, 0, rows, cols, True, form.causal, SHARED),)
    else:
        if SHARED:
            seen = (load_pairs(pairs.mask, b, 0, rows, cols, pairs) != 0,)
        if EDGE and form.causal:
            before = cols <= rows + (number(pairs.num_keys) - number(pairs.num_queries))
            seen = (before & seen[0] if len(seen) > 0 else before,)
    return seen


@triton.jit
def local_inputs(
    call, tiles, b, rows, cols, first, EDGE: tl.constexpr, LATE: tl.constexpr,
    form: tl.constexpr,
):  # fmt: skip
    """Return the inputs of the local scores of a head group.

    These are the global tiles with their noise, the noise, the allowed pairs of all heads
    (`seen_pairs`), and with two layers the local scores, a_h = Σ_u W_2[h, u] ReLU(z_u).
    """
    UNITS: tl.constexpr = form.units
    GROUP: tl.constexpr = form.group
    noise = unit_noise(call, b, rows, cols, first, form)
    if form.noise == 1:
        noisy = ()
        for m in tl.static_range(len(tiles)):
            noisy = noisy + (tiles[m] + tl.load(call.scale + m) * noise[m],)
        tiles = noisy
    seen = seen_pairs(call, b, rows, cols, EDGE, LATE, form)
    local = ()
    for u in tl.static_range(UNITS):
        y = tl.maximum(hidden_unit(call, tiles, noise, u, form), 0.0)
        terms = ()
        for h in tl.static_range(GROUP):
            terms = terms + (
                y * load_weight(call.second, first + h, number(call.num_heads), u, UNITS),
            )
        if u == 0:
            local = terms
        else:
            local = added_to(local, terms)
    return tiles, noise, seen, local


@triton.jit
def local_score(
    call, tiles, noise, seen, local, b, rows, cols, first, h: tl.constexpr, form: tl.constexpr
):
    """Return the scores of head first + h with its bias; -inf for masked pairs."""
    head, pairs = first + h, call.pairs
    if form.units > 0:
        score = local[h]
    else:
        score = mix(tiles, call.first, head, number(call.num_heads))
        if form.noise == 2:
            inside = head < number(call.num_heads)
            score += tl.load(call.scale + head, mask=inside, other=0.0) * noise[h]
    source = stored_head(call, head)
    if pairs.bias.base is not None:
        score += load_pairs(pairs.bias, b, source, rows, cols, pairs).to(tl.float32)
    if form.mask_per_head:
        allowed = load_pairs(pairs.mask, b, source, rows, cols, pairs) != 0
        score = tl.where(allowed, score, float("-inf"))
    if len(seen) > 0:
        score = tl.where(seen[0], score, float("-inf"))
    return score


@triton.jit
def head_weights(
    call, grad_out, LSE, score, b, head, row, col,
    form: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """Return the weights P of a head, the weights after dropout, and its tile of grad_out.

    With FLIP, tiles are (keys, queries).
    """
    pairs, source = call.pairs, stored_head(call, head)
    num_rows = number(pairs.num_queries)
    at = (b * number(call.num_heads) + source) * num_rows
    limit = tl.where(head < number(call.num_heads), num_rows, 0)
    lse = load_vector(LSE + at, row, limit, float("inf"), BLOCK_Q)
    grad = load_head(
        grad_out, b, source, row, num_rows, form.value_dim, form.value_pad, BLOCK_Q, True
    )
    weight = tl.exp2(score * LOG2E - (lse[None, :] if FLIP else lse[:, None]))
    kept = kept_pairs(pairs, b, head, row, col, BLOCK_Q, BLOCK_K, FLIP)
    dropped = weight
    if pairs.draw is not None:
        dropped = tl.where(kept, weight * pairs.keep_scale, 0.0)
    return weight, dropped, kept, grad


@triton.jit
def load_delta(call, DELTA, b, head, row, BLOCK_Q: tl.constexpr):
    """Load δ of a head, stored by the query kernel; zero for a head beyond the last."""
    num_rows = number(call.pairs.num_queries)
    at = (b * number(call.num_heads) + stored_head(call, head)) * num_rows
    limit = tl.where(head < number(call.num_heads), num_rows, 0)
    return load_vector(DELTA + at, row, limit, 0.0, BLOCK_Q)


@triton.jit
def head_gradient(
    call, grad_out, LSE, delta, score, value, b, head, row, col,
    form: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """Return the dropped weights of a head, E = P ∘ (dP - δ), and its tile of grad_out."""
    weight, dropped, kept, grad = head_weights(
        call, grad_out, LSE, score, b, head, row, col, form, BLOCK_Q, BLOCK_K, FLIP
    )
    pairs = call.pairs
    if FLIP:
        delta = delta[None, :]
        grad_weight = tl.dot(value, tl.trans(grad), input_precision="ieee")
    else:
        delta = delta[:, None]
        grad_weight = tl.dot(grad, tl.trans(value), input_precision="ieee")
    if pairs.draw is not None:
        grad_weight = tl.where(kept, grad_weight * pairs.keep_scale, 0.0)
    return dropped, weight * (grad_weight - delta), grad


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
    """Return sqrt(-2 log u), u = (word + 1) / 2³², to float32 relative precision for all words."""
    near_one = word >= _ROOT_HALF_WORD
    # Near 1, the distance 1 - u is an exact small integer, which u itself would lose.
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
    """Return cos and sin of 2π · word / 2³²; the quadrant is split off exactly as an integer."""
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
def philox_counters(DRAW, sample, rows, cols, third):
    """Return counter (rows, cols, third, sample) as four tiles, and two key words; uint32.

    `rows` and `cols` are int32 tiles, `third` a scalar.
    """
    k0, k1, last = draw_words(DRAW, sample)
    zero = (rows + cols) * 0
    c0 = (rows + zero).to(tl.uint32)
    c1 = (cols + zero).to(tl.uint32)
    c2 = (zero + third).to(tl.uint32)
    c3 = zero.to(tl.uint32) + last
    return c0, c1, c2, c3, k0, k1


@triton.jit
def _four_normals(c0, c1, c2, c3, k0, k1):
    """Return the four standard normals of a counter."""
    x0, x1, x2, x3 = philox4x32(c0, c1, c2, c3, k0, k1)
    n0, n1 = normal_pair(x0, x1)
    n2, n3 = normal_pair(x2, x3)
    return n0, n1, n2, n3


@triton.jit
def _two_normals(c0, c1, c2, c3, k0, k1, first):
    """Return the first two normals of a counter, or the last two if `first` has the bit 2."""
    x0, x1, x2, x3 = philox4x32(c0, c1, c2, c3, k0, k1)
    low = (first & 2) == 0
    return normal_pair(tl.where(low, x0, x2), tl.where(low, x1, x3))


@triton.jit
def _normals(DRAW, sample, rows, cols, first, ALIGNED: tl.constexpr):
    """Return the normals of one counter per pair, four starting at map `first`, or two.

    Compiled code completes one pair before the next: tile operations in sequence would keep the
    words of all pairs of a thread in registers. The interpreter has only tile operations.
    """
    c0, c1, c2, c3, k0, k1 = philox_counters(DRAW, sample, rows, cols, first // 4)
    if ALIGNED:
        if INTERPRETED:
            return _four_normals(c0, c1, c2, c3, k0, k1)
        else:
            return tl.map_elementwise(_four_normals, c0, c1, c2, c3, k0, k1)
    else:
        if INTERPRETED:
            return _two_normals(c0, c1, c2, c3, k0, k1, first)
        else:
            return tl.map_elementwise(_two_normals, c0, c1, c2, c3, k0, k1, first)


@triton.jit
def noise_tiles(DRAW, sample, rows, cols, first, COUNT: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the noise of maps first … first + COUNT - 1 for one tile, a tuple of COUNT tiles.

    ALIGNED: `first` is a multiple of 4. Otherwise COUNT is 1 or 2 and divides `first`.
    """
    tiles = ()
    if ALIGNED:
        for start in tl.static_range(0, COUNT, 4):
            found = _normals(DRAW, sample, rows, cols, first + start, True)
            for i in tl.static_range(4 if COUNT - start > 4 else COUNT - start):
                tiles = tiles + (found[i],)
    else:
        found = _normals(DRAW, sample, rows, cols, first, False)
        if COUNT == 2:
            tiles = (found[0], found[1])
        else:
            tiles = (tl.where((first & 1) == 0, found[0], found[1]),)
    return tiles
