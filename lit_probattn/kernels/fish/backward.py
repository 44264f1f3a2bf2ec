"""Backward kernels of FiSH: queries, keys and values, and the additive bias.

Every kernel recomputes the global tiles, their noise and the weights of its head group. With
E_h = P_h ∘ (dP_h - δ_h), the gradient of local score h, all gradients are sums over local heads.
Each head group computes its part: parts of `dq` and `dk` are stored separately and summed
afterwards in a fixed order, without atomics.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from lit_probattn.kernels.fish.tiles import (
    add_products,
    added_to,
    head_gradient,
    head_weights,
    hidden_unit,
    hide_keys,
    load_delta,
    load_maps,
    load_value,
    load_weight,
    local_inputs,
    local_score,
    map_products,
    real_rows,
    seeing_rows,
    seen_keys,
    tile_program,
)
from lit_probattn.kernels.tiles import (
    load_head,
    load_vector,
    needed_rows,
    number,
    store_rows,
    store_vector,
    zero_tiles,
    zero_vectors,
)


@triton.jit
def _map_gradients(call, totals, e, head, form: tl.constexpr):
    """Return dG_m plus the part of another head of a linear mixing, P[h, m] E_h."""
    MAPS: tl.constexpr = form.maps
    terms = ()
    for m in tl.static_range(MAPS):
        terms = terms + (e * load_weight(call.first, head, number(call.num_heads), m, MAPS),)
    if len(totals) > 0:
        terms = added_to(totals, terms)
    return terms


@triton.jit
def _unit_gradient(call, grads, first, u: tl.constexpr, form: tl.constexpr):
    """Return Σ_h W_2[h, u] E_h, the gradient of ReLU(z_u) from a head group."""
    dy = grads[0] * load_weight(call.second, first, number(call.num_heads), u, form.units)
    for h in tl.static_range(1, len(grads)):
        dy += grads[h] * load_weight(call.second, first + h, number(call.num_heads), u, form.units)
    return dy


@triton.jit
def _hidden_gradients(call, tiles, noise, grads, first, form: tl.constexpr):
    """Return dG_m = Σ_u W_1[u, m] dz_u with dz = 1[z > 0] ∘ W_2ᵀ E, from a head group's E."""
    UNITS: tl.constexpr = form.units
    totals = ()
    for u in tl.static_range(UNITS):
        z = hidden_unit(call, tiles, noise, u, form)
        dz = tl.where(z > 0.0, _unit_gradient(call, grads, first, u, form), 0.0)
        terms = ()
        for m in tl.static_range(len(tiles)):
            terms = terms + (dz * tl.load(call.first + u * len(tiles) + m),)
        if u == 0:
            totals = terms
        else:
            totals = added_to(totals, terms)
    return totals


@triton.jit
def _hidden_sums(call, tiles, noise, grads, found, first, form: tl.constexpr):
    """Add a tile's sums over its second dimension to previous sums.

    Order: W_2 (U · HG), W_1 (U · G), b_1 (U), noise of units (U).
    """
    UNITS: tl.constexpr = form.units
    START: tl.constexpr = form.units * (form.group + form.maps)  # first slot of b_1
    second, one, bias, deviation = (), (), (), ()
    for u in tl.static_range(UNITS):
        z = hidden_unit(call, tiles, noise, u, form)
        y = tl.maximum(z, 0.0)
        for h in tl.static_range(len(grads)):
            second = second + (found[u * len(grads) + h] + tl.sum(grads[h] * y, 1),)
        dz = tl.where(z > 0.0, _unit_gradient(call, grads, first, u, form), 0.0)
        for m in tl.static_range(len(tiles)):
            before = found[UNITS * len(grads) + u * len(tiles) + m]
            one = one + (before + tl.sum(dz * tiles[m], 1),)
        bias = bias + (found[START + u] + tl.sum(dz, 1),)
        if form.noise == 2:
            deviation = deviation + (found[START + UNITS + u] + tl.sum(dz * noise[u], 1),)
    return second + one + bias + deviation


