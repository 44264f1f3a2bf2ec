"""FiSH attention as PyTorch operators: launches, fakes, autograd, FLOP formulas.

attn_weights[h, i, j] ∝ exp(a_h),   a = mixing of on_global · (query_m,i · key_m,j) + noise

O(N) memory: saved are the inputs, the output and one number per query and local head. Backward adds
nothing atomically, so it gives the same bits every time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lit_probattn.kernels.fish.plan import FishCall, Heads, Plan
from lit_probattn.kernels.runtime import unit_stride


def fish_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    first: Tensor,
    first_bias: Tensor | None = None,
    second: Tensor | None = None,
    noise_scale: Tensor | None = None,
    noise_per_head: bool = False,
    noise_draw: Tensor | None = None,
    first_row: int = 0,
    on_global: float = 1.0,
    bias: Tensor | None = None,
    key_mask: Tensor | None = None,
    pair_mask: Tensor | None = None,
    draw: Tensor | None = None,
    threshold: int = 0,
    is_causal: bool = False,
) -> Tensor:
    """Return softmax(local scores + bias) @ value, (B, H, N, D) in the dtype of `query`.

    Source: FiSH, NeurIPS 2022, Eq. (8)-(10), section 2.4 as released; g_m = on_global · q_m · k_m:
        a = P (g + s ε)                           linear, noise per global map
        a = P g + c ε                             linear, noise per local head
        a = W_2 ReLU(W_1 (g + s ε) + b_1)         two layers; or noise per hidden unit before the
                                                  ReLU
    Departs from the source: see `FiSHAttention`.

    Args:
        query: (B, G, N, E).
        key: (B, G, L, E).
        value: (B, H, L, D).
        first: P (H, G) or W_1 (U, G), float32.
        first_bias: b_1, (U,).
        second: W_2, (H, U). None means a linear mixing.
        noise_scale: s (G,), or c (H,) or (U,) with `noise_per_head`.
        noise_per_head: whether noise belongs to local heads (hidden units) or to global maps.
        noise_draw: words of the noise, see `runtime.draw_tensor`. None means no noise.
        first_row: position of query 0 among all tokens, for the noise.
        on_global: factor on query · key.
        bias: additive, 4-dimensional, broadcastable to (B, H, N, L).
        key_mask: real keys, (B, L) bool.
        pair_mask: allowed pairs, 4-dimensional bool, broadcastable.
        draw: words of attention dropout. None means no dropout.
        threshold: `AttentionDropout.threshold`.
        is_causal: bottom-right aligned causal mask.

    Returns:
        (B, H, N, D); rows that see nothing are zero.
    """
    noise = 0 if noise_draw is None else (2 if noise_per_head else 1)
    out, _ = fish_forward(
        *(query, key, value, first, first_bias, second, noise_scale if noise else None),
        *(noise_draw, draw, key_mask, pair_mask, bias),
        *(is_causal, noise, first_row, on_global, threshold),
    )
    return out


@torch.library.custom_op("lit_probattn::fish_forward", mutates_args=())
def fish_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor,
    bias_1: Tensor | None,
    second: Tensor | None,
    scale: Tensor | None,
    noise_draw: Tensor | None,
    drop_draw: Tensor | None,
    key_mask: Tensor | None,
    pair_mask: Tensor | None,
    bias: Tensor | None,
    is_causal: bool,
    noise: int,
    first_row: int,
    on_global: float,
    threshold: int,
) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, N, D), and the normalisers in units of log 2, (B, H, N) float32.

    Args:
        query: see `fish.fish_attention`, as most that follow.
        key: (B, G, L, E).
        value: (B, H, L, D).
        first: first mixing layer.
        bias_1: its bias.
        second: second layer.
        scale: noise scales.
        noise_draw: words of the noise.
        drop_draw: words of dropout.
        key_mask: real keys.
        pair_mask: allowed pairs.
        bias: additive.
        is_causal: bottom-right aligned.
        noise: 0 none, 1 per global map, 2 per local head or hidden unit.
        first_row: position of query 0.
        on_global: factor on query · key.
        threshold: of dropout; ignored without `drop_draw`.
    """
    from lit_probattn.kernels.fish.forward import fish_forward_kernel

    call = FishCall(
        *(query, key, value, first, bias_1, second, scale, noise_draw, drop_draw, key_mask),
        *(pair_mask, bias, is_causal, noise, first_row, on_global, threshold),
    )
    out = _new_output(query, value)
    lse = query.new_empty(out.shape[:3], dtype=torch.float32)
    if out.numel():
        plan = call.plan("forward")
        tiles = call.tiles(call.num_rows, plan.launch.block_q)
        call.run(fish_forward_kernel, plan, tiles, (out, lse), out)
    return out, lse


