"""Mathematical functions that at least two variants share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lit_probattn.attention.draws import keep_pairs
from lit_probattn.attention.masks import Masks
from lit_probattn.base.graphs import is_transformed, once_differentiable
from lit_probattn.base.torch_internals import is_functionalized
from lit_probattn.randomness import AttentionDropout


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of scores and softmax sums: float64 for float64 inputs, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def autocast_off(tensor: Tensor) -> AbstractContextManager[object]:
    """Disable autocast on the device of a tensor; the meta device has no autocast."""
    kind = tensor.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)


def repeat_heads(tensor: Tensor, num_heads: int) -> Tensor:
    """Repeat key/value heads for grouped queries, (B, H_kv, …) -> (B, H, …), H/H_kv times each."""
    groups = num_heads // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, dim=1)


def component_keys(key: Tensor, count: int, shift: Tensor | None) -> Tensor:
    """Return the keys of all components, (B, H, K, L, E), at least float32 if shifted.

    Args:
        key: (B, H, K, L, E), (B, H·K, L, E) with the keys of a head adjacent, or with shifts one
            key, (B, H, L, E).
        count: K.
        shift: b_r, (H, K, E), or (H, K, L, E) if it depends on the position; H may be a multiple of
            the heads of the key.
    """
    if shift is None:
        return key if key.dim() == 5 else key.unflatten(1, (-1, count))
    key = key.to(compute_dtype(key))
    table = (shift[:, :, None] if shift.dim() == 3 else shift).to(key.dtype)
    return repeat_heads(key, max(shift.shape[0], key.shape[1]))[:, :, None] + table[None]


def grouped_scores(query: Tensor, key: Tensor) -> Tensor:
    """Multiply (B, H, N, E) queries with (B, H_kv, L, E) keys, without repeating the keys."""
    batch, heads, rows, size = query.shape
    groups = heads // key.shape[1]
    if groups == 1:
        return query @ key.mT
    folded = query.reshape(batch, key.shape[1], groups * rows, size)
    return (folded @ key.mT).view(batch, heads, rows, key.shape[2])


def grouped_values(weights: Tensor, value: Tensor) -> Tensor:
    """Multiply (B, H, N, L) weights with (B, H_kv, L, E) values without repeating the values."""
    batch, heads, rows, keys = weights.shape
    grouped = weights.reshape(batch, value.shape[1], heads // value.shape[1] * rows, keys)
    return (grouped @ value).view(batch, heads, rows, value.shape[3])


def map_heads(weight: Tensor, maps: Tensor) -> Tensor:
    """Mix maps over heads by one matrix product: (O, I), (B, I, …) -> (B, O, …)."""
    batch = maps.shape[0]
    mixed = torch.bmm(weight.expand(batch, -1, -1), maps.flatten(2))
    return mixed.view(batch, weight.shape[0], *maps.shape[2:])


def masked_softmax(scores: Tensor, allowed: Tensor | None, row_eps: float = 0.0) -> Tensor:
    """Return the softmax over the last dimension; fully masked rows have zeros and zero gradients.

    Args:
        scores: (B, H, N, L); entries may be -inf.
        allowed: bool, broadcastable to `scores`. None means all.
        row_eps: added to each row's sum of exponentials.
    """
    if scores.shape[-1] == 0:  # rows without keys have no weights
        return scores
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    largest = scores.detach().amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == float("-inf"), 0.0)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True)
    if row_eps:
        total = total + row_eps * torch.exp(-largest)
    return weights / total.masked_fill(total == 0, 1.0)


def squared_distance(query: Tensor, key: Tensor) -> Tensor:
    """Return ‖query_i − key_j‖² for all pairs by one matrix product, clamped at zero.

    The mean key is subtracted from all vectors first: distances do not change, and the cancellation
    in ‖q‖² − 2 q·k + ‖k‖² loses fewer digits.

    Shapes are (…, N, E) and (…, L, E) -> (…, N, L).
    """
    if key.shape[-2]:  # the mean of no keys is NaN
        centre = key.detach().mean(-2, keepdim=True)
        query, key = query - centre, key - centre
    squares = query.square().sum(-1)[..., :, None] + key.square().sum(-1)[..., None, :]
    return (squares - 2.0 * query @ key.mT).clamp_min(0.0)


def first_maximum(scores: Sequence[Tensor]) -> Tensor:
    """Return the elementwise maximum; the gradient goes to the first largest entry only.

    NaN in any argument gives NaN.
    """
    largest, *rest = scores
    for candidate in rest:
        if is_transformed():  # torch.func does not support _Larger
            first = (largest >= candidate) | largest.isnan()
            largest = torch.where(first, largest, candidate)
        else:
            largest = _Larger.apply(largest, candidate)
    return largest


class _Larger(torch.autograd.Function):
    """The larger of two tensors, faster than `torch.where`; saves which one was larger."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            ctx.save_for_backward(second > first)
        return torch.maximum(first, second)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (is_second,) = ctx.saved_tensors
        to_second = grad * is_second  # not in place: a vectorised Jacobian has many gradients
        return grad - to_second, to_second


