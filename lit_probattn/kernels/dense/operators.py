"""Softmax and mixture attention as PyTorch operators.

attn_weights[i, j] ∝ Σ_r exp(s_ijr)      or      ∝ max_r exp(s_ijr)      (hard)
    s_ijr = scale_r · (query_i · key_jr) + row_bias_ir + key_bias_jr + bias_ij

Memory is O(N): the output and one number per row are saved. Backward uses no atomics, so it gives
the same bits in every run.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_probattn.kernels.operator import define_operators, new_gradients
from lit_probattn.kernels.runtime import (
    HeadRows,
    Launch,
    Pairs,
    Shape,
    choose_launch,
    head_rows,
    launch,
    make_pairs,
    padded,
    plain_float,
    unit_stride,
    unseen,
)

# log₂ of the smallest factor F of shifted keys for which the form with one exponential is used, and
# how far its weights may exceed 1, so that float16 weights stay far above its smallest number.
_SPREAD_LIMIT = {torch.float16: 16.0}
_HEADROOM = {torch.float16: 8.0}
_ROWS = 64  # queries per program without scores
_GRADIENTS = ("query", "key", "value", "scales", "row_bias", "key_bias", "bias")


class MixtureInputs(NamedTuple):
    """The arguments of the operator; scores are above, other arguments in `PairOptions`.

    Args:
        query: (B, H, N, E).
        key: (B, H_key, K, L, E), or K = 1 if components share one product.
        value: (B, H_kv, L, E_v); H_kv divides H_key, which divides H.
        scales: factors on query · key, (H_key, K); (H_key, 1) if they are the same for all
            components of a head, then without gradient if K > 1. None means `scale` for all.
        row_bias: (B, H, K, N) or None.
        key_bias: (B, H_key, K, L) or None.
        hard: maximum over components instead of the sum.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scales: Tensor | None
    row_bias: Tensor | None
    key_bias: Tensor | None
    bias: Tensor | None
    key_mask: Tensor | None
    query_mask: Tensor | None
    pair_mask: Tensor | None
    draw: Tensor | None
    scale: float
    is_causal: bool
    hard: bool
    threshold: int


class Spread(NamedTuple):
    """Bounds on -log₂ F: the smaller of the maximum over rows and the maximum over keys.

    The first launch of a pass writes them.

    Args:
        rows: bounds of parts of the queries, (B, H, parts), at least 0.
        cols: bounds of parts of the keys, (B, H_key, parts), at least 0.
    """

    rows: Tensor
    cols: Tensor
    parts: int
    end: None = None  # see `Pairs`


class DenseArguments(NamedTuple):
    """Arguments of all dense kernels of a call; the number of heads is `unseen`.

    Args:
        key_range: range of the real keys of a sample, (B, 2) int32, which the first launch of a
            pass writes and loops do not exceed; None without a key mask.
        num_scales: stride between the scales of heads, `unseen`.
    """

    query: HeadRows
    key: HeadRows
    value: HeadRows
    scales: Tensor | None
    row: Tensor | None
    col: Tensor | None
    spread: Spread | None
    scale: float
    spread_limit: float
    headroom: float
    pairs: Pairs
    key_range: Tensor | None
    num_heads: int
    num_scales: int
    heads_per_key: int
    heads_per_value: int
    end: None = None  # see `Pairs`


class Form(NamedTuple):
    """Compile-time properties of dense kernels.

    Args:
        plain: without terms and bias.
    """

    components: int
    products: int
    hard: bool
    factored: bool
    plain: bool
    equal_scales: bool
    causal: bool
    key_dim: int
    key_pad: int
    value_dim: int
    value_pad: int


def _is_factored(x: MixtureInputs) -> bool:
    """Whether components can share one exponential per pair, if F does not underflow."""
    several = x.row_bias is not None and x.row_bias.shape[2] > x.key.shape[2] == 1
    return several and x.key_bias is not None and not x.hard and _has_one_scale(x)


def _has_one_scale(x: MixtureInputs) -> bool:
    return x.scales is None or x.scales.shape[1] == 1


