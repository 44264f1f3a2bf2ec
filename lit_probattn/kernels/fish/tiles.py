"""What the FiSH kernels share: global score tiles, their noise, the mixing, masks, dropout.

Tiles come in two orientations, (queries, keys) and, where keys are the rows of an accumulator,
(keys, queries). All functions work on index tiles `rows` and `cols` that broadcast against each
other, so that both orientations read the same noise and run the same arithmetic in the same order.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from lit_probattn.kernels.fish.noise import noise_tiles


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
