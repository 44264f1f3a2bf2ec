"""Backward kernels of FiSH: queries, keys and values, and the additive bias.

Every kernel makes the global tiles, their noise and the weights of its head group again. With
E_h = P_h ∘ (dP_h - δ_h), the gradient of local score h, all gradients are sums over local heads,
so that each head group adds its own part: parts of `dq` and `dk` lie side by side and are summed
afterwards in a fixed order. Nothing is added atomically.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from lit_probattn.kernels.fish.tiles import (
    add_noise,
    hidden_unit,
    load_rows,
    mix,
    store_rows,
    two_layers,
    unit_noise,
    visible,
)
from lit_probattn.kernels.tiles import LOG2E, keep_tile, load_pairs


@triton.jit
def _score_gradient(
    score, grad_weight, lse, delta, BIAS, PAIRS, seen, rows, cols, num_rows, num_cols,
    bias_row, bias_col, pair_row, pair_col, kept, keep_scale,
    HAS_BIAS: tl.constexpr, PAIR_MASK: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Return the weights P of one head (dropped where dropped) and E = P ∘ (dP - δ)."""
    if HAS_BIAS:
        score += load_pairs(BIAS, rows, cols, num_rows, num_cols, bias_row, bias_col)
    if PAIR_MASK == 2:
        seen = seen & (load_pairs(PAIRS, rows, cols, num_rows, num_cols, pair_row, pair_col) != 0)
    score = tl.where(seen, score, float("-inf"))
    weight = tl.exp2(score * LOG2E - lse)
    dropped = weight
    if DROPOUT:
        grad_weight = tl.where(kept, grad_weight * keep_scale, 0.0)
        dropped = tl.where(kept, weight * keep_scale, 0.0)
    return dropped, weight * (grad_weight - delta)


@triton.jit
def _hidden_gradients(
    tiles, noise, grads, W1, B1, W2, SCALE, first, num_heads,
    G: tl.constexpr, U: tl.constexpr, HG: tl.constexpr, NOISE: tl.constexpr, HAS_B1: tl.constexpr,
):  # fmt: skip
    """Return dG_m = Σ_u W_1[u, m] dz_u with dz = 1[z > 0] ∘ W_2ᵀ E, from a head group's E."""
    totals = ()
    for u in tl.static_range(U):
        z = hidden_unit(tiles, noise, W1, B1, SCALE, u, U, G, NOISE, HAS_B1)
        dy = grads[0] * tl.load(W2 + first * U + u, mask=first < num_heads, other=0.0)
        for h in tl.static_range(1, HG):
            head = first + h
            dy += grads[h] * tl.load(W2 + head * U + u, mask=head < num_heads, other=0.0)
        dz = tl.where(z > 0.0, dy, 0.0)
        summed = ()
        for m in tl.static_range(G):
            term = dz * tl.load(W1 + u * G + m)
            if u == 0:
                summed = summed + (term,)
            else:
                summed = summed + (totals[m] + term,)
        totals = summed
    return totals


@triton.jit
def _hidden_sums(
    tiles, noise, grads, found, W1, B1, W2, SCALE, first, num_heads,
    G: tl.constexpr, U: tl.constexpr, HG: tl.constexpr, NOISE: tl.constexpr, HAS_B1: tl.constexpr,
):  # fmt: skip
    """Add a tile's sums over its second dimension to those found before.

    Order: W_2 (U · HG), W_1 (U · G), b_1 (U), noise of units (U).
    """
    second, one, bias, deviation = (), (), (), ()
    for u in tl.static_range(U):
        z = hidden_unit(tiles, noise, W1, B1, SCALE, u, U, G, NOISE, HAS_B1)
        y = tl.maximum(z, 0.0)
        dy = grads[0] * tl.load(W2 + first * U + u, mask=first < num_heads, other=0.0)
        second = second + (found[u * HG] + tl.sum(grads[0] * y, 1),)
        for h in tl.static_range(1, HG):
            head = first + h
            dy += grads[h] * tl.load(W2 + head * U + u, mask=head < num_heads, other=0.0)
            second = second + (found[u * HG + h] + tl.sum(grads[h] * y, 1),)
        dz = tl.where(z > 0.0, dy, 0.0)
        for m in tl.static_range(G):
            one = one + (found[U * HG + u * G + m] + tl.sum(dz * tiles[m], 1),)
        bias = bias + (found[U * HG + U * G + u] + tl.sum(dz, 1),)
        if NOISE == 2:
            deviation = deviation + (found[U * HG + U * G + U + u] + tl.sum(dz * noise[u], 1),)
    return second + one + bias + deviation