def make_arguments(x: MixtureInputs) -> tuple[DenseArguments, Form]:
    """Return arguments and compile-time properties of the kernels of a call."""
    query, key, value = (unit_stride(tensor) for tensor in (x.query, x.key, x.value))
    row, col = plain_float(x.row_bias), plain_float(x.key_bias)
    scales = None if x.scales is None else unit_stride(x.scales.float())
    products = key.shape[2]
    components = max([products] + [terms.shape[2] for terms in (row, col) if terms is not None])
    equal = _has_one_scale(x)
    factored = _is_factored(x)
    spread = None
    heads, num_queries, width = query.shape[1:]
    if factored:
        parts = math.ceil(num_queries / _ROWS)
        owners = (len(query), heads, parts), (len(query), key.shape[1], parts)
        first, second = (query.new_empty(shape, dtype=torch.float32) for shape in owners)
        spread = Spread(first, second, unseen(parts))
    pairs = make_pairs(num_queries, key.shape[3], x)
    call = DenseArguments(
        *(head_rows(query), head_rows(key), head_rows(value)),
        scales=scales,
        row=row,
        col=col,
        spread=spread,
        scale=float(x.scale),
        spread_limit=_SPREAD_LIMIT.get(query.dtype, 64.0),
        headroom=_HEADROOM.get(query.dtype, 0.0),
        pairs=pairs,
        key_range=None if x.key_mask is None else query.new_empty(len(query), 2, dtype=torch.int32),
        num_heads=unseen(heads),
        num_scales=unseen(0 if scales is None else scales.stride(0)),
        heads_per_key=heads // key.shape[1],
        heads_per_value=heads // value.shape[1],
    )
    plain = components == 1 and row is None and col is None and x.bias is None
    form = Form(
        *(components, products, x.hard, factored, plain, equal, x.is_causal),
        *(width, padded(width), value.shape[-1], padded(value.shape[-1])),
    )
    return call, form


def choose(form: Form, x: MixtureInputs, kernel: str) -> Launch:
    """Return the launch configuration of a kernel for scores of this form."""
    query, has_dropout = x.query, x.draw is not None
    family = "smgk" if form.products == 1 else "mgk"
    name = f"{family}_hard" if form.hard else family
    name = "softmax" if form.components == 1 else name
    width = max(form.key_pad, form.value_pad)
    name, draws = f"{name}_{kernel}", "dropout" if has_dropout else ""
    shape = Shape(name, width, form.components, query.element_size(), draws)
    return choose_launch(shape, query.device)


def _key_passes(form: Form, x: MixtureInputs) -> tuple[str, ...]:
    """Return the passes over tiles of keys: one launch for all gradients, or one each."""
    wide = max(form.key_pad, form.value_pad) > 64 and x.query.element_size() < 4
    crowded = form.components > 1
    return ("grad_key", "grad_value") if wide and crowded else ("grad_key_value",)


def new_outputs(x: MixtureInputs) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, N, E_v) in memory order (B, N, H, E_v), for merging; (B, H, N)."""
    batch, heads, rows, _ = x.query.shape
    out = x.query.new_empty(batch, rows, heads, x.value.shape[-1]).transpose(1, 2)
    return out, x.query.new_empty(x.query.shape[:3], dtype=torch.float32)


def _row_programs(x: MixtureInputs) -> int:
    return math.ceil(x.query.shape[2] / _ROWS) * math.prod(x.query.shape[:2])


def _forward(x: MixtureInputs) -> tuple[Tensor, Tensor]:
    """Return the output, and log₂ of each row's sum of weights (+inf for fully masked rows)."""
    from lit_probattn.kernels.dense.forward import forward_kernel, ranges_kernel

    call, form = make_arguments(x)
    out, normaliser = new_outputs(x)
    if call.key_range is not None or call.spread is not None:
        options = {"form": form, "BLOCK_Q": _ROWS, "num_warps": 4}
        launch(ranges_kernel, _row_programs(x), (call,), options)
    found = choose(form, x, "forward")
    programs = math.ceil(x.query.shape[2] / found.block_q) * math.prod(x.query.shape[:2])
    args = (call, head_rows(out), normaliser)
    launch(forward_kernel, programs, args, {"form": form, **found.options})
    return out, normaliser


