"""Causal linear attention over chunks as PyTorch operators: launches, fakes, autograd, FLOPs.

    num[h, i] = Σ_s p[h, s] Σ_{j ≤ i} (query[h, i] · key[s, j]) value[s, j]
    den[h, i] = Σ_s r[h, s] Σ_{j ≤ i}  query[h, i] · key[s, j]

Saved are the inputs; states of chunks are added up again in backward. Nothing is added atomically.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lit_probattn.kernels.linear.call import LinearCall, contiguous
from lit_probattn.kernels.runtime import launch


@torch.library.custom_op("lit_probattn::linear_forward", mutates_args=())
def linear_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    norm_weight: Tensor | None,
    state: Tensor | None,
    total: Tensor | None,
    has_totals: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return num (B, H, N, E), den (B, H, N), and the sums over all keys; float32.

    Args:
        query: features, (B, H, N, F).
        key: features, (B, S, N, F).
        value: (B, S, N, E).
        weight: p, (H, S). None: H/S neighbouring heads read one source each, with weight 1.
        norm_weight: r, (H, S); given with `weight` if `has_totals`.
        state: Σ key value of earlier positions, (B, S, F, E). None means none.
        total: Σ key of earlier positions, (B, S, F).
        has_totals: whether den is wanted; empty otherwise.
        is_causal: whether query i reads keys j ≤ i, or all.
    """
    from lit_probattn.kernels.linear.kernels import read_kernel

    call = LinearCall(query, key, value, weight, norm_weight, has_totals, is_causal)
    sums, totals, end, total_end = call.forward_states(contiguous(state), contiguous(total))
    num, den = _new_outputs(query, value, has_totals)
    launch(
        read_kernel,
        call.batch * call.heads * call.chunks,
        (
            *(call.query, call.key, call.value, *call.weights, sums, totals, num, den),
            *(*call.input_strides(), *call.sizes),
        ),
        {
            **call.flags,
            "SOURCES": call.sources if call.weighted else 1,
            "GROUP": call.readers,
            "INTRA": is_causal,
            **call.options,
        },
    )
    return num, den, end, total_end


def _new_outputs(query: Tensor, value: Tensor, has_totals: bool) -> tuple[Tensor, Tensor]:
    num = query.new_empty(*query.shape[:3], value.shape[3], dtype=torch.float32)
    den = query.new_empty(query.shape[:3] if has_totals else (0,), dtype=torch.float32)
    return num, den


@linear_forward.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Any,
    norm_weight: Any,
    state: Any,
    total: Any,
    has_totals: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num, den = _new_outputs(query, value, has_totals)
    batch, sources, _, width = value.shape
    features = query.shape[3]
    end = num.new_empty(batch, sources, features, width)
    return num, den, end, num.new_empty(batch, sources, features if has_totals else 0)


