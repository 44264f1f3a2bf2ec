"""Forward kernel of FiSH: G score tiles, noise, mixing, and the online softmaxes of a group."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from lit_probattn.kernels.fish.tiles import (
    load_maps,
    load_value,
    local_inputs,
    local_score,
    map_products,
    seen_keys,
    tile_program,
)
from lit_probattn.kernels.tiles import (
    LOG2E,
    kept_pairs,
    number,
    store_rows,
    store_vector,
    zero_tiles,
    zero_vectors,
)


@triton.jit
def fish_forward_kernel(
    call, out, LSE, form: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Compute attention of a group of local heads for BLOCK_Q queries of one sample.

    Shapes: queries (B, G, N, E), keys (B, G, L, E), values and `out` (B, H, N or L, D), LSE
    (B, H, N) in base 2.
    """
    GROUP: tl.constexpr = form.group
    pairs, num_rows, num_cols = (
        call.pairs,
        number(call.pairs.num_queries),
        number(call.pairs.num_keys),
    )
    row, b, group = tile_program(call, num_rows, BLOCK_Q)
    first = group * GROUP
    rows = (row + tl.arange(0, BLOCK_Q))[:, None]
    queries = load_maps(call.query, b, row, num_rows, form, BLOCK_Q)
    tops = ()
    for _ in tl.static_range(GROUP):
        tops = tops + (tl.full((BLOCK_Q,), float("-inf"), tl.float32),)
    sums, outs = zero_vectors(GROUP, BLOCK_Q), zero_tiles(GROUP, BLOCK_Q, form.value_pad)
    by_all, by_any = seen_keys(pairs, b, row, form, BLOCK_Q, BLOCK_K)
    # First the tiles that all rows attend to, then the edge tiles, which compare positions.
    for EDGE in tl.static_range(0 if form.parts else 1, 2):
        start, stop = by_all if EDGE and form.parts else 0, by_any if EDGE else by_all
        for col in range(start, stop, BLOCK_K):
            cols = (col + tl.arange(0, BLOCK_K))[None, :]
            tiles = map_products(call, queries, call.key, b, col, num_cols, form, BLOCK_K, EDGE)
            tiles, noise, seen, local = local_inputs(
                call, tiles, b, rows, cols, first, EDGE, False, form
            )
            new_tops, new_sums, new_outs = (), (), ()
            for h in tl.static_range(GROUP):
                head = first + h
                score = local_score(call, tiles, noise, seen, local, b, rows, cols, first, h, form)
                top = tl.maximum(tops[h], tl.max(score, 1))
                safe = tl.where(top == float("-inf"), 0.0, top) * LOG2E
                weight = tl.exp2(score * LOG2E - safe[:, None])
                shrink = tl.exp2(tops[h] * LOG2E - safe)
                new_tops = new_tops + (top,)
                new_sums = new_sums + (sums[h] * shrink + tl.sum(weight, 1),)
                if pairs.draw is not None:
                    kept = kept_pairs(pairs, b, head, row, col, BLOCK_Q, BLOCK_K, False)
                    weight = tl.where(kept, weight * pairs.keep_scale, 0.0)
                value = load_value(call, b, head, col, form, BLOCK_K, EDGE)
                total = outs[h] * shrink[:, None]
                new_outs = new_outs + (
                    tl.dot(weight.to(value.dtype), value, total, input_precision="ieee"),
                )
            tops, sums, outs = new_tops, new_sums, new_outs
    for h in tl.static_range(GROUP):
        head = first + h
        limit = tl.where(head < number(call.num_heads), num_rows, 0)
        empty = sums[h] == 0.0
        total = tl.where(empty, 1.0, sums[h])
        place = out.base + b * out.batch + head.to(tl.int64) * out.head
        store_rows(place, outs[h] / total[:, None], row, out.row, limit,
                   form.value_dim, form.value_pad, BLOCK_Q)  # fmt: skip
        # Infinite for a row without keys, so that its recomputed weights are 0.
        lse = tl.where(empty, float("inf"), tops[h] * LOG2E + tl.log2(total))
        store_vector(LSE + (b * number(call.num_heads) + head) * num_rows, lse, row, limit, BLOCK_Q)