def _backward(
    x: MixtureInputs, grad_out: Tensor, out: Tensor, normaliser: Tensor, skipped: list[str]
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key, value, scales, row_bias, key_bias and bias."""
    from lit_probattn.kernels.dense import backward as kernels

    grads = new_gradients(x, _GRADIENTS, skipped, keep_strides=True)
    query, key, value, scales, row, col, bias = grads
    if not out.numel() or not x.key.shape[3]:
        return tuple(grad.zero_() for grad in grads)
    call, form = make_arguments(x)
    per_key = None
    if x.scales is not None and "scales" not in skipped:
        if form.components > x.scales.shape[1]:
            raise NotImplementedError(
                "one scale for all components has no gradient; expected scales of shape "
                f"(H_key, K), received {tuple(x.scales.shape)}"
            )
        places = (*x.key.shape[:2], x.scales.shape[1], x.key.shape[3])
        per_key = normaliser.new_empty(places)
    batch, heads, num_queries, _ = x.query.shape
    key_heads, num_keys = x.key.shape[1], x.key.shape[3]
    grad_rows = head_rows(unit_stride(grad_out))
    delta = torch.empty_like(normaliser)
    launch(
        *(kernels.delta_kernel, _row_programs(x)),
        (call, head_rows(unit_stride(out)), grad_rows, delta),
        {"form": form, "BLOCK_Q": _ROWS, "num_warps": 4},
    )
    shared = (call, grad_rows, normaliser, delta)
    queries = choose(form, x, "grad_query")
    launch(
        *(kernels.grad_query_kernel, math.ceil(num_queries / queries.block_q) * batch * heads),
        (*shared, head_rows(query), None if x.row_bias is None else row),
        {"form": form, **queries.options},
    )
    # One part per key head; parts of key heads that share a value head are summed afterwards.
    part = value
    if x.value.shape[1] != key_heads:
        part = x.value.new_empty(batch, key_heads, *x.value.shape[2:])
    of_keys = (head_rows(key), head_rows(part), None if x.key_bias is None else col, per_key)
    for name in _key_passes(form, x):
        found = choose(form, x, name)
        constants = {"KEYS": "key" in name, "VALUES": "value" in name}
        constants["WANTS_SCALES"] = per_key is not None
        launch(
            *(kernels.grad_key_kernel, math.ceil(num_keys / found.block_k) * batch * key_heads),
            (*shared, *of_keys),
            {"form": form, **constants, **found.options},
        )
    if part is not value:
        value.copy_(part.unflatten(1, (x.value.shape[1], -1)).float().sum(2))
    if x.bias is not None and bias.numel():
        one_row = x.bias.shape[2] == 1 and num_queries > 1
        one_col = x.bias.shape[3] == 1 and num_keys > 1
        found = choose(form, x, "grad_bias")
        tiles = 1 if one_row else math.ceil(num_queries / found.block_q)
        tiles *= 1 if one_col else math.ceil(num_keys / found.block_k)
        launch(
            *(kernels.grad_bias_kernel, tiles * x.bias.shape[0] * x.bias.shape[1]),
            (*shared, bias, batch, *x.bias.shape),
            {"form": form, "ONE_ROW": one_row, "ONE_COL": one_col, **found.options},
        )
    if per_key is not None:
        torch.sum(per_key, (0, 3), out=scales)
    return grads


def _flops(x: Any, backward: bool) -> int:
    """Return FLOPs of scores and of weights · values; backward is thrice and twice these."""
    batch, heads, rows, width = x.query
    pairs = 2 * batch * heads * rows * x.key[3]
    scores, values = pairs * x.key[2] * width, pairs * x.value[-1]
    return 3 * scores + 2 * values if backward else scores + values


mixture_attention = define_operators(
    ("mixture_attention", "mixture_attention_backward"),
    MixtureInputs,
    _forward,
    _backward,
    new_outputs=new_outputs,
    gradients=_GRADIENTS,
    flops=_flops,
    optional=(("scales",), ("bias",)),
    keep_strides=True,
)