@torch.library.custom_op("lit_probattn::linear_backward", mutates_args=())
def linear_backward(
    grad_num: Tensor,
    grad_den: Tensor | None,
    grad_end: Tensor | None,
    grad_total: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    norm_weight: Tensor | None,
    state: Tensor | None,
    total: Tensor | None,
    has_totals: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value, weight, norm_weight, state and total.

    Those of weights that do not exist are empty.
    """
    from lit_probattn.kernels.linear.kernels import key_gradient_kernel, query_gradient_kernel

    call = LinearCall(query, key, value, weight, norm_weight, has_totals, is_causal)
    sums, totals, _, _ = call.forward_states(contiguous(state), contiguous(total))
    grad_num = grad_num.float().contiguous()
    grad_den = contiguous(grad_den)
    if has_totals and grad_den is None:
        grad_den = grad_num.new_zeros(grad_num.shape[:3])
    heads = (*query.shape[:3],)
    grad_query = query.new_empty(*heads, call.features)
    slots = (call.batch, call.heads, call.chunks, 2, call.sources if call.weighted else 0)
    parts = grad_num.new_zeros(slots) if not has_totals else grad_num.new_empty(slots)
    common = (
        *(call.query, call.key, call.value, *call.weights),
        *(sums, totals, grad_num, grad_den),
    )
    flags = {**call.flags, "INTRA": is_causal, **call.options}
    launch(
        query_gradient_kernel,
        call.batch * call.heads * call.chunks,
        (*common, grad_query, parts, *call.input_strides(), *call.sizes),
        {**flags, "SOURCES": call.sources if call.weighted else 1, "GROUP": call.readers},
    )
    sums, totals = call.states(call.query, grad_num, grad_den, call.readers, call.weights)
    start = call.scan(sums, contiguous(grad_end), reverse=True)
    total_start = call.scan(totals, contiguous(grad_total), reverse=True)
    grad_key = torch.empty_like(key, memory_format=torch.contiguous_format)
    grad_value = torch.empty_like(value, memory_format=torch.contiguous_format)
    common = (*common[:5], sums, totals, grad_num, grad_den)
    launch(
        key_gradient_kernel,
        call.batch * call.sources * call.chunks,
        (*common, grad_key, grad_value, *call.input_strides(), *call.sizes),
        {**flags, "READERS": call.readers},
    )
    found = parts.double().sum((0, 2)).float()  # (H, 2, S)
    weights = [found[:, i].clone() for i in range(2)]
    if not has_totals:
        weights[1] = weights[1][:, :0].clone()
    return grad_query, grad_key, grad_value, weights[0], weights[1], start, total_start


@linear_backward.register_fake
def _(
    grad_num: Tensor,
    grad_den: Any,
    grad_end: Any,
    grad_total: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Any,
    norm_weight: Any,
    state: Any,
    total: Any,
    has_totals: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, sources, _, width = value.shape
    heads, features = query.shape[1], query.shape[3]
    count = sources if weight is not None else 0

    def new(*shape: int) -> Tensor:
        return query.new_empty(shape, dtype=torch.float32)

    return (
        *(query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)),
        *(new(heads, count), new(heads, count if has_totals else 0)),
        *(new(batch, sources, features, width), new(batch, sources, features * has_totals)),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.switches = inputs[7:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    if all(g is None for g in grads):
        return (None,) * 9
    query, key, value, *rest = ctx.saved_tensors
    grad_num, grad_den, grad_end, grad_total = grads
    if grad_num is None:
        grad_num = query.new_zeros(*query.shape[:3], value.shape[3], dtype=torch.float32)
    has_totals = ctx.switches[0]
    found = linear_backward(
        *(grad_num, grad_den if has_totals else None),
        *(grad_end, grad_total if has_totals else None),
        *(query, key, value, *rest, *ctx.switches),
    )
    inputs = (query, key, value, *rest)
    result: list[Any] = []
    for needed, grad, tensor in zip(ctx.needs_input_grad, found, inputs, strict=False):
        result.append(grad.to(tensor.dtype) if needed else None)
    return (*result, None, None)


linear_forward.register_autograd(_backward, setup_context=_setup_context)


def _products(query: Any, value: Any, has_totals: bool) -> tuple[int, int]:
    """Return FLOPs of writing all sources into states, and of all heads reading them."""
    batch, heads, rows, features = query
    width = value[3] + has_totals
    return 2 * batch * value[
        1
    ] * rows * features * width, 2 * batch * heads * rows * features * width


@register_flop_formula(torch.ops.lit_probattn.linear_forward)
def _forward_flops(
    query: Any, key: Any, value: Any, weight: Any, norm_weight: Any, state: Any, total: Any,
    has_totals: bool, *args: Any, **_: Any,
) -> int:  # fmt: skip
    """2 FLOPs per multiply-add of the O(N) form: writing states and reading them.

    Pairs within chunks, whose length is a matter of tuning, are not counted.
    """
    write, read = _products(query, value, has_totals)
    return write + read * (1 if weight is None else value[1])


@register_flop_formula(torch.ops.lit_probattn.linear_backward)
def _backward_flops(
    grad_num: Any, grad_den: Any, grad_end: Any, grad_total: Any, query: Any, key: Any, value: Any,
    weight: Any, norm_weight: Any, state: Any, total: Any, has_totals: bool, *args: Any, **_: Any,
) -> int:  # fmt: skip
    """States again, and two products for every one of forward."""
    write, read = _products(query, value, has_totals)
    return 3 * write + 2 * read * (1 if weight is None else value[1])
