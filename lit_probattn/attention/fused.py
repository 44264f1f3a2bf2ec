"""From attention layers to the fused kernels, which are imported only when they are called."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lit_probattn.attention.backends import Call
from lit_probattn.attention.functional import compute_dtype, repeat_heads
from lit_probattn.attention.masks import Masks
from lit_probattn.randomness import STREAM_DROPOUT, AttentionDropout

Score = Literal["gaussian", "dot"]


def pair_arguments(masks: Masks, dropout: AttentionDropout | None, query: Tensor) -> dict[str, Any]:
    """Return masks, bias and dropout as the kernels take them."""
    from lit_probattn.kernels.runtime import draw_tensor

    draw = None
    if dropout is not None:
        samples = dropout.key.samples(query.shape[0], query.device)
        draw = draw_tensor(dropout.key.philox_key(STREAM_DROPOUT), samples)
    return {
        "bias": masks.bias,
        "key_mask": masks.key_mask,
        "pair_mask": masks.attn_mask,
        "is_causal": masks.is_causal,
        "draw": draw,
        "threshold": 0 if dropout is None else dropout.threshold,
    }


def kernel_refusal(
    family: str, call: Call, *head_dims: int, bias_gradient: bool = False
) -> str | None:
    """Say why the fused kernel of a family cannot serve a call ("cannot …"), or None if it can.

    Args:
        family: name of the kernel, `softmax`, `mgk`, …; its self-test runs at the first call on a
            GPU with this dtype and head size.
        call: the call.
        head_dims: sizes of query and value heads.
        bias_gradient: whether the kernel gives an additive bias its gradient.
    """
    if call.recurrent:
        return "cannot continue from a state"
    if call.bias_needs_grad and not bias_gradient:
        return "cannot give a gradient to the additive bias"
    return _refusal(family, call.device, call.dtype, head_dims)


@torch.compiler.assume_constant_result
def _refusal(
    family: str, device: str, dtype: torch.dtype, head_dims: tuple[int, ...]
) -> str | None:
    from lit_probattn.kernels.runtime import refusal
    from lit_probattn.kernels.selftest import failure

    reason = refusal(device, dtype, *head_dims)
    if reason is None and device == "cuda":
        reason = failure(family, dtype, max(head_dims))
    return reason


def softmax_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    masks: Masks,
    dropout: AttentionDropout | None,
    score: Literal["dot", "gaussian"],
) -> Tensor:
    """Return softmax attention by the fused kernel, O(N) memory, forward and backward."""
    from lit_probattn.kernels.dense.softmax import softmax_attention
    from lit_probattn.kernels.dense.terms import centred, point_terms

    scale, key_bias = query.shape[-1] ** -0.5, None
    if score == "gaussian":
        query, key = centred(query, key)
        squares, _ = point_terms(key, None)
        key_bias = squares * (scale / -2.0)
    call = pair_arguments(masks, dropout, query)
    return softmax_attention(query, key, value, scale=scale, key_bias=key_bias, **call)


def mgk_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    masks: Masks,
    dropout: AttentionDropout | None,
    log_prior: Tensor | None,
    variance: Tensor,
    equal_variance: bool,
    score: Score,
    include_log_det: bool,
    hard: bool,
    key_shift: Tensor | None = None,
) -> Tensor:
    """Return attention to mixtures of Gaussians by the fused kernels.

    Args:
        query: (B, H, N, E).
        key: (B, H_key, K, L, E); with `key_shift` unshifted keys (B, H_key, L, E).
        value: (B, H_kv, L, E_v).
        masks: what each query may see.
        dropout: attention dropout.
        log_prior: see `mgk_reference`, as are the other arguments.
        key_shift: b_r, (H_prior, K, E): one product per pair serves all components.

    Returns:
        (B, H, N, E_v).
    """
    from lit_probattn.kernels.dense.mgk import mgk_attention
    from lit_probattn.kernels.dense.smgk import shifted_mgk_attention

    owners = max(key.shape[1], variance.shape[0])
    precision = repeat_rows(1.0 / variance.to(compute_dtype(query)), owners)
    offset = None if log_prior is None else repeat_rows(log_prior, owners)
    if include_log_det:
        log_det = (query.shape[-1] / 2.0) * precision.log()[..., None]
        offset = log_det if offset is None else offset + log_det
    arguments = {
        "precision": precision,
        "offset": offset,
        "gaussian": score == "gaussian",
        "equal_precision": equal_variance,
        "hard": hard,
        **pair_arguments(masks, dropout, query),
    }
    key = repeat_heads(key, owners)
    if key_shift is None:
        return mgk_attention(query, key, value, **arguments)
    shift = repeat_rows(key_shift, owners)
    return shifted_mgk_attention(query, key, shift, value, **arguments)


def repeat_rows(parameter: Tensor, num_heads: int) -> Tensor:
    """Repeat a parameter of key heads: (H_prior, …) -> (num_heads, …)."""
    groups = num_heads // parameter.shape[0]
    return parameter if groups == 1 else parameter.repeat_interleave(groups, 0)
