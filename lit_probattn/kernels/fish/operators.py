"""FiSH attention as PyTorch operators.

attn_weights[h, i, j] ∝ exp(a_h),   a = mixing of on_global · (query_m,i · key_m,j) + noise

Memory is O(N): the inputs, the output and one number per query and local head are saved. Backward
uses no atomics, so it gives the same bits in every run.
"""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor

from lit_probattn.kernels.fish.plan import FishCall, FishInputs, Plan
from lit_probattn.kernels.operator import define_operators
from lit_probattn.kernels.runtime import NO_PAIRS, PairOptions, head_rows, launch, unit_stride


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
    **pairs: Unpack[PairOptions],
) -> Tensor:
    """Return softmax(local scores + bias) @ value, (B, H, N, D); zero in fully masked rows.

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
        noise_per_head: whether noise is added to local heads (hidden units) or to global maps.
        noise_draw: words of the noise; see `runtime.draw_tensor`. None means no noise.
        first_row: position of query 0 among all tokens, for the noise.
        on_global: factor on query · key.
        pairs: see `PairOptions`.
    """
    noise = 0 if noise_draw is None else (2 if noise_per_head else 1)
    call: dict[str, Any] = {**NO_PAIRS, **pairs}
    call |= {"noise": noise, "first_row": first_row, "on_global": on_global}
    scale = noise_scale if noise else None
    tensors = (query, key, value, first, first_bias, second, scale, noise_draw)
    out, _ = fish_forward(*FishInputs(*tensors, **call))
    return out