def within(x: Tensor, low: float, high: float) -> Tensor:
    """Return x clamped to a range; outside of it, only gradients of steps back to it pass.

    A descent step goes against the gradient. The gradient of `clamp` is zero on both sides, so that
    a parameter that has left the range could never return.
    """
    if is_functionalized():
        return x.clamp(low, high)
    # PyTorch does not compile functions with a `jvp`.
    function = _WithinForTransforms if is_transformed() else _Within
    clamped: Tensor = function.apply(x, low, high)
    return clamped


class _Within(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, low: float, high: float) -> Tensor:
        return x.clamp(low, high)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
        x, ctx.low, ctx.high = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        leaves = ((x <= ctx.low) & (grad > 0)) | ((x >= ctx.high) & (grad < 0))
        return grad.masked_fill(leaves, 0.0), None, None


class _WithinForTransforms(_Within):
    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        return tangent.masked_fill((x < ctx.low) | (x > ctx.high), 0.0)


def log_sum_exp(scores: Sequence[Tensor]) -> Tensor:
    """Return log Σ_r exp(scores_r) elementwise; three passes per term in backward."""
    if len(scores) == 1:
        return scores[0]
    total: Tensor = _LogSumExp.apply(*scores)
    return total


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *scores: Tensor) -> Tensor:
        total = torch.logaddexp(scores[0], scores[1])
        for term in scores[2:]:
            total = torch.logaddexp(total, term)
        ctx.save_for_backward(total, *scores)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        total, *scores = ctx.saved_tensors
        return tuple(torch.sub(term, total).exp_().mul_(grad) for term in scores)


def biased(scores: Tensor, masks: Masks, rows: range, cols: range) -> Tensor:
    """Add the bias of a block, if any."""
    bias = masks.bias_block(rows, cols)
    return scores if bias is None else scores + bias.to(scores.dtype)


def reference_weights(
    scores: Tensor,
    masks: Masks,
    normalise: Callable[[Tensor, Tensor | None], Tensor] = masked_softmax,
) -> Tensor:
    """Return weights of scores + bias over allowed pairs, (B, H, N, L)."""
    rows, cols = masks.all_rows, masks.all_cols
    scores = biased(scores, masks, rows, cols)
    return normalise(scores, masks.allowed(rows, cols, scores.device))


def reference_output(
    scores: Tensor,
    value: Tensor,
    masks: Masks,
    dropout: AttentionDropout | None,
    normalise: Callable[[Tensor, Tensor | None], Tensor] = masked_softmax,
) -> Tensor:
    """Return dropout(softmax(scores)) @ value, (B, H, N, E_v), storing the attention weights."""
    weights = reference_weights(scores, masks, normalise)
    if dropout is not None:
        batch, heads = weights.shape[:2]
        rows, cols = masks.all_rows, masks.all_cols
        keep = keep_pairs(dropout, batch, heads, rows, cols, weights.device)
        weights = weights * keep * dropout.scale
    return weights @ repeat_heads(value.to(weights.dtype), weights.shape[1])


def repeat_rows(parameter: Tensor, num_heads: int) -> Tensor:
    """Repeat a parameter of key heads, (H_prior, …) -> (num_heads, …)."""
    groups = num_heads // parameter.shape[0]
    return parameter if groups == 1 else parameter.repeat_interleave(groups, 0)


def split_precision(tensor: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Split a tensor into summands in `dtype`: one if the dtypes are equal, else three.

    All are finite; their sum has three times the range of the dtype.
    """
    if tensor.dtype == dtype:
        return [tensor]
    parts, largest = [], torch.finfo(dtype).max
    for _ in range(3):
        parts.append(tensor.clamp(-largest, largest).to(dtype))
        tensor = tensor - parts[-1].to(tensor.dtype)
    return parts
