"""Softmax and mixture attention as PyTorch operators: launches, fakes, autograd, FLOP formulas.

attn_weights[i, j] ∝ Σ_r exp(s_ijr)      or      ∝ max_r exp(s_ijr)      (hard)
    s_ijr = scale_r · (query_i · key_jr) + row_bias_ir + key_bias_jr + bias_ij

O(N) memory: saved are the output and one number per row. Backward uses no atomics, so it gives the
same bits every time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lit_probattn.kernels.runtime import Shape, choose_launch, launch, like, padded, unit_stride

# log₂ of the smallest factor F of shifted keys that the one-exponential form is used for, and how
# far weights may exceed 1 there, so that float16 weights stay far from its smallest number.
_SPREAD_LIMIT = {torch.float16: 16.0}

_HEADROOM = {torch.float16: 8.0}

_LOG2E = 1.4426950408889634
_NUM_TENSORS = 10  # query … draw


def _num_components(key: Tensor, row_bias: Tensor | None, key_bias: Tensor | None) -> int:
    sizes = [key.shape[2]] + [x.shape[2] for x in (row_bias, key_bias) if x is not None]
    return max(sizes)


def _spread(row_bias: Tensor, key_bias: Tensor) -> Tensor:
    """Return a bound on -log₂ F for every sample and head, (B, H)."""
    rows = (row_bias.amax(2) - row_bias.amin(2)).amax(-1)
    cols = (key_bias.amax(2) - key_bias.amin(2)).amax(-1)
    cols = cols.repeat_interleave(rows.shape[1] // cols.shape[1], 1)
    return torch.minimum(rows, cols) * _LOG2E


def _strides(tensor: Tensor | None, *dims: int) -> tuple[int, ...]:
    """Return strides, 0 where the tensor is broadcast or absent."""
    if tensor is None:
        return (0,) * len(dims)
    return tuple(0 if tensor.shape[d] == 1 else tensor.stride(d) for d in dims)


class DenseCall:
    """Arguments that the forward and backward kernels share."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scales: Tensor | None,
        row_bias: Tensor | None,
        key_bias: Tensor | None,
        bias: Tensor | None,
        key_mask: Tensor | None,
        pair_mask: Tensor | None,
        draw: Tensor | None,
        scale: float,
        is_causal: bool,
        hard: bool,
        equal_scales: bool,
        threshold: int,
    ) -> None:
        self.query, self.key, self.value = (unit_stride(x) for x in (query, key, value))
        num = _num_components(key, row_bias, key_bias)
        self.components, self.products = num, key.shape[2]
        equal = equal_scales or scales is None or num == 1
        factored = self.products == 1 and num > 1 and equal and not hard
        factored = factored and row_bias is not None and key_bias is not None
        terms = [None if x is None else x.float().contiguous() for x in (row_bias, key_bias)]
        self.row_bias, self.key_bias = terms
        assert not factored or (terms[0] is not None and terms[1] is not None)
        spread = _spread(terms[0], terms[1]) if factored else None  # type: ignore[arg-type]
        masks = [None if x is None else x.view(torch.uint8) for x in (key_mask, pair_mask)]
        key_mask = None if masks[0] is None else masks[0].contiguous()
        self.scales = None if scales is None else scales.float().contiguous()
        self.pointers = (
            *(self.scales, self.row_bias, self.key_bias, spread),
            *(key_mask, masks[1], bias, draw),
        )
        keep_scale = 65536 / (32768 - threshold)
        limit = _SPREAD_LIMIT.get(query.dtype, 64.0)
        self.numbers = (float(scale), keep_scale, threshold, limit)
        self.headroom = _HEADROOM.get(query.dtype, 0.0)
        self.input_strides = (
            *self.query.stride()[:3],
            *self.key.stride()[:4],
            *self.value.stride()[:3],
        )
        self.pair_strides = (*_strides(masks[1], 0, 1, 2, 3), *_strides(bias, 0, 1, 2, 3))
        heads, rows = query.shape[1:3]
        self.sizes = (
            *(heads, rows, key.shape[3]),
            *(heads // key.shape[1], heads // value.shape[1]),
        )
        self.flags: dict[str, Any] = {
            "COMPONENTS": num,
            "PRODUCTS": self.products,
            "HARD": hard,
            "FACTORED": factored,
            "EQUAL_SCALES": equal,
            "CAUSAL": is_causal,
            "HAS_SCALES": scales is not None,
            "HAS_ROW": row_bias is not None,
            "HAS_COL": key_bias is not None,
            "HAS_KEY_MASK": key_mask is not None,
            "HAS_PAIR_MASK": pair_mask is not None,
            "HAS_BIAS": bias is not None,
            "DROPOUT": draw is not None,
            "KEY_DIM": query.shape[-1],
            "KEY_PAD": padded(query.shape[-1]),
            "VALUE_DIM": value.shape[-1],
            "VALUE_PAD": padded(value.shape[-1]),
        }

    @property
    def form(self) -> str:
        """Name of the form of scores, which launch configurations depend on."""
        if self.components == 1:
            return "softmax"
        family = "smgk" if self.products == 1 else "mgk"
        return f"{family}_hard" if self.flags["HARD"] else family

    def launch(self, kernel: str) -> tuple[dict[str, int], int, int]:
        """Return the launch options of a kernel, and its tile sizes."""
        width = max(self.flags["KEY_PAD"], self.flags["VALUE_PAD"])
        name = f"{self.form}_{kernel}"
        shape = Shape(name, width, self.components, self.query.element_size())
        found = choose_launch(shape, self.query.device)
        options = {
            "BLOCK_Q": found.block_q,
            "BLOCK_K": found.block_k,
            "num_warps": found.num_warps,
            "num_stages": found.num_stages,
        }
        return options, found.block_q, found.block_k


def _new_output(query: Tensor, value: Tensor) -> Tensor:
    """Return (B, H, N, E_v) stored as (B, N, H, E_v), which merging the heads wants."""
    batch, heads, rows, _ = query.shape
    return query.new_empty(batch, rows, heads, value.shape[-1]).transpose(1, 2)


@torch.library.custom_op("lit_probattn::mixture_attention", mutates_args=())
def mixture_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scales: Tensor | None,
    row_bias: Tensor | None,
    key_bias: Tensor | None,
    bias: Tensor | None,
    key_mask: Tensor | None,
    pair_mask: Tensor | None,
    draw: Tensor | None,
    scale: float,
    is_causal: bool,
    hard: bool,
    equal_scales: bool,
    threshold: int,
) -> tuple[Tensor, Tensor]:
    """Attend; see the module for the scores.

    Args:
        query: (B, H, N, E).
        key: (B, H_key, K, L, E), or K = 1 for components that share one product.
        value: (B, H_kv, L, E_v); H_kv divides H_key, which divides H.
        scales: factors on query · key, (H_key, K); None means `scale` for all.
        row_bias: (B, H, K, N) or None.
        key_bias: (B, H_key, K, L) or None.
        bias: additive, 4-dimensional, broadcastable to (B, H, N, L), or None.
        key_mask: (B, L) bool or None.
        pair_mask: 4-dimensional bool, broadcastable to (B, H, N, L), or None.
        draw: what dropout draws from, see `runtime.draw_tensor`; None means no dropout.
        scale: used when `scales` is None.
        is_causal: bottom-right aligned.
        hard: maximum over components instead of the sum.
        equal_scales: known that `scales` are the same for all components of a head.
        threshold: `AttentionDropout.threshold`; ignored without `draw`.

    Returns:
        Output (B, H, N, E_v), and log₂ of every row's sum of weights (B, H, N), +inf for rows that
        see nothing.
    """
    from lit_probattn.kernels.dense.forward import forward_kernel

    call = DenseCall(
        *(query, key, value, scales, row_bias, key_bias, bias, key_mask, pair_mask, draw),
        *(scale, is_causal, hard, equal_scales, threshold),
    )
    out = _new_output(query, value)
    normaliser = query.new_empty(query.shape[:3], dtype=torch.float32)
    options, block_q, _ = call.launch("forward")
    launch(
        forward_kernel,
        math.ceil(query.shape[2] / block_q) * query.shape[0] * query.shape[1],
        (
            *(call.query, call.key, call.value, out, normaliser, *call.pointers),
            *(*call.numbers, call.headroom, *call.input_strides, *out.stride()[:3]),
            *(*call.pair_strides, *call.sizes),
        ),
        {**call.flags, **options},
    )
    return out, normaliser