def _new_output(query: Tensor, value: Tensor) -> Tensor:
    """Return (B, H, N, D) stored as (B, N, H, D), which merging the heads wants."""
    batch, heads, _, width = value.shape
    return query.new_empty(batch, query.shape[2], heads, width).transpose(1, 2)


@fish_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = _new_output(query, value)
    return out, query.new_empty(out.shape[:3], dtype=torch.float32)


@torch.library.custom_op("lit_probattn::fish_backward", mutates_args=())
def fish_backward(
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first: Tensor,
    bias_1: Tensor | None,
    second: Tensor | None,
    scale: Tensor | None,
    noise_draw: Tensor | None,
    drop_draw: Tensor | None,
    key_mask: Tensor | None,
    pair_mask: Tensor | None,
    bias: Tensor | None,
    is_causal: bool,
    noise: int,
    first_row: int,
    on_global: float,
    threshold: int,
    want_sums: bool,
    want_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value, first, bias_1, second, scale and bias.

    Gradients that do not exist or are not wanted are empty.
    """
    from lit_probattn.kernels.fish.backward import (
        fish_key_gradient_kernel,
        fish_query_gradient_kernel,
    )

    call = FishCall(
        *(query, key, value, first, bias_1, second, scale, noise_draw, drop_draw, key_mask),
        *(pair_mask, bias, is_causal, noise, first_row, on_global, threshold),
    )
    grad_out = unit_stride(grad_out)
    given = (grad_out, lse, (grad_out.float() * out.float()).sum(-1).contiguous())
    plan = call.plan("grad_query")
    tiles = call.tiles(call.num_rows, plan.launch.block_q)
    grad_query = _new_parts(query, plan)
    exact = torch.empty_like(given[2])
    call.run(fish_query_gradient_kernel, plan, tiles, (*given, grad_query, exact), grad_out)
    given = (*given[:2], exact)

    plan = call.plan("grad_key")
    tiles = math.ceil(call.num_cols / plan.launch.block_k)
    grad_key = _new_parts(key, plan)
    grad_value = torch.empty_like(value, memory_format=torch.contiguous_format)
    slots = call.heads.slots(plan.group) if want_sums else 0
    sums = query.new_empty(tiles, call.batch, plan.num_groups, slots, dtype=torch.float32)
    call.run(
        fish_key_gradient_kernel,
        plan,
        tiles * call.batch,
        (*given, grad_key, grad_value, sums),
        grad_out,
        WANT_SUMS=want_sums,
        SLOTS=slots,
    )
    small = _small_gradients(call.heads, plan.group, sums, want_sums, first)
    grad_bias = query.new_empty(0)
    if want_bias:
        assert bias is not None
        grad_bias = _bias_gradient(call, bias, given)
    grad_query, grad_key = _sum_parts(grad_query, query), _sum_parts(grad_key, key)
    return grad_query, grad_key, grad_value, *small, grad_bias


def _new_parts(tensor: Tensor, plan: Plan) -> Tensor:
    """Return room for one gradient of `tensor` per head group."""
    dtype = torch.float32 if plan.num_groups > 1 else tensor.dtype
    return tensor.new_empty(plan.num_groups, *tensor.shape, dtype=dtype)


def _sum_parts(parts: Tensor, tensor: Tensor) -> Tensor:
    """Add the parts of the head groups, in their order."""
    return parts[0] if len(parts) == 1 else parts.sum(0).to(tensor.dtype)


def _bias_gradient(call: FishCall, bias: Tensor, given: tuple[Tensor, ...]) -> Tensor:
    """Return the gradient of a bias that is whole in queries and keys, in its shape."""
    from lit_probattn.kernels.fish.backward import fish_bias_gradient_kernel

    plan = call.plan("grad_bias")
    places = bias.shape[0]
    shape = (places, call.num_heads, call.num_rows, call.num_cols)
    grad = bias.new_empty(shape, dtype=torch.float32)
    tiles = math.ceil(shape[2] / plan.launch.block_q) * math.ceil(shape[3] / plan.launch.block_k)
    call.run(
        *(fish_bias_gradient_kernel, plan, tiles * places, (*given, grad), given[0]),
        call.batch // places,
    )
    if bias.shape[1] == 1:
        grad = grad.sum(1, keepdim=True)
    return grad.to(bias.dtype)


def _small_gradients(
    heads: Heads, group: int, sums: Tensor, want_sums: bool, first: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of first, bias_1, second and scale from the programs' sums."""
    if not want_sums:
        return tuple(first.new_empty(0) for _ in range(4))  # type: ignore[return-value]
    maps, units, count = heads.num_global, heads.units, heads.num_heads
    sums = sums.double().sum((0, 1)).float()  # (groups, slots)
    if units == 0:
        weights, rest = sums[:, : group * maps], sums[:, group * maps :]
        own = rest.reshape(-1)[: count if heads.noise else 0].clone()
        scale = rest.sum(0) if heads.noise == 1 else own
        weights = weights.reshape(-1, maps)[:count].clone()
        return weights, first.new_empty(0), first.new_empty(0), scale
    widths = (units * group, units * maps, units, (0, maps, units)[heads.noise])
    second, one, bias, scale = sums.split(widths, 1)
    second = second.unflatten(1, (units, group)).transpose(1, 2).reshape(-1, units)
    second = second[:count].clone()
    return one.sum(0).view(units, maps), bias.sum(0), second, scale.sum(0)


@fish_backward.register_fake
def _fish_backward_fake(
    grad_out: Tensor, out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor,
    first: Tensor, bias_1: Any, second: Any, scale: Any, noise_draw: Any, drop_draw: Any,
    key_mask: Any, pair_mask: Any, bias: Any, is_causal: bool, noise: int, first_row: int,
    on_global: float, threshold: int, want_sums: bool, want_bias: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    def like(tensor: Tensor | None, wanted: bool = True) -> Tensor:
        if tensor is None or not wanted:
            return first.new_empty(0)
        return tensor.new_empty(tensor.shape)

    units = second.shape[1] if want_sums and second is not None else 0
    return (
        *(like(query), like(key), like(value), like(first, want_sums)),
        *(first.new_empty(units), like(second, want_sums)),
        like(scale if noise else None, want_sums),
        like(bias) if want_bias else query.new_empty(0),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:12], *output)
    ctx.switches = inputs[12:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad_out: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    *inputs, out, lse = ctx.saved_tensors
    none = (None,) * 17
    if grad_out is None:
        return none
    needed = ctx.needs_input_grad
    want_sums, want_bias = any(needed[3:7]), needed[11]
    found = fish_backward(grad_out, out, lse, *inputs, *ctx.switches, want_sums, want_bias)
    places = (0, 1, 2, 3, 4, 5, 6, 11)
    grads: list[Any] = list(none)
    for place, grad in zip(places, found, strict=True):
        if needed[place]:
            grads[place] = grad
    return tuple(grads)


fish_forward.register_autograd(_differentiate, setup_context=_save)


def _pair_flops(query: Any, key: Any, value: Any, first: Any, second: Any) -> tuple[int, int]:
    """Return FLOPs of the local scores (global products and mixing), and of weights · value."""
    batch, maps, rows, width = query
    mixing = first[0] * first[1] + (0 if second is None else second[0] * second[1])
    pairs = 2 * batch * rows * key[2]
    return pairs * (maps * width + mixing), pairs * value[1] * value[3]


@register_flop_formula(torch.ops.lit_probattn.fish_forward)
def _forward_flops(
    query: Any, key: Any, value: Any, first: Any, bias_1: Any, second: Any, *args: Any, **_: Any
) -> int:
    """2 FLOPs per multiply-add of products and mixing; causal is not halved."""
    scores, values = _pair_flops(query, key, value, first, second)
    return scores + values


@register_flop_formula(torch.ops.lit_probattn.fish_backward)
def _backward_flops(
    grad_out: Any, out: Any, lse: Any, query: Any, key: Any, value: Any, first: Any, bias_1: Any,
    second: Any, *args: Any, **_: Any,
) -> int:  # fmt: skip
    """Scores again, and two products for every one of forward.

    Head groups and the second of the two passes compute some of it once more; that is not counted.
    """
    scores, values = _pair_flops(query, key, value, first, second)
    return 3 * scores + 2 * values