@triton.jit
def fish_query_gradient_kernel(
    Q, K, V, DO, LSE, DELTA, DQ, EXACT,
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
    """One program: BLOCK_Q queries of one sample; the part of dq of HG local heads, and their sums.

    DQ is (groups, B, G, N, E). EXACT (B, H, N) is δ again, to float32 precision: each row of E has
    the sum zero, so what it sums to is the error that δ took over from the rounding of the output.
    """
    num_tiles = tl.cdiv(num_rows, BLOCK_Q)
    tile, place = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    row = tile * BLOCK_Q
    batch, group = place // num_groups, place % num_groups
    first = group * HG
    index = row + tl.arange(0, BLOCK_Q)
    rows = index[:, None]
    batch_64 = batch.to(tl.int64)
    queries = ()
    grads_q = ()
    for m in tl.static_range(G):
        pointer = Q + batch_64 * q_batch + m * q_head
        queries = queries + (load_rows(pointer, index, q_row, num_rows, E, EP),)
        grads_q = grads_q + (tl.zeros((BLOCK_Q, EP), tl.float32),)
    residuals = ()
    for _i in tl.static_range(HG):
        residuals = residuals + (tl.zeros((BLOCK_Q,), tl.float32),)
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
        totals, local_grads = (), ()
        new_residuals = ()
        for h in tl.static_range(HG):
            head = first + h
            real = head < num_heads
            if U > 0:
                score = local[h]
            else:
                score = mix(tiles, W1, head, num_heads, G)
                if NOISE == 2:
                    score += tl.load(SCALE + head, mask=real, other=0.0) * noise[h]
            source = tl.minimum(head, num_heads - 1).to(tl.int64)
            row_offset = (batch_64 * num_heads + source) * num_rows
            inside = index < tl.where(real, num_rows, 0)
            lse = tl.load(LSE + row_offset + index, mask=inside, other=float("inf"))
            delta = tl.load(DELTA + row_offset + index, mask=inside, other=0.0)
            pointer = DO + batch_64 * o_batch + source * o_head
            grad_out = load_rows(pointer, index, o_row, num_rows, D, DP)
            pointer = V + batch_64 * v_batch + source * v_head
            value = load_rows(pointer, key_index, v_row, num_cols, D, DP)
            grad_weight = tl.dot(grad_out, tl.trans(value), input_precision="ieee")
            kept = seen
            if DROPOUT:
                kept = keep_tile(DROP_DRAW, batch, head, row, start, threshold, BLOCK_Q, BLOCK_K)
            _weight, e = _score_gradient(
                score, grad_weight, lse[:, None], delta[:, None],
                BIAS + batch_64 * bias_batch + source * bias_head,
                PAIRS + batch_64 * pair_batch + source * pair_head,
                seen, rows, cols, num_rows, num_cols, bias_row, bias_col, pair_row, pair_col,
                kept, keep_scale, HAS_BIAS, PAIR_MASK, DROPOUT,
            )  # fmt: skip
            new_residuals = new_residuals + (residuals[h] + tl.sum(e, 1),)
            if U > 0:
                local_grads = local_grads + (e,)
            else:
                summed = ()
                for m in tl.static_range(G):
                    term = e * tl.load(W1 + head * G + m, mask=real, other=0.0)
                    if h == 0:
                        summed = summed + (term,)
                    else:
                        summed = summed + (totals[m] + term,)
                totals = summed
        if U > 0:
            totals = _hidden_gradients(
                tiles, noise, local_grads, W1, B1, W2, SCALE, first, num_heads,
                G, U, HG, NOISE, HAS_B1,
            )  # fmt: skip
        residuals = new_residuals
        new_grads = ()
        for m in tl.static_range(G):
            pointer = K + batch_64 * k_batch + m * k_head
            key = load_rows(pointer, key_index, k_row, num_cols, E, EP)
            new_grads = new_grads + (
                tl.dot(totals[m].to(key.dtype), key, grads_q[m], input_precision="ieee"),
            )
        grads_q = new_grads
    part = group.to(tl.int64) * num_batch + batch
    for m in tl.static_range(G):
        place_q = DQ + (part * G + m) * num_rows * E
        store_rows(place_q, index, E, num_rows, E, EP, grads_q[m] * on_global)
    for h in tl.static_range(HG):
        head = first + h
        limit = tl.where(head < num_heads, num_rows, 0)
        at = (batch_64 * num_heads + head) * num_rows + index
        delta = tl.load(DELTA + at, mask=index < limit, other=0.0)
        tl.store(EXACT + at, delta + residuals[h], mask=index < limit)


@triton.jit
def fish_key_gradient_kernel(
    Q, K, V, DO, LSE, DELTA, DK, DV, SUMS,
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
    WANT_SUMS: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_K keys of one sample; dv of HG local heads and their part of dk.

    Tiles are (keys, queries). DK is (groups, B, G, L, E), DV (B, H, L, D). SUMS is (key tiles,
    B · groups, SLOTS): sums over the program's pairs for the mixing weights and the noise scales,
        U = 0: weight (HG, G), noise (G or HG);
        U > 0: W_2 (U, HG), W_1 (U, G), b_1 (U), noise (G or U).
    DELTA is the exact one of the query pass: the sums run over many rows, whose errors in δ add up.
    """
    num_tiles = tl.cdiv(num_cols, BLOCK_K)
    tile = tl.program_id(0) % num_tiles
    col = tile * BLOCK_K
    place = tl.program_id(0) // num_tiles
    batch, group = place // num_groups, place % num_groups
    first = group * HG
    key_index = col + tl.arange(0, BLOCK_K)
    cols = key_index[:, None]
    batch_64 = batch.to(tl.int64)
    keys, grads_k = (), ()
    for m in tl.static_range(G):
        pointer = K + batch_64 * k_batch + m * k_head
        keys = keys + (load_rows(pointer, key_index, k_row, num_cols, E, EP),)
        grads_k = grads_k + (tl.zeros((BLOCK_K, EP), tl.float32),)
    values, grads_v = (), ()
    for h in tl.static_range(HG):
        source = tl.minimum(first + h, num_heads - 1).to(tl.int64)
        pointer = V + batch_64 * v_batch + source * v_head
        values = values + (load_rows(pointer, key_index, v_row, num_cols, D, DP),)
        grads_v = grads_v + (tl.zeros((BLOCK_K, DP), tl.float32),)
    found = ()
    for _i in tl.static_range(SLOTS):
        found = found + (tl.zeros((BLOCK_K,), tl.float32),)
    begin = 0
    if CAUSAL:
        begin = tl.maximum(0, col - offset) // BLOCK_Q * BLOCK_Q
    for start in range(begin, num_rows, BLOCK_Q):
        index = start + tl.arange(0, BLOCK_Q)
        rows = index[None, :]
        tiles = ()
        for m in tl.static_range(G):
            pointer = Q + batch_64 * q_batch + m * q_head
            query = load_rows(pointer, index, q_row, num_rows, E, EP)
            product = tl.dot(keys[m], tl.trans(query), input_precision="ieee")
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
        totals, local_grads, new_values = (), (), ()
        weight_sums, noise_sums = (), ()
        for h in tl.static_range(HG):
            head = first + h
            real = head < num_heads
            if U > 0:
                score = local[h]
            else:
                score = mix(tiles, W1, head, num_heads, G)
                if NOISE == 2:
                    score += tl.load(SCALE + head, mask=real, other=0.0) * noise[h]
            source = tl.minimum(head, num_heads - 1).to(tl.int64)
            row_offset = (batch_64 * num_heads + source) * num_rows
            inside = index < tl.where(real, num_rows, 0)
            lse = tl.load(LSE + row_offset + index, mask=inside, other=float("inf"))
            delta = tl.load(DELTA + row_offset + index, mask=inside, other=0.0)
            pointer = DO + batch_64 * o_batch + source * o_head
            grad_out = load_rows(pointer, index, o_row, num_rows, D, DP)
            grad_weight = tl.dot(values[h], tl.trans(grad_out), input_precision="ieee")
            kept = seen
            if DROPOUT:
                kept = tl.trans(
                    keep_tile(DROP_DRAW, batch, head, start, col, threshold, BLOCK_Q, BLOCK_K)
                )
            dropped, e = _score_gradient(
                score, grad_weight, lse[None, :], delta[None, :],
                BIAS + batch_64 * bias_batch + source * bias_head,
                PAIRS + batch_64 * pair_batch + source * pair_head,
                seen, rows, cols, num_rows, num_cols, bias_row, bias_col, pair_row, pair_col,
                kept, keep_scale, HAS_BIAS, PAIR_MASK, DROPOUT,
            )  # fmt: skip
            new_values = new_values + (
                tl.dot(dropped.to(grad_out.dtype), grad_out, grads_v[h], input_precision="ieee"),
            )
            if U > 0:
                local_grads = local_grads + (e,)
            else:
                summed = ()
                for m in tl.static_range(G):
                    term = e * tl.load(W1 + head * G + m, mask=real, other=0.0)
                    if h == 0:
                        summed = summed + (term,)
                    else:
                        summed = summed + (totals[m] + term,)
                    if WANT_SUMS:
                        weight_sums = weight_sums + (found[h * G + m] + tl.sum(e * tiles[m], 1),)
                totals = summed
                if WANT_SUMS and NOISE == 2:
                    noise_sums = noise_sums + (found[HG * G + h] + tl.sum(e * noise[h], 1),)
        grads_v = new_values
        if U > 0:
            totals = _hidden_gradients(
                tiles, noise, local_grads, W1, B1, W2, SCALE, first, num_heads,
                G, U, HG, NOISE, HAS_B1,
            )  # fmt: skip
        if WANT_SUMS:
            if U > 0:
                weight_sums = _hidden_sums(
                    tiles, noise, local_grads, found, W1, B1, W2, SCALE, first, num_heads,
                    G, U, HG, NOISE, HAS_B1,
                )  # fmt: skip
            if NOISE == 1:
                for m in tl.static_range(G):
                    noise_sums = noise_sums + (
                        found[SLOTS - G + m] + tl.sum(totals[m] * noise[m], 1),
                    )
            found = weight_sums + noise_sums
        new_grads = ()
        for m in tl.static_range(G):
            pointer = Q + batch_64 * q_batch + m * q_head
            query = load_rows(pointer, index, q_row, num_rows, E, EP)
            new_grads = new_grads + (
                tl.dot(totals[m].to(query.dtype), query, grads_k[m], input_precision="ieee"),
            )
        grads_k = new_grads
    part = group.to(tl.int64) * num_batch + batch
    for m in tl.static_range(G):
        place_k = DK + (part * G + m) * num_cols * E
        store_rows(place_k, key_index, E, num_cols, E, EP, grads_k[m] * on_global)
    for h in tl.static_range(HG):
        limit = tl.where(first + h < num_heads, num_cols, 0)
        place_v = DV + (batch_64 * num_heads + first + h) * num_cols * D
        store_rows(place_v, key_index, D, limit, D, DP, grads_v[h])
    if WANT_SUMS:
        where = (tile.to(tl.int64) * num_batch * num_groups + place) * SLOTS
        for slot in tl.static_range(SLOTS):
            tl.store(SUMS + where + slot, tl.sum(found[slot], 0))


@triton.jit
def fish_bias_gradient_kernel(
    Q, K, V, DO, LSE, DELTA, DBIAS,
    W1, B1, W2, SCALE,
    NOISE_DRAW, DROP_DRAW, KEY_MASK, PAIRS, BIAS,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    o_batch, o_head, o_row,
    pair_batch, pair_head, pair_row, pair_col,
    bias_batch, bias_head, bias_row, bias_col,
    num_heads, num_groups, num_rows, num_cols, offset, first_row,
    on_global, threshold, keep_scale, num_batch, num_samples,
    G: tl.constexpr, HG: tl.constexpr, U: tl.constexpr,
    E: tl.constexpr, EP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    NOISE: tl.constexpr, ALIGNED: tl.constexpr, HAS_B1: tl.constexpr,
    CAUSAL: tl.constexpr, HAS_KEY_MASK: tl.constexpr, PAIR_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: one tile of pairs, HG heads; E_h, added over `num_samples` samples of one bias.

    DBIAS is (samples with a bias of their own, H, N, L).
    """
    row_tiles, col_tiles = tl.cdiv(num_rows, BLOCK_Q), tl.cdiv(num_cols, BLOCK_K)
    row = (tl.program_id(0) % row_tiles) * BLOCK_Q
    col = (tl.program_id(0) // row_tiles % col_tiles) * BLOCK_K
    group = tl.program_id(0) // (row_tiles * col_tiles) % num_groups
    place = tl.program_id(0) // (row_tiles * col_tiles) // num_groups
    first = group * HG
    index = row + tl.arange(0, BLOCK_Q)
    key_index = col + tl.arange(0, BLOCK_K)
    rows, cols = index[:, None], key_index[None, :]
    grads = ()
    for _i in tl.static_range(HG):
        grads = grads + (tl.zeros((BLOCK_Q, BLOCK_K), tl.float32),)
    for step in range(num_samples):
        batch = place * num_samples + step
        batch_64 = batch.to(tl.int64)
        tiles = ()
        for m in tl.static_range(G):
            query = load_rows(Q + batch_64 * q_batch + m * q_head, index, q_row, num_rows, E, EP)
            key = load_rows(K + batch_64 * k_batch + m * k_head, key_index, k_row, num_cols, E, EP)
            product = tl.dot(query, tl.trans(key), input_precision="ieee")
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
        summed = ()
        for h in tl.static_range(HG):
            head = first + h
            real = head < num_heads
            if U > 0:
                score = local[h]
            else:
                score = mix(tiles, W1, head, num_heads, G)
                if NOISE == 2:
                    score += tl.load(SCALE + head, mask=real, other=0.0) * noise[h]
            source = tl.minimum(head, num_heads - 1).to(tl.int64)
            row_offset = (batch_64 * num_heads + source) * num_rows
            inside = index < tl.where(real, num_rows, 0)
            lse = tl.load(LSE + row_offset + index, mask=inside, other=float("inf"))
            delta = tl.load(DELTA + row_offset + index, mask=inside, other=0.0)
            pointer = DO + batch_64 * o_batch + source * o_head
            grad_out = load_rows(pointer, index, o_row, num_rows, D, DP)
            pointer = V + batch_64 * v_batch + source * v_head
            value = load_rows(pointer, key_index, v_row, num_cols, D, DP)
            grad_weight = tl.dot(grad_out, tl.trans(value), input_precision="ieee")
            kept = seen
            if DROPOUT:
                kept = keep_tile(
                    DROP_DRAW, batch, head, row, col,
                    threshold, BLOCK_Q, BLOCK_K,
                )  # fmt: skip
            _weight, e = _score_gradient(
                score, grad_weight, lse[:, None], delta[:, None],
                BIAS + batch_64 * bias_batch + source * bias_head,
                PAIRS + batch_64 * pair_batch + source * pair_head,
                seen, rows, cols, num_rows, num_cols, bias_row, bias_col, pair_row, pair_col,
                kept, keep_scale, HAS_BIAS, PAIR_MASK, DROPOUT,
            )  # fmt: skip
            summed = summed + (grads[h] + e,)
        grads = summed
    for h in tl.static_range(HG):
        limit = tl.where(first + h < num_heads, num_rows, 0)
        inside = (rows < limit) & (cols < num_cols)
        place_b = DBIAS + (place.to(tl.int64) * num_heads + first + h) * num_rows * num_cols
        tl.store(place_b + rows.to(tl.int64) * num_cols + cols, grads[h], mask=inside)