@mixture_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    normaliser = query.new_empty(query.shape[:3], dtype=torch.float32)
    return _new_output(query, value), normaliser


@torch.library.custom_op("lit_probattn::mixture_attention_backward", mutates_args=())
def mixture_attention_backward(
    grad_out: Tensor,
    out: Tensor,
    normaliser: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scales: Tensor | None,
    row_bias: Tensor | None,
    key_bias: Tensor | None,
    bias: Tensor | None,
    key_mask: Tensor | None,
    pair_mask: Tensor | None,
    draw: Tensor | None,
    scale: float,
    is_causal: bool,
    hard: bool,
    equal_scales: bool,
    threshold: int,
    wants_scales: bool,
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value, scales, row_bias, key_bias and bias.

    Those that do not exist or are not wanted are empty.
    """
    from lit_probattn.kernels.dense.backward import delta_kernel, grad_key_kernel, grad_query_kernel

    call = DenseCall(
        *(query, key, value, scales, row_bias, key_bias, bias, key_mask, pair_mask, draw),
        *(scale, is_causal, hard, equal_scales, threshold),
    )
    grad_out, out = unit_stride(grad_out), unit_stride(out)
    inputs = (query, key, value, scales, row_bias, key_bias, bias)
    grads = _new_gradients(inputs, wants_scales, wants_bias)
    grad_query, grad_key, grad_value, grad_scales, grad_row, grad_col, grad_bias = grads
    batch, heads, rows, _ = query.shape
    if not out.numel() or not key.shape[3]:
        return tuple(x.zero_() for x in grads)  # type: ignore[return-value]
    delta = torch.empty_like(normaliser)
    flags = call.flags
    launch(
        delta_kernel,
        math.ceil(rows / 64) * batch * heads,
        (
            *(out, grad_out, delta),
            *(*out.stride()[:3], *grad_out.stride()[:3], heads, rows),
        ),
        {
            "VALUE_DIM": flags["VALUE_DIM"],
            "VALUE_PAD": flags["VALUE_PAD"],
            "BLOCK_Q": 64,
            "num_warps": 4,
        },
    )
    shared = (call.query, call.key, call.value, grad_out, normaliser, delta)
    options, block_q, _ = call.launch("grad_query")
    launch(
        grad_query_kernel,
        math.ceil(rows / block_q) * batch * heads,
        (
            *shared,
            *(grad_query, grad_row, *call.pointers, *call.numbers, *call.input_strides),
            *(*grad_out.stride()[:3], *grad_query.stride()[:3], *call.pair_strides, *call.sizes),
        ),
        {**flags, **options},
    )
    # One part per key head; value heads that several of them share are summed afterwards.
    part = grad_value
    if value.shape[1] != key.shape[1]:
        part = value.new_empty(batch, key.shape[1], *value.shape[2:])
    per_key = key_bias if key_bias is not None else key[..., 0]
    per_key = per_key.new_empty(
        (batch, key.shape[1], call.components, key.shape[3]) if wants_scales else (0,),
        dtype=torch.float32,
    )
    options, _, block_k = call.launch("grad_key")
    launch(
        grad_key_kernel,
        math.ceil(key.shape[3] / block_k) * batch * key.shape[1],
        (
            *shared,
            *(grad_key, part, grad_col, per_key, *call.pointers, *call.numbers),
            *(*call.input_strides, *grad_out.stride()[:3], *grad_key.stride()[:4]),
            *(*part.stride()[:3], *call.pair_strides, *call.sizes),
        ),
        {**flags, "WANTS_SCALES": wants_scales, **options},
    )
    if part is not grad_value:
        grad_value.copy_(part.unflatten(1, (value.shape[1], -1)).float().sum(2))
    if wants_bias and bias is not None:
        _launch_grad_bias(call, bias, (*shared, grad_bias), grad_out)
    if wants_scales:
        grad_scales.copy_(per_key.sum((0, 3)))
    return grad_query, grad_key, grad_value, grad_scales, grad_row, grad_col, grad_bias


def _launch_grad_bias(
    call: DenseCall, bias: Tensor, tensors: tuple[Tensor, ...], grad_out: Tensor
) -> None:
    """Start the pass for the bias, one program per tile of it."""
    from lit_probattn.kernels.dense.backward import grad_bias_kernel

    rows, cols = grad_out.shape[2], call.key.shape[3]
    one_row, one_col = (bias.shape[2] == 1 and rows > 1), (bias.shape[3] == 1 and cols > 1)
    options, block_q, block_k = call.launch("grad_bias")
    tiles = 1 if one_row else math.ceil(rows / block_q)
    tiles *= 1 if one_col else math.ceil(cols / block_k)
    launch(
        grad_bias_kernel,
        tiles * bias.shape[0] * bias.shape[1],
        (
            *(*tensors, *call.pointers, *call.numbers, *call.input_strides),
            *(*grad_out.stride()[:3], *call.pair_strides, *call.sizes),
            *(grad_out.shape[0], *bias.shape),
        ),
        {**call.flags, "ONE_ROW": one_row, "ONE_COL": one_col, **options},
    )


def _new_gradients(
    inputs: Sequence[Tensor | None], wants_scales: bool, wants_bias: bool
) -> tuple[Tensor, ...]:
    """Return room for the gradients of query, key, value, scales, row_bias, key_bias and bias."""
    points, others = inputs[:3], inputs[3:]
    wanted = (wants_scales, True, True, wants_bias)
    assert points[0] is not None
    return (
        *(like(x) for x in points if x is not None),
        *(
            points[0].new_empty(0 if x is None or not w else x.shape, dtype=torch.float32)
            for x, w in zip(others, wanted, strict=True)
        ),
    )


@mixture_attention_backward.register_fake
def _(grad_out: Tensor, out: Tensor, normaliser: Tensor, *call: Any) -> tuple[Tensor, ...]:
    return _new_gradients(call[:7], *call[-2:])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:_NUM_TENSORS])
    ctx.rest = inputs[_NUM_TENSORS:]
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    if grad_out is None:
        return (None,) * (_NUM_TENSORS + len(ctx.rest))
    out, normaliser, *inputs = ctx.saved_tensors
    needed = ctx.needs_input_grad
    found = mixture_attention_backward(
        *(grad_out, out, normaliser, *inputs, *ctx.rest), needed[3], needed[6]
    )
    grads = [
        grad.to(tensor.dtype) if wanted else None
        for grad, tensor, wanted in zip(found, inputs, needed, strict=False)
    ]
    return (*grads, *(None,) * (_NUM_TENSORS - len(grads) + len(ctx.rest)))


mixture_attention.register_autograd(_backward, setup_context=_setup_context)


def _pairs(query: Any, key: Any, value: Any) -> tuple[int, int]:
    """Return FLOPs of one round of query · key over all products, and of one of weights · value."""
    batch, heads, rows, width = query
    pairs = 2 * batch * heads * rows * key[3]
    return pairs * key[2] * width, pairs * value[-1]


@register_flop_formula(torch.ops.lit_probattn.mixture_attention)
def _forward_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """2 FLOPs per multiply-add, products only, causal not halved: the products that run."""
    scores, values = _pairs(query, key, value)
    return scores + values


@register_flop_formula(torch.ops.lit_probattn.mixture_attention_backward)
def _backward_flops(
    grad_out: Any, out: Any, normaliser: Any, query: Any, key: Any, value: Any, *args: Any, **_: Any
) -> int:
    """Scores again, query and key gradients; weight and value gradients.

    What the second of the two passes computes once more is not counted, as PyTorch counts its own.
    """
    scores, values = _pairs(query, key, value)
    return 3 * scores + 2 * values
