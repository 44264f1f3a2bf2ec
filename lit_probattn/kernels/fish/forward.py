"""Forward kernel of FiSH: G score tiles, noise, mixing, and the online softmaxes of a group."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from lit_probattn.kernels.fish.tiles import (
    add_noise,
    load_rows,
    mix,
    store_rows,
    two_layers,
    unit_noise,
    visible,
)
from lit_probattn.kernels.tiles import LOG2E, keep_tile, load_pairs


@triton.jit
def fish_forward_kernel(
    Q, K, V, OUT, LSE,
    W1, B1, W2, SCALE,
    NOISE_DRAW, DROP_DRAW, KEY_MASK, PAIRS, BIAS,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    o_batch, o_head, o_row,
    pair_batch, pair_head, pair_row, pair_col,
    bias_batch, bias_head, bias_row, bias_col,
    num_heads, num_groups, num_rows, num_cols, offset, first_row,
    on_global, threshold, keep_scale, num_batch,
    G: tl.constexpr, HG: tl.constexpr, U: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    NOISE: tl.constexpr, ALIGNED: tl.constexpr, HAS_B1: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_KEY_MASK: tl.constexpr, PAIR_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_Q queries of one sample, HG local heads.

    Shapes: Q (B, G, N, E), K (B, G, L, E), V and OUT (B, H, N or L, D), LSE (B, H, N) in base 2.
    NOISE: 0 none, 1 per global map, 2 per local head (or hidden unit, U > 0).
    PAIR_MASK: 0 none, 1 shared by the heads, 2 one per head.
    """
    num_tiles = tl.cdiv(num_rows, BLOCK_Q)
    row = (tl.program_id(0) % num_tiles) * BLOCK_Q
    place = tl.program_id(0) // num_tiles
    batch = place // num_groups
    first = (place % num_groups) * HG
    index = row + tl.arange(0, BLOCK_Q)
    rows = index[:, None]
    batch_64 = batch.to(tl.int64)
    queries = ()
    for m in tl.static_range(G):
        pointer = Q + batch_64 * q_batch + m * q_head
        queries = queries + (load_rows(pointer, index, q_row, num_rows, E, EP),)
    tops, sums, outs = (), (), ()
    for _i in tl.static_range(HG):
        tops = tops + (tl.full((BLOCK_Q,), float("-inf"), tl.float32),)
        sums = sums + (tl.zeros((BLOCK_Q,), tl.float32),)
        outs = outs + (tl.zeros((BLOCK_Q, DP), tl.float32),)
    stop = num_cols
    if CAUSAL:
        stop = tl.minimum(num_cols, tl.maximum(0, row + BLOCK_Q + offset))
    for start in range(0, stop, BLOCK_K):
        key_index = start + tl.arange(0, BLOCK_K)
        cols = key_index[None, :]
        tiles = ()
        for m in tl.static_range(G):
            pointer = K + batch_64 * k_batch + m * k_head
            key = load_rows(pointer, key_index, k_row, num_cols, E, EP)
            product = tl.dot(queries[m], tl.trans(key), input_precision="ieee")
            tiles = tiles + (product * on_global,)
        noise = unit_noise(
            NOISE_DRAW, batch, rows + first_row, cols, first, G, U, HG, NOISE, ALIGNED
        )
        if NOISE == 1:
            tiles = add_noise(tiles, noise, SCALE, G)
        seen = visible(
            rows, cols, num_rows, num_cols, offset, KEY_MASK + batch_64 * num_cols,
            PAIRS + batch_64 * pair_batch, pair_row, pair_col,
            CAUSAL, HAS_KEY_MASK, PAIR_MASK == 1,
        )  # fmt: skip
        local = ()
        if U > 0:
            local = two_layers(
                tiles, noise, W1, B1, W2, SCALE, first, num_heads, G, U, HG, NOISE, HAS_B1
            )
        new_tops, new_sums, new_outs = (), (), ()
        for h in tl.static_range(HG):
            head = first + h
            real = head < num_heads
            if U > 0:
                score = local[h]
            else:
                score = mix(tiles, W1, head, num_heads, G)
                if NOISE == 2:
                    score += tl.load(SCALE + head, mask=real, other=0.0) * noise[h]
            # A head beyond the last reads the data of the last one and stores nothing.
            source = tl.minimum(head, num_heads - 1).to(tl.int64)
            if HAS_BIAS:
                pointer = BIAS + batch_64 * bias_batch + source * bias_head
                score += load_pairs(pointer, rows, cols, num_rows, num_cols, bias_row, bias_col)
            ok = seen
            if PAIR_MASK == 2:
                pointer = PAIRS + batch_64 * pair_batch + source * pair_head
                ok = ok & (
                    load_pairs(pointer, rows, cols, num_rows, num_cols, pair_row, pair_col) != 0
                )
            score = tl.where(ok, score, float("-inf"))
            top = tl.maximum(tops[h], tl.max(score, 1))
            safe = tl.where(top == float("-inf"), 0.0, top) * LOG2E
            weight = tl.exp2(score * LOG2E - safe[:, None])
            shrink = tl.exp2(tops[h] * LOG2E - safe)
            new_tops = new_tops + (top,)
            new_sums = new_sums + (sums[h] * shrink + tl.sum(weight, 1),)
            if DROPOUT:
                kept = keep_tile(DROP_DRAW, batch, head, row, start, threshold, BLOCK_Q, BLOCK_K)
                weight = tl.where(kept, weight * keep_scale, 0.0)
            pointer = V + batch_64 * v_batch + source * v_head
            value = load_rows(pointer, key_index, v_row, num_cols, D, DP)
            out = tl.dot(
                weight.to(value.dtype), value, outs[h] * shrink[:, None], input_precision="ieee"
            )
            new_outs = new_outs + (out,)
        tops, sums, outs = new_tops, new_sums, new_outs
    for h in tl.static_range(HG):
        head = first + h
        limit = tl.where(head < num_heads, num_rows, 0)
        empty = sums[h] == 0.0
        total = tl.where(empty, 1.0, sums[h])
        place_out = OUT + batch_64 * o_batch + head.to(tl.int64) * o_head
        store_rows(place_out, index, o_row, limit, D, DP, outs[h] / total[:, None])
        # Zero for a row that sees nothing: its scores are -inf, so its weights come out as 0.
        lse = tl.where(empty, 0.0, tops[h] * LOG2E + tl.log2(total))
        place_lse = LSE + (batch_64 * num_heads + head) * num_rows
        tl.store(place_lse + index, lse, mask=index < limit)
