"""Attention over blocks of queries with O(N · block) memory, for all softmax-like variants.

A function maps a block of the variant's inputs to the block's scores; this module adds masked
softmax, dropout and the sum of values, block by block. No N x N tensor is stored: backward
recomputes the scores and weights of each block,

    d_scores = attn_weights ∘ (d_attn_weights - δ)
    δ_i = Σ_j attn_weights[i, j] d_attn_weights[i, j]

where the dropout factor is part of d_attn_weights. A block contains whole rows, so no normaliser is
saved, and δ is computed from the same weights that it multiplies: row sums of d_scores vanish up to
rounding, which the gradients of priors and norms require.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.draws import keep_pairs
from lit_probattn.attention.engines.loop import block_ranges, device_budget
from lit_probattn.attention.masks import Block, Masks, slice_block
from lit_probattn.attention.numerics import autocast_off, grouped_values, masked_softmax
from lit_probattn.attention.variant import MapFunction, Normaliser, Scores
from lit_probattn.base.graphs import once_differentiable, reject_several_gradients, written
from lit_probattn.base.torch_internals import softmax_backward
from lit_probattn.randomness import AttentionDropout

Axis = Literal["row", "col", "pair", "shared"]
# Scores per block: small enough for the cache of a CPU core, large enough that the computation of a
# block outweighs the overhead of its operations.
BLOCK_SCORES = {"cpu": 1 << 20, "cuda": 1 << 25}


ScoreFunction = Callable[..., Tensor]


def by_blocks(call: HeadCall, scores: Scores) -> Tensor:
    """Attend block by block, with gradients of the scores by autograd and O(N · block) memory."""
    reduce, noise = scores.reduce, scores.noise
    named: dict[str, tuple[Tensor | None, Axis]] = {
        "query": (scores.query * scores.scale, "row"),
        "key": (scores.key.flatten(1, 2), "col"),
        "coef": (scores.coef, "shared"),
        "row": (scores.row, "row"),
        "col": (None if scores.col is None else scores.col[..., None, :], "pair"),
        "noise": (None if noise is None else noise.scale, "shared"),
    }
    function = reduce if isinstance(reduce, MapFunction) else None
    further = () if function is None else function.tensors
    names = [name for name, (tensor, _) in named.items() if tensor is not None]
    products = scores.key.shape[2]
    heads = call.value.shape[1]  # if heads share maps, of which there may be more or fewer
    heads = heads if scores.shares_maps else max(heads, scores.query.shape[1])

    def block_scores(block: Block, *parts: Tensor) -> Tensor:
        found: dict[str, Any] = dict(zip(names, parts[: len(names)], strict=True))
        found["key"] = found["key"].unflatten(1, (-1, products))
        if "col" in found:
            found["col"] = found["col"].squeeze(-2)
        if noise is not None:
            found["noise"] = replace(noise, scale=found["noise"])
        found["reduce"] = reduce
        if function is not None:
            found["reduce"] = replace(function, tensors=parts[len(names) :])
        return Scores(**found).reduced(block).expand(-1, heads, -1, -1)

    axes: list[Axis] = [named[name][1] for name in names]
    axes += ["shared"] * len(further)
    tensors = (named[name][0] for name in names)
    inputs = [*(tensor for tensor in tensors if tensor is not None), *further]
    return blockwise_attention(
        block_scores,
        inputs,
        axes,
        call.value,
        call.masks,
        call.dropout,
        num_heads=heads,
        normaliser=scores.normaliser,
    )


@dataclass(frozen=True)
class _Plan:
    """Settings that all blocks share, besides tensors that need gradients."""

    score_function: ScoreFunction
    axes: tuple[Axis, ...]
    masks: Masks
    dropout: AttentionDropout | None
    block_rows: int
    has_bias: bool
    num_heads: int
    normaliser: Normaliser | None

    def blocks(self) -> list[Block]:
        rows = block_ranges(self.masks.num_queries, self.block_rows)
        return [Block(r, self.masks.visible_keys(r)) for r in rows]

    def slices(self, tensor: Tensor, axis: Axis, block: Block) -> Tensor:
        if axis == "row":
            return tensor[..., block.rows.start : block.rows.stop, :]
        if axis == "col":
            return tensor[..., block.cols.start : block.cols.stop, :]
        return slice_block(tensor, block.rows, block.cols) if axis == "pair" else tensor

    def scores(self, inputs: Sequence[Tensor], block: Block) -> Tensor:
        if self.normaliser is not None and self.normaliser.tensors:
            inputs = inputs[: -len(self.normaliser.tensors)]
        if not self.has_bias:
            return self.score_function(block, *inputs)
        *inputs, bias = inputs
        return self.score_function(block, *inputs) + bias

    def allowed(self, scores: Tensor, block: Block) -> Tensor | None:
        return self.masks.allowed(block.rows, block.cols, scores.device)

    def weights(self, scores: Tensor, inputs: Sequence[Tensor], block: Block) -> Tensor:
        """Return the weights of each row over allowed keys; fully masked rows are zero.

        The softmax path writes in place and does not support autograd.
        """
        if scores.shape[-1] == 0:  # the last of these rows is before the first key
            return scores
        allowed = self.allowed(scores, block)
        if self.normaliser is not None:
            tensors = inputs[len(inputs) - len(self.normaliser.tensors) :]
            return self.normaliser.function(scores, allowed, *tensors)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, float("-inf"))
        weights = torch.softmax(scores, -1)
        if allowed is None and not self.has_bias:
            return weights
        return weights.masked_fill_(scores.amax(-1, keepdim=True) == float("-inf"), 0.0)

    def keep(self, scores: Tensor, block: Block) -> Tensor | None:
        if self.dropout is None:
            return None
        batch, heads = scores.shape[:2]
        return keep_pairs(self.dropout, batch, heads, block.rows, block.cols, scores.device)


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, value: Tensor, *inputs: Tensor) -> Tensor:
        blocks = plan.blocks()
        earlier = (len(value), plan.num_heads, blocks[0].rows.start, value.shape[-1])
        outs = [value.new_empty(earlier)]  # rows of skipped blocks, usually none
        for block in blocks:
            parts = [plan.slices(x, a, block) for x, a in zip(inputs, plan.axes, strict=True)]
            scores = plan.scores(parts, block)
            weights = plan.weights(scores, parts, block)
            keep = plan.keep(weights, block)
            if keep is not None and plan.dropout is not None:
                weights = weights.mul_(keep).mul_(plan.dropout.scale)
            outs.append(grouped_values(weights, plan.slices(value, "col", block)))
        ctx.plan = plan
        ctx.save_for_backward(value, *inputs, *plan.masks.boolean)
        return torch.cat(outs, -2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        reject_several_gradients(grad_out)
        with autocast_off(grad_out):  # as in forward, for callers that leave autocast on
            return _Blockwise._backward(ctx, grad_out)

    @staticmethod
    def _backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        plan: _Plan = ctx.plan
        value, *inputs = ctx.saved_tensors[: 1 + len(plan.axes)]
        needed = ctx.needs_input_grad[2:]
        grad_value = _zeros_like(value, "col") if ctx.needs_input_grad[1] else None
        grads = [
            _zeros_like(x, axis) if n else None
            for x, axis, n in zip(inputs, plan.axes, needed, strict=True)
        ]
        for block in plan.blocks():
            rows = grad_out[..., block.rows.start : block.rows.stop, :]
            _backward_block(plan, block, value, inputs, needed, grad_value, grads, rows)
        return (None, grad_value, *grads)


def _zeros_like(tensor: Tensor, axis: Axis) -> Tensor:
    """Return zeros; for keys and values transposed in memory, as the products of blocks are."""
    if axis != "col":
        return torch.zeros_like(tensor)
    return torch.zeros_like(tensor.mT, memory_format=torch.contiguous_format).mT


def _backward_block(
    plan: _Plan,
    block: Block,
    value: Tensor,
    inputs: Sequence[Tensor],
    needed: Sequence[bool],
    grad_value: Tensor | None,
    grads: Sequence[Tensor | None],
    grad_out: Tensor,
) -> None:
    """Add one block's gradients to `grad_value` and `grads`."""
    with torch.enable_grad():
        parts = [
            plan.slices(x, a, block).detach().requires_grad_(n)
            for x, a, n in zip(inputs, plan.axes, needed, strict=True)
        ]
        result = scores = plan.scores(parts, block)
        if plan.normaliser is not None:
            result = plan.weights(scores, parts, block)
    value_part = plan.slices(value, "col", block)
    batch, heads, num_rows, num_keys = scores.shape
    kv_heads = value.shape[1]
    grouped_rows = (batch, kv_heads, heads // kv_heads * num_rows)
    grad_rows = grad_out.reshape(*grouped_rows, grad_out.shape[-1])
    weights = result.detach()
    if plan.normaliser is None:
        weights = plan.weights(scores.detach(), parts, block)
    keep = plan.keep(weights, block)
    if grad_value is not None:
        dropped = weights if keep is None or plan.dropout is None else weights * keep
        # Transposed, because products with few columns are slow: weights.mT @ grad_rows has E_v.
        update = grad_rows.mT @ dropped.reshape(*grouped_rows, num_keys)
        if plan.dropout is not None:
            update *= plan.dropout.scale
        plan.slices(grad_value, "col", block).add_(update.mT)
    if not any(needed):
        return
    grad_weights = (grad_rows @ value_part.mT).view(weights.shape)
    if keep is not None and plan.dropout is not None:
        grad_weights = grad_weights.mul_(keep).mul_(plan.dropout.scale)
    if plan.normaliser is None:  # weights ∘ (grad_weights - δ), fused
        grad_weights = softmax_backward(grad_weights, weights)
        if plan.axes.count("row") > 1:  # terms per query, whose gradients must sum to 0 as well
            grad_weights.addcmul_(weights, grad_weights.sum(-1, keepdim=True), value=-1.0)
    _add_gradients(plan, block, parts, needed, grads, result, grad_weights)


def _add_gradients(
    plan: _Plan,
    block: Block,
    parts: Sequence[Tensor],
    needed: Sequence[bool],
    grads: Sequence[Tensor | None],
    result: Tensor,
    grad_result: Tensor,
) -> None:
    """Add the gradients of a block's inputs, by autograd through its scores or weights."""
    wanted = [p for p, n in zip(parts, needed, strict=True) if n]
    found = iter(torch.autograd.grad(result, wanted, grad_result, allow_unused=True))
    for grad, axis, need in zip(grads, plan.axes, needed, strict=True):
        if not need or grad is None:
            continue
        update_part = next(found)
        if update_part is not None:
            plan.slices(grad, axis, block).add_(update_part)


def blockwise_attention(
    score_function: ScoreFunction,
    inputs: Sequence[Tensor],
    axes: Sequence[Axis],
    value: Tensor,
    masks: Masks,
    dropout: AttentionDropout | None,
    *,
    num_heads: int | None = None,
    normaliser: Normaliser | None = None,
) -> Tensor:
    """Attend block by block, with recomputation in backward; (B, H, N, E).

    Args:
        score_function: `score_function(block, *parts)` returns the scores (B, H, n, l) of
            `block` (n rows, l keys) from the inputs sliced to it. Differentiable and pure.
        inputs: tensors that the scores depend on, in the compute dtype.
        axes: slicing of each input: `row` along its second last dimension to the block's queries,
            `col` to its keys, `pair` along the last two dimensions, `shared` not sliced.
        value: (B, H_kv, L, E).
        masks: allowed pairs; a bias gets its gradient.
        dropout: redrawn in backward.
        num_heads: H. None means the heads of the first input.
        normaliser: replaces the softmax.
    """
    all_inputs, all_axes = list(inputs), list(axes)
    if masks.bias is not None:
        all_inputs.append(masks.bias.to(value.dtype))
        all_axes.append("pair")
    further = () if normaliser is None else normaliser.tensors
    all_inputs += further
    all_axes += ["shared"] * len(further)
    heads = inputs[0].shape[1] if num_heads is None else num_heads
    maps = 1 if normaliser is None else normaliser.score_maps
    row_scores = maps * value.shape[0] * heads * masks.num_keys
    plan = _Plan(
        score_function=score_function,
        axes=tuple(all_axes),
        masks=masks,
        dropout=dropout,
        block_rows=block_length(row_scores, masks.num_queries, value.device),
        has_bias=masks.bias is not None,
        num_heads=heads,
        normaliser=normaliser,
    )
    if written() == "compiled":
        return _checkpointed(plan, value, all_inputs)
    result: Tensor = _Blockwise.apply(plan, value, *all_inputs)
    return result


def _checkpointed(plan: _Plan, value: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """Attend with checkpointed blocks and autograd, for torch.compile."""
    outs = []
    for block in plan.blocks():
        parts = [plan.slices(x, a, block) for x, a in zip(inputs, plan.axes, strict=True)]
        part = plan.slices(value, "col", block)
        run = partial(_attend_block, plan, block)
        outs.append(checkpoint(run, part, *parts, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(outs, -2)


def _attend_block(plan: _Plan, block: Block, value: Tensor, *inputs: Tensor) -> Tensor:
    scores = plan.scores(inputs, block)
    if plan.normaliser is None:
        weights = masked_softmax(scores, plan.allowed(scores, block))
    else:
        weights = plan.weights(scores, inputs, block)
    keep = plan.keep(weights, block)
    if keep is not None and plan.dropout is not None:
        weights = weights * keep * plan.dropout.scale
    return grouped_values(weights, value)


def block_length(row_scores: int, num_queries: int, device: torch.device) -> int:
    """Return the number of queries, each with `row_scores` scores, per block on this device."""
    most = device_budget(BLOCK_SCORES, device) // max(1, row_scores)
    return max(1, min(num_queries, most))
