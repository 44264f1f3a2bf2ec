"""Attention over blocks of queries with O(N · block) memory, for every softmax-like variant.

A variant gives a function from a block of its inputs to the block's scores; this file turns it into
attention: masked softmax, dropout and the sum of values, block by block. Nothing of size N x N is
kept: backward computes each block's scores and weights again,

    d_scores = attn_weights ∘ (d_attn_weights - δ)
    δ_i = Σ_j attn_weights[i, j] d_attn_weights[i, j]

where the dropped weights carry their factor in d_attn_weights. A block holds whole rows, so no
normaliser has to be saved, and δ comes from the very weights that it multiplies: row sums of
d_scores vanish to rounding, which the gradients of priors and norms depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lit_probattn.attention.functional import grouped_values
from lit_probattn.attention.masks import Masks, slice_block
from lit_probattn.randomness import AttentionDropout
from lit_probattn.torch_internals import softmax_backward

Axis = Literal["row", "col", "pair", "shared"]
# Scores that one block may hold. Small enough to stay in the cache of a CPU core, large enough
# that the work of a block outweighs the cost of calling its operations.
BLOCK_SCORES = {"cpu": 1 << 20, "cuda": 1 << 25}


@dataclass(frozen=True)
class Block:
    """A block of scores: the queries and the prefix of keys that it covers."""

    rows: range
    cols: range


ScoreFunction = Callable[..., Tensor]


@dataclass(frozen=True)
class _Plan:
    """What the blocks have in common and what is not a tensor that needs a gradient."""

    score_function: ScoreFunction
    axes: tuple[Axis, ...]
    masks: Masks
    dropout: AttentionDropout | None
    num_heads: int
    block_rows: int
    has_bias: bool
    want_logsumexp: bool

    def blocks(self) -> list[Block]:
        stops = range(0, self.masks.num_queries, self.block_rows)
        rows = (range(i, min(i + self.block_rows, self.masks.num_queries)) for i in stops)
        return [Block(r, self.masks.visible_keys(r)) for r in rows]

    def slices(self, tensor: Tensor, axis: Axis, block: Block) -> Tensor:
        if axis == "row":
            return tensor[..., block.rows.start : block.rows.stop, :]
        if axis == "col":
            return tensor[..., block.cols.start : block.cols.stop, :]
        return slice_block(tensor, block.rows, block.cols) if axis == "pair" else tensor

    def scores(self, inputs: Sequence[Tensor], block: Block) -> Tensor:
        if not self.has_bias:
            return self.score_function(block, *inputs)
        *inputs, bias = inputs
        return self.score_function(block, *inputs) + bias

    def weights(self, scores: Tensor, block: Block) -> Tensor:
        """Return the softmax of each row over what it may see; zeros where it sees nothing."""
        hidden = self.hidden(scores, block)
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        weights = torch.softmax(scores, -1)
        if hidden is None and not self.has_bias:
            return weights
        return weights.masked_fill_(scores.amax(-1, keepdim=True) == float("-inf"), 0.0)

    def hidden(self, scores: Tensor, block: Block) -> Tensor | None:
        allowed = self.masks.allowed(block.rows, block.cols, scores.device)
        return None if allowed is None else ~allowed

    def keep(self, scores: Tensor, block: Block) -> Tensor | None:
        if self.dropout is None:
            return None
        return self.dropout.keep(
            scores.shape[0], scores.shape[1], block.rows, block.cols, scores.device
        )


def row_logsumexp(scores: Tensor, hidden: Tensor | None) -> Tensor:
    """Return the logarithm of each row's sum of exponentials, (B, H, n, 1); -inf for empty rows."""
    if scores.shape[-1] == 0:
        return scores.new_full((*scores.shape[:-1], 1), float("-inf"))
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.logsumexp(scores, -1, keepdim=True)


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, value: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        outs, normalisers = [], []
        for block in plan.blocks():
            parts = [plan.slices(x, a, block) for x, a in zip(inputs, plan.axes, strict=True)]
            scores = plan.scores(parts, block)
            if plan.want_logsumexp:
                normalisers.append(row_logsumexp(scores, plan.hidden(scores, block)))
            weights = plan.weights(scores, block)
            keep = plan.keep(weights, block)
            if keep is not None and plan.dropout is not None:
                weights = weights.mul_(keep).mul_(plan.dropout.scale)
            outs.append(grouped_values(weights, plan.slices(value, "col", block)))
        out = torch.cat(outs, -2)
        normaliser = torch.cat(normalisers, -2) if normalisers else out.new_empty(0)
        ctx.plan = plan
        ctx.save_for_backward(value, *inputs)
        ctx.mark_non_differentiable(normaliser)
        return out, normaliser

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        plan: _Plan = ctx.plan
        value, *inputs = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        grad_value = torch.zeros_like(value) if ctx.needs_input_grad[1] else None
        grads = [torch.zeros_like(x) if n else None for x, n in zip(inputs, needed, strict=True)]
        for block in plan.blocks():
            rows = grad_out[..., block.rows.start : block.rows.stop, :]
            _backward_block(plan, block, value, inputs, needed, grad_value, grads, rows)
        return (None, grad_value, *grads)


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
        scores = plan.scores(parts, block)
    weights = plan.weights(scores.detach(), block)
    keep = plan.keep(weights, block)
    value_part = plan.slices(value, "col", block)
    batch, heads, num_rows, num_keys = weights.shape
    kv_heads = value.shape[1]
    grouped_rows = (batch, kv_heads, heads // kv_heads * num_rows)
    grad_rows = grad_out.reshape(*grouped_rows, -1)
    if grad_value is not None:
        dropped = weights if keep is None or plan.dropout is None else weights * keep
        update = dropped.reshape(*grouped_rows, num_keys).mT @ grad_rows
        if plan.dropout is not None:
            update *= plan.dropout.scale
        plan.slices(grad_value, "col", block).add_(update)
    if not any(needed):
        return
    grad_weights = (grad_rows @ value_part.mT).view(weights.shape)
    if keep is not None and plan.dropout is not None:
        grad_weights = grad_weights.mul_(keep).mul_(plan.dropout.scale)
    # weights ∘ (grad_weights - δ), fused
    grad_scores = softmax_backward(grad_weights, weights)
    wanted = [p for p, n in zip(parts, needed, strict=True) if n]
    found = iter(torch.autograd.grad(scores, wanted, grad_scores, allow_unused=True))
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
    *,
    num_heads: int,
    masks: Masks,
    dropout: AttentionDropout | None = None,
    block_rows: int | None = None,
    want_logsumexp: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attend block by block, with recomputation in backward.

    Args:
        score_function: `score_function(block, *parts)` returns the scores (B, H, n, l) of
            `block` (n rows, l keys) from the inputs sliced to it. Differentiable; pure.
        inputs: tensors that the scores depend on, in the compute dtype.
        axes: how each input is sliced: `row` along its second last dimension to the block's
            queries, `col` likewise to its keys, `pair` along the last two, `shared` not at all.
        value: (B, H_kv, L, E).
        num_heads: H.
        masks: what each query may see; a bias gets its gradient.
        dropout: attention dropout, drawn again in backward.
        block_rows: queries per block; None sizes blocks for the device.
        want_logsumexp: also return the logarithm of each row's sum of exponentials.

    Returns:
        The output (B, H, N, E), and the logarithms (B, H, N, 1), -inf for rows that see nothing and
        without gradient; empty unless wanted.
    """
    all_inputs, all_axes = list(inputs), list(axes)
    if masks.bias is not None:
        all_inputs.append(masks.bias.to(value.dtype))
        all_axes.append("pair")
    if block_rows is None:
        per_row = max(1, value.shape[0] * num_heads * masks.num_keys)
        budget = BLOCK_SCORES["cpu" if value.device.type == "cpu" else "cuda"]
        block_rows = max(1, min(masks.num_queries, budget // per_row))
    plan = _Plan(
        score_function=score_function,
        axes=tuple(all_axes),
        masks=masks,
        dropout=dropout,
        num_heads=num_heads,
        block_rows=block_rows,
        has_bias=masks.bias is not None,
        want_logsumexp=want_logsumexp,
    )
    result: tuple[Tensor, Tensor] = _Blockwise.apply(plan, value, *all_inputs)
    return result
