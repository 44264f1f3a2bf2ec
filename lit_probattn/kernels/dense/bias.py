"""Gradient of the additive bias: a pass of its own, only where a bias wants one."""

# mypy: ignore-errors
import triton
import triton.language as tl

from lit_probattn.kernels.dense.tiles import (
    across,
    added,
    component_scores,
    component_weights,
    down,
    load_scales,
    load_terms,
)
from lit_probattn.kernels.tiles import LOG2E, keep_tile, load_pairs, load_rows, visible_pairs


@triton.jit
def grad_bias_kernel(
    Q, K, V, GRAD, NORMALISER, DELTA, DBIAS,
    SCALES, ROW, COL, SPREAD, KEY_MASK, PAIR_MASK, BIAS, DRAW,
    scale, keep_scale, threshold, spread_limit,
    q_b, q_h, q_n, k_b, k_h, k_c, k_n, v_b, v_h, v_n, g_b, g_h, g_n,
    pair_b, pair_h, pair_n, pair_l, bias_b, bias_h, bias_n, bias_l,
    num_heads, num_queries, num_keys, heads_per_key, heads_per_value, num_samples,
    bias_samples, bias_heads, bias_rows, bias_cols,
    COMPONENTS: tl.constexpr, PRODUCTS: tl.constexpr, HARD: tl.constexpr, FACTORED: tl.constexpr,
    EQUAL_SCALES: tl.constexpr, CAUSAL: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_ROW: tl.constexpr, HAS_COL: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    HAS_PAIR_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    ONE_ROW: tl.constexpr, ONE_COL: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile of the bias: Σ_r g_ijr, summed over what the bias is broadcast over.

    DBIAS is contiguous, (bias_samples, bias_heads, bias_rows, bias_cols), each 1 or the full size.
    """
    row_tiles = 1 if ONE_ROW else tl.cdiv(num_queries, BLOCK_Q)
    col_tiles = 1 if ONE_COL else tl.cdiv(num_keys, BLOCK_K)
    index = tl.program_id(0)
    first_col = index % col_tiles * BLOCK_K
    first_row = index // col_tiles % row_tiles * BLOCK_Q
    owner = index // (col_tiles * row_tiles)
    last_row = num_queries if ONE_ROW else first_row + 1
    last_col = num_keys if ONE_COL else first_col + 1
    one_sample, one_head = bias_samples == 1, bias_heads == 1
    first_sample = tl.where(one_sample, 0, owner // bias_heads)
    last_sample = tl.where(one_sample, num_samples, first_sample + 1)
    first_head = tl.where(one_head, 0, owner % bias_heads)
    last_head = tl.where(one_head, num_heads, first_head + 1)

    total = tl.zeros((BLOCK_Q, BLOCK_K), tl.float32)
    for sample in range(first_sample, last_sample):
        for head in range(first_head, last_head):
            b, h = tl.cast(sample, tl.int64), tl.cast(head, tl.int64)
            key_head, value_head = h // heads_per_key, h // heads_per_value
            scales = load_scales(
                SCALES + key_head * COMPONENTS if HAS_SCALES else SCALES,
                scale, COMPONENTS, EQUAL_SCALES, HAS_SCALES,
            )  # fmt: skip
            start = (b * num_heads + h) * num_queries
            first_key = (b * (num_heads // heads_per_key) + key_head) * COMPONENTS * num_keys
            for row in range(first_row, last_row, BLOCK_Q):
                at = row + tl.arange(0, BLOCK_Q)
                rows, inside = at[:, None], at < num_queries
                query = load_rows(
                    Q + b * q_b + h * q_h, row, q_n, num_queries, KEY_DIM, KEY_PAD, BLOCK_Q, True
                )
                grad = load_rows(
                    GRAD + b * g_b + h * g_h, row, g_n, num_queries, VALUE_DIM, VALUE_PAD,
                    BLOCK_Q, True,
                )  # fmt: skip
                normaliser = tl.load(NORMALISER + start + at, mask=inside, other=float("inf"))
                delta = tl.load(DELTA + start + at, mask=inside, other=0.0)
                row_terms = ()
                if HAS_ROW:
                    row_terms = load_terms(
                        ROW + start * COMPONENTS, row, num_queries, BLOCK_Q, COMPONENTS
                    )
                for col in range(first_col, last_col, BLOCK_K):
                    cols = (col + tl.arange(0, BLOCK_K))[None, :]
                    dots = ()
                    for r in tl.static_range(PRODUCTS):
                        key = load_rows(
                            K + b * k_b + key_head * k_h + r * k_c, col, k_n, num_keys,
                            KEY_DIM, KEY_PAD, BLOCK_K, True,
                        )  # fmt: skip
                        dots = dots + (tl.dot(query, tl.trans(key), input_precision="ieee"),)
                    value = load_rows(
                        V + b * v_b + value_head * v_h, col, v_n, num_keys, VALUE_DIM, VALUE_PAD,
                        BLOCK_K, True,
                    )  # fmt: skip
                    grad_weight = tl.dot(grad, tl.trans(value), input_precision="ieee")
                    if DROPOUT:
                        keep = keep_tile(DRAW, sample, h, row, col, threshold, BLOCK_Q, BLOCK_K)
                        grad_weight = tl.where(keep, grad_weight * keep_scale, 0.0)
                    col_terms = ()
                    if HAS_COL:
                        col_terms = load_terms(COL + first_key, col, num_keys, BLOCK_K, COMPONENTS)
                    extra = LOG2E * load_pairs(
                        BIAS + b * bias_b + h * bias_h, rows, cols, num_queries, num_keys,
                        bias_n, bias_l,
                    )  # fmt: skip
                    visible = visible_pairs(
                        rows, cols, num_queries, num_keys,
                        KEY_MASK + b * num_keys if HAS_KEY_MASK else KEY_MASK,
                        PAIR_MASK + b * pair_b + h * pair_h if HAS_PAIR_MASK else PAIR_MASK,
                        pair_n, pair_l, True, CAUSAL, HAS_KEY_MASK, HAS_PAIR_MASK,
                    )  # fmt: skip
                    scores = component_scores(
                        dots, scales, down(row_terms, COMPONENTS if HAS_ROW else 0),
                        across(col_terms, COMPONENTS if HAS_COL else 0),
                        tl.where(visible, extra, float("-inf")),
                        COMPONENTS, PRODUCTS, HAS_ROW, HAS_COL, True,
                    )  # fmt: skip
                    weights = component_weights(scores, normaliser[:, None], COMPONENTS, HARD)
                    total += added(weights, COMPONENTS) * (grad_weight - delta[:, None])

    out_rows, out_cols = first_row + tl.arange(0, BLOCK_Q), first_col + tl.arange(0, BLOCK_K)
    DBIAS += tl.cast(owner, tl.int64) * bias_rows * bias_cols
    if ONE_ROW and ONE_COL:
        tl.store(DBIAS, tl.sum(tl.sum(total, 1), 0))
    elif ONE_ROW:
        tl.store(DBIAS + out_cols, tl.sum(total, 0), mask=out_cols < bias_cols)
    elif ONE_COL:
        tl.store(DBIAS + out_rows, tl.sum(total, 1), mask=out_rows < bias_rows)
    else:
        where = tl.cast(out_rows, tl.int64)[:, None] * bias_cols + out_cols[None, :]
        kept = (out_rows < bias_rows)[:, None] & (out_cols < bias_cols)[None, :]
        tl.store(DBIAS + where, total, mask=kept)