def _new_outputs(x: FishInputs) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, N, D) in memory order (B, N, H, D), for merging; and (B, H, N)."""
    batch, heads, _, width = x.value.shape
    out = x.query.new_empty(batch, x.query.shape[2], heads, width).transpose(1, 2)
    return out, x.query.new_empty(out.shape[:3], dtype=torch.float32)


def _forward(x: FishInputs) -> tuple[Tensor, Tensor]:
    """Return the output, and the normalisers in units of log 2."""
    from lit_probattn.kernels.fish.forward import fish_forward_kernel

    call = FishCall(x)
    out, lse = _new_outputs(x)
    if out.numel():
        plan = call.plan("forward")
        tiles = math.ceil(call.num_rows / plan.launch.block_q) * len(x.query)
        call.run(fish_forward_kernel, plan, tiles, (head_rows(out), lse), hoist=False)
    return out, lse


def _backward(
    x: FishInputs, grad_out: Tensor, out: Tensor, lse: Tensor, skipped: list[str]
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key, value, first, bias_1, second, scale and bias."""
    from lit_probattn.kernels.fish import backward as kernels

    call = FishCall(x)
    grad_out = unit_stride(grad_out)
    delta, exact = torch.empty_like(lse), torch.empty_like(lse)
    launch(
        *(kernels.fish_delta_kernel, math.ceil(call.num_rows / 64) * lse.shape[0] * lse.shape[1]),
        (call.arguments, head_rows(unit_stride(out)), head_rows(grad_out), delta),
        {"form": call.form, "BLOCK_Q": 64, "num_warps": 4},
    )
    plan = call.plan("grad_query")
    tiles = math.ceil(call.num_rows / plan.launch.block_q) * len(x.query)
    grad_query = _new_parts(x.query, plan)
    shared = (head_rows(grad_out), lse)
    args: tuple[Any, ...] = (*shared, delta, grad_query, exact)
    hoist = call.heads.draws != "noise_dropout"  # with both draws, no registers are left
    call.run(kernels.fish_query_gradient_kernel, plan, tiles, args, hoist)

    grad_value = torch.empty_like(x.value, memory_format=torch.contiguous_format)
    for name in call.key_passes():
        plan = call.plan(name)
        tiles = math.ceil(call.num_cols / plan.launch.block_k)
        has_keys = "key" in name
        if has_keys:
            group, grad_key = plan.group, _new_parts(x.key, plan)
            slots = 0 if "first" in skipped else call.heads.slots(group)
            places = (tiles, len(x.query), plan.num_groups, slots)
            sums = x.query.new_empty(places, dtype=torch.float32)
        constants: dict[str, Any] = {"KEYS": has_keys, "VALUES": "value" in name}
        constants["SLOTS"] = slots if has_keys else 0
        args = (*shared, exact, grad_key, grad_value, sums)
        tiles *= len(x.query)
        call.run(kernels.fish_key_gradient_kernel, plan, tiles, args, **constants)
    small = _small_gradients(x, call, group, sums)
    grad_bias = x.query.new_empty(0, dtype=torch.float32)
    if x.bias is not None and "bias" not in skipped:
        plan = call.plan("grad_bias")
        shape = (x.bias.shape[0], x.value.shape[1], call.num_rows, call.num_cols)
        grad_bias = x.bias.new_empty(shape, dtype=torch.float32)
        tiles = math.ceil(call.num_rows / plan.launch.block_q) * shape[0]
        tiles *= math.ceil(call.num_cols / plan.launch.block_k)
        args = (*shared, exact, grad_bias, len(x.query) // shape[0])
        call.run(kernels.fish_bias_gradient_kernel, plan, tiles, args)
        if x.bias.shape[1] == 1:
            grad_bias = grad_bias.sum(1, keepdim=True)
    return *_sum_parts(grad_query, grad_key, x), grad_value, *small, grad_bias


def _new_parts(tensor: Tensor, plan: Plan) -> Tensor:
    """Return a buffer for one gradient of `tensor` per head group."""
    dtype = torch.float32 if plan.num_groups > 1 else tensor.dtype
    return tensor.new_empty(plan.num_groups, *tensor.shape, dtype=dtype)


def _sum_parts(query: Tensor, key: Tensor, x: FishInputs) -> list[Tensor]:
    """Sum the parts of the head groups, in order."""
    from lit_probattn.kernels.fish.backward import add_parts_kernel

    found, args, block, programs = [], [], 1024, 0
    for parts, tensor in ((query, x.query), (key, x.key)):
        several = len(parts) > 1
        found.append(tensor.new_empty(tensor.shape) if several else parts[0])
        size = found[-1].numel() if several else 0
        args += [parts, found[-1], len(parts), size]
        programs += math.ceil(size / block)
    launch(add_parts_kernel, programs, tuple(args), {"BLOCK": block, "num_warps": 4})
    return found


def _small_gradients(x: FishInputs, call: FishCall, group: int, sums: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of first, bias_1, second and scale from the programs' sums."""
    from lit_probattn.kernels.fish.backward import add_sums_kernel

    slots = sums.shape[-1]
    small = (x.first, x.bias_1, x.second, x.scale)
    found = tuple(
        sums.new_empty(0 if tensor is None or not slots else tensor.shape) for tensor in small
    )
    places = (None if tensor is None else room for tensor, room in zip(small, found, strict=True))
    sizes = (sums.shape[0] * sums.shape[1], sums.shape[2], call.heads.num_heads)
    launch(
        *(add_sums_kernel, slots),
        (sums, *places, *sizes),
        {"form": call.form._replace(group=group), "SLOTS": slots, "BLOCK": 256, "num_warps": 4},
    )
    return found


def _flops(x: Any, backward: bool) -> int:
    """Return FLOPs of local scores (global products, mixing) and of weights · values.

    Recomputation by several head groups is not counted.
    """
    batch, maps, rows, width = x.query
    mixing = x.first[0] * x.first[1] + (0 if x.second is None else x.second[0] * x.second[1])
    pairs = 2 * batch * rows * x.key[2]
    scores, values = pairs * (maps * width + mixing), pairs * x.value[1] * x.value[3]
    return 3 * scores + 2 * values if backward else scores + values


fish_forward = define_operators(
    ("fish_forward", "fish_backward"),
    FishInputs,
    _forward,
    _backward,
    new_outputs=_new_outputs,
    gradients=("query", "key", "value", "first", "bias_1", "second", "scale", "bias"),
    flops=_flops,
    optional=(("first", "bias_1", "second", "scale"), ("bias",)),
)