@triton.jit
def fish_delta_kernel(
    call, out, grad_out, DELTA, form: tl.constexpr, BLOCK_Q: tl.constexpr
):  # fmt: skip
    """Write δ_i = grad_out_i · out_i in float32, (B, H, N)."""
    length, heads = number(call.pairs.num_queries), number(call.num_heads)
    num_tiles = tl.cdiv(length, BLOCK_Q)
    row, place = tl.program_id(0) % num_tiles * BLOCK_Q, tl.program_id(0) // num_tiles
    b, h = (place // heads).to(tl.int64), (place % heads).to(tl.int64)
    result = load_head(out, b, h, row, length, form.value_dim, form.value_pad, BLOCK_Q, True)
    grad = load_head(grad_out, b, h, row, length, form.value_dim, form.value_pad, BLOCK_Q, True)
    delta = tl.sum(result.to(tl.float32) * grad.to(tl.float32), 1)
    store_vector(DELTA + (b * heads + h) * length, delta, row, length, BLOCK_Q)


@triton.jit
def fish_query_gradient_kernel(
    call, grad_out, LSE, DELTA, DQ, EXACT,
    form: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the part of dq of a group of local heads, for BLOCK_Q queries of one sample.

    DQ is (groups, B, G, N, E). EXACT (B, H, N) is δ recomputed to float32 precision: each row of E
    sums to zero, so its computed sum is the error of δ that comes from the rounded output.
    """
    MAPS: tl.constexpr = form.maps
    GROUP: tl.constexpr = form.group
    num_rows, num_cols = number(call.pairs.num_queries), number(call.pairs.num_keys)
    row, b, group = tile_program(call, num_rows, BLOCK_Q)
    first = group * GROUP
    rows = (row + tl.arange(0, BLOCK_Q))[:, None]
    queries = load_maps(call.query, b, row, num_rows, form, BLOCK_Q)
    grads_q = zero_tiles(MAPS, BLOCK_Q, form.key_pad)
    residuals = zero_vectors(GROUP, BLOCK_Q)
    by_all, by_any = seen_keys(call.pairs, b, row, form, BLOCK_Q, BLOCK_K)
    for EDGE in tl.static_range(0 if form.parts else 1, 2):
        start, stop = by_all if EDGE and form.parts else 0, by_any if EDGE else by_all
        for col in range(start, stop, BLOCK_K):
            cols = (col + tl.arange(0, BLOCK_K))[None, :]
            tiles = map_products(call, queries, call.key, b, col, num_cols, form, BLOCK_K, EDGE)
            tiles, noise, seen, local = local_inputs(
                call, tiles, b, rows, cols, first, EDGE, False, form
            )
            totals, local_grads, new_residuals = (), (), ()
            for h in tl.static_range(GROUP):
                head = first + h
                score = local_score(call, tiles, noise, seen, local, b, rows, cols, first, h, form)
                value = load_value(call, b, head, col, form, BLOCK_K, EDGE)
                delta = load_delta(call, DELTA, b, head, row, BLOCK_Q)
                _weight, e, _grad = head_gradient(
                    call, grad_out, LSE, delta, score, value, b, head, row, col,
                    form, BLOCK_Q, BLOCK_K, False,
                )  # fmt: skip
                new_residuals = new_residuals + (residuals[h] + tl.sum(e, 1),)
                if form.units > 0:
                    local_grads = local_grads + (e,)
                else:
                    totals = _map_gradients(call, totals, e, head, form)
            if form.units > 0:
                totals = _hidden_gradients(call, tiles, noise, local_grads, first, form)
            residuals = new_residuals
            grads_q = add_products(grads_q, totals, call.key, b, col, num_cols, form, BLOCK_K, EDGE)
    part = group.to(tl.int64) * number(call.num_batch) + b
    for m in tl.static_range(MAPS):
        place = DQ + (part * MAPS + m) * num_rows * form.key_dim
        store_rows(place, grads_q[m] * call.on_global, row, form.key_dim, num_rows,
                   form.key_dim, form.key_pad, BLOCK_Q)  # fmt: skip
    for h in tl.static_range(GROUP):
        limit = tl.where(first + h < number(call.num_heads), num_rows, 0)
        at = (b * number(call.num_heads) + first + h) * num_rows
        delta = load_vector(DELTA + at, row, limit, 0.0, BLOCK_Q)
        store_vector(EXACT + at, delta + residuals[h], row, limit, BLOCK_Q)


@triton.jit
def fish_key_gradient_kernel(
    call, grad_out, LSE, DELTA, DK, DV, SUMS,
    form: tl.constexpr, SLOTS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute dv of a group of local heads, and their part of dk, for BLOCK_K keys of one sample.

    A launch computes gradients of KEYS, weights and noise, of VALUES, or both: the sums of all maps
    and of the values of several heads together exceed the registers.

    Tiles are (keys, queries). DK is (groups, B, G, L, E), DV (B, H, L, D). SUMS is (key tiles,
    B · groups, SLOTS): sums over the program's pairs for the mixing weights and the noise scales,
        linear:     weight (HG, G), noise (G or HG);
        two layers: W_2 (U, HG), W_1 (U, G), b_1 (U), noise (G or U);
    without SLOTS there are no sums.
    DELTA is EXACT of the query kernel: the sums run over many rows, whose errors in δ add up.
    """
    MAPS: tl.constexpr = form.maps
    GROUP: tl.constexpr = form.group
    num_rows, num_cols = number(call.pairs.num_queries), number(call.pairs.num_keys)
    col, b, group = tile_program(call, num_cols, BLOCK_K)
    first = group * GROUP
    cols = (col + tl.arange(0, BLOCK_K))[:, None]
    keys = load_maps(call.key, b, col, num_cols, form, BLOCK_K)
    values = ()
    for h in tl.static_range(GROUP if KEYS else 0):
        values = values + (load_value(call, b, first + h, col, form, BLOCK_K, True),)
    grads_k = zero_tiles(MAPS if KEYS else 0, BLOCK_K, form.key_pad)
    grads_v = zero_tiles(GROUP if VALUES else 0, BLOCK_K, form.value_pad)
    found = zero_vectors(SLOTS, BLOCK_K)
    by_any, by_all = seeing_rows(call.pairs, col, form, BLOCK_Q, BLOCK_K)
    end = num_rows
    if call.pairs.key_mask is not None:  # no row attends to a tile of padding
        some = tl.max(real_rows(call.pairs, b, col, BLOCK_K).to(tl.int32), 0)
        end = tl.where(some > 0, num_rows, 0)
        by_all = tl.minimum(by_all, end)
    by_any, by_all, end = needed_rows(call.pairs, b, by_any, by_all, end, BLOCK_Q)
    # First rows that attend to a part of this tile and compare positions, then the others.
    PARTS: tl.constexpr = form.parts or not form.causal
    for WHOLE in tl.static_range(0 if form.causal else 1, 2 if PARTS else 1):
        start, stop = by_all if WHOLE else by_any, end if WHOLE or not PARTS else by_all
        for row in range(start, stop, BLOCK_Q):
            rows = (row + tl.arange(0, BLOCK_Q))[None, :]
            tiles = map_products(call, keys, call.query, b, row, num_rows, form, BLOCK_Q, True)
            tiles, noise, seen, local = local_inputs(
                call, tiles, b, rows, cols, first, WHOLE == 0 or not form.late, form.late, form
            )
            totals, local_grads, new_values = (), (), ()
            weight_sums, noise_sums = (), ()
            for h in tl.static_range(GROUP):
                head = first + h
                score = local_score(call, tiles, noise, seen, local, b, rows, cols, first, h, form)
                if KEYS:
                    delta = load_delta(call, DELTA, b, head, row, BLOCK_Q)
                    dropped, e, grad = head_gradient(
                        call, grad_out, LSE, delta, score, values[h], b, head, row, col,
                        form, BLOCK_Q, BLOCK_K, True,
                    )  # fmt: skip
                else:
                    _weight, dropped, _kept, grad = head_weights(
                        call, grad_out, LSE, score, b, head, row, col, form, BLOCK_Q, BLOCK_K, True
                    )
                if VALUES:
                    new_values = new_values + (
                        tl.dot(dropped.to(grad.dtype), grad, grads_v[h], input_precision="ieee"),
                    )
                if not KEYS:
                    pass
                elif form.units > 0:
                    local_grads = local_grads + (e,)
                else:
                    totals = _map_gradients(call, totals, e, head, form)
                    if SLOTS > 0:
                        for m in tl.static_range(MAPS):
                            weight_sums = weight_sums + (
                                found[h * MAPS + m] + tl.sum(e * tiles[m], 1),
                            )
                        if form.noise == 2:
                            sums = found[GROUP * MAPS + h] + tl.sum(e * noise[h], 1)
                            noise_sums = noise_sums + (sums,)
            grads_v = new_values
            if KEYS and form.units > 0:
                totals = _hidden_gradients(call, tiles, noise, local_grads, first, form)
            if SLOTS > 0:
                if form.units > 0:
                    weight_sums = _hidden_sums(call, tiles, noise, local_grads, found, first, form)
                if form.noise == 1:
                    for m in tl.static_range(MAPS):
                        sums = found[SLOTS - MAPS + m] + tl.sum(totals[m] * noise[m], 1)
                        noise_sums = noise_sums + (sums,)
                found = weight_sums + noise_sums
            if KEYS:
                grads_k = add_products(
                    grads_k, totals, call.query, b, row, num_rows, form, BLOCK_Q, True
                )
    # The gradients of one key do not depend on other keys: `late` excludes masked keys here.
    real = real_rows(call.pairs, b, col, BLOCK_K)
    part = group.to(tl.int64) * number(call.num_batch) + b
    for m in tl.static_range(len(grads_k)):
        place = DK + (part * MAPS + m) * num_cols * form.key_dim
        grad = hide_keys(call.pairs, grads_k[m] * call.on_global, real, form)
        store_rows(place, grad, col, form.key_dim, num_cols,
                   form.key_dim, form.key_pad, BLOCK_K)  # fmt: skip
    for h in tl.static_range(len(grads_v)):
        limit = tl.where(first + h < number(call.num_heads), num_cols, 0)
        place = DV + (b * number(call.num_heads) + first + h) * num_cols * form.value_dim
        grad = hide_keys(call.pairs, grads_v[h], real, form)
        store_rows(place, grad, col, form.value_dim, limit,
                   form.value_dim, form.value_pad, BLOCK_K)  # fmt: skip
    tile = (col // BLOCK_K).to(tl.int64)
    place = SUMS + ((tile * number(call.num_batch) + b) * number(call.num_groups) + group) * SLOTS
    for slot in tl.static_range(SLOTS):
        sums = found[slot]
        if form.late:
            sums = tl.where(real, sums, 0.0)
        tl.store(place + slot, tl.sum(sums, 0))


@triton.jit(do_not_specialize=("num_samples",))
def fish_bias_gradient_kernel(
    call, grad_out, LSE, DELTA, DBIAS, num_samples,
    form: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute E of one head group for a tile of pairs, summed over the samples of one bias.

    DBIAS is (samples with a separate bias, H, N, L), each shared by `num_samples`.
    """
    GROUP: tl.constexpr = form.group
    num_rows, num_cols = number(call.pairs.num_queries), number(call.pairs.num_keys)
    row_tiles, col_tiles = tl.cdiv(num_rows, BLOCK_Q), tl.cdiv(num_cols, BLOCK_K)
    row = (tl.program_id(0) % row_tiles) * BLOCK_Q
    col = (tl.program_id(0) // row_tiles % col_tiles) * BLOCK_K
    group = tl.program_id(0) // (row_tiles * col_tiles) % number(call.num_groups)
    place = tl.program_id(0) // (row_tiles * col_tiles) // number(call.num_groups)
    first = group * GROUP
    rows, cols = (row + tl.arange(0, BLOCK_Q))[:, None], (col + tl.arange(0, BLOCK_K))[None, :]
    grads = zero_tiles(GROUP, BLOCK_Q, BLOCK_K)
    for step in range(num_samples):
        b = (place * num_samples + step).to(tl.int64)
        queries = load_maps(call.query, b, row, num_rows, form, BLOCK_Q)
        tiles = map_products(call, queries, call.key, b, col, num_cols, form, BLOCK_K, True)
        tiles, noise, seen, local = local_inputs(
            call, tiles, b, rows, cols, first, True, False, form
        )
        terms = ()
        for h in tl.static_range(GROUP):
            head = first + h
            score = local_score(call, tiles, noise, seen, local, b, rows, cols, first, h, form)
            value = load_value(call, b, head, col, form, BLOCK_K, True)
            delta = load_delta(call, DELTA, b, head, row, BLOCK_Q)
            _weight, e, _grad = head_gradient(
                call, grad_out, LSE, delta, score, value, b, head, row, col,
                form, BLOCK_Q, BLOCK_K, False,
            )  # fmt: skip
            terms = terms + (e,)
        grads = added_to(grads, terms)
    for h in tl.static_range(GROUP):
        limit = tl.where(first + h < number(call.num_heads), num_rows, 0)
        inside = (rows < limit) & (cols < num_cols)
        at = DBIAS + (place.to(tl.int64) * number(call.num_heads) + first + h) * num_rows * num_cols
        tl.store(at + rows.to(tl.int64) * num_cols + cols, grads[h], mask=inside)


_PART_SIZES = ("first_parts", "first_size", "second_parts", "second_size")


@triton.jit(do_not_specialize=_PART_SIZES)
def add_parts_kernel(
    FIRST, FIRST_OUT, first_parts, first_size, SECOND, SECOND_OUT, second_parts, second_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the sums of the parts of head groups for two tensors."""
    blocks = tl.cdiv(first_size, BLOCK)
    if tl.program_id(0) < blocks:
        _add_parts(FIRST, FIRST_OUT, tl.program_id(0), first_parts, first_size, BLOCK)
    else:
        block = tl.program_id(0) - blocks
        _add_parts(SECOND, SECOND_OUT, block, second_parts, second_size, BLOCK)


@triton.jit
def _add_parts(PARTS, OUT, block, num_parts, size, BLOCK: tl.constexpr):
    """Write the sum of parts, (num_parts, size), in order."""
    index = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(0, num_parts):
        at = PARTS + tl.cast(part, tl.int64) * size + index
        total += tl.load(at, mask=index < size, other=0.0)
    tl.store(OUT + index, total.to(OUT.dtype.element_ty), mask=index < size)


@triton.jit(do_not_specialize=("num_places", "num_groups", "num_heads"))
def add_sums_kernel(
    SUMS, FIRST, BIAS, SECOND, SCALE, num_places, num_groups, num_heads,
    form: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one slot of the gradients of weights and scales, summed over programs in float64.

    SUMS is (num_places, num_groups, SLOTS), see `fish_key_gradient_kernel`. Slots of heads are
    separate in the result for each group; slots of maps and hidden units are summed over groups.
    """
    MAPS: tl.constexpr = form.maps
    UNITS: tl.constexpr = form.units
    GROUP: tl.constexpr = form.group
    slot = tl.program_id(0)
    shared = tl.zeros((BLOCK,), tl.float64)
    for group in range(0, num_groups):
        total = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, num_places, BLOCK):
            place = start + tl.arange(0, BLOCK)
            at = (place.to(tl.int64) * num_groups + group) * SLOTS + slot
            total += tl.load(SUMS + at, mask=place < num_places, other=0.0).to(tl.float64)
        shared += total
        own = tl.sum(total, 0).to(tl.float32)
        if UNITS > 0:
            head = group * GROUP + slot % GROUP
            inside = (slot < UNITS * GROUP) & (head < num_heads)
            tl.store(SECOND + head * UNITS + slot // GROUP, own, mask=inside)
        else:
            head = group * GROUP + slot // MAPS
            inside = (slot < GROUP * MAPS) & (head < num_heads)
            tl.store(FIRST + head * MAPS + slot % MAPS, own, mask=inside)
            if form.noise == 2:
                rest = slot - GROUP * MAPS
                head = group * GROUP + rest
                tl.store(SCALE + head, own, mask=(rest >= 0) & (head < num_heads))
    found = tl.sum(shared, 0).to(tl.float32)
    if UNITS > 0:
        rest = slot - UNITS * GROUP
        tl.store(FIRST + rest, found, mask=(rest >= 0) & (rest < UNITS * MAPS))
        rest -= UNITS * MAPS
        if BIAS is not None:
            tl.store(BIAS + rest, found, mask=(rest >= 0) & (rest < UNITS))
        if form.noise > 0:
            tl.store(SCALE + rest - UNITS, found, mask=rest >= UNITS)
    elif form.noise == 1:
        rest = slot - GROUP * MAPS
        tl.store(SCALE + rest, found, mask=rest >= 0)
