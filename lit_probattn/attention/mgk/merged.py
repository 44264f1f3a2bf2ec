"""Soft mixtures of Gaussians as one fused softmax attention per component, merged exactly."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lit_probattn.attention.cache import merge_partials
from lit_probattn.attention.functional import Heads, compute_dtype, repeat_rows
from lit_probattn.attention.mgk.functions import MGKArguments, expand_to_dot
from lit_probattn.attention.sdpa import attention_and_normaliser


def mgk_merged(given: Heads, arguments: MGKArguments) -> Tensor:
    """Attend to every component alone by PyTorch's fused attention, and merge the outputs.

    Exact for the soft E-step. With o_ir the attention over the keys of component r alone and L_ir
    the logarithm of its row's sum of exponentials,

        L'_ir = L_ir + log π_r − (τ_r − τ_1) ‖q_i‖²/2 [+ (E/2) log τ_r]
        o_i   = Σ_r exp(L'_ir − L_i) o_ir,    L_i = logsumexp_r L'_ir

    Keys stay one per position, so a causal mask is the kernel's own, which leaves out the pairs
    above the diagonal. Priors of positions of their own are part of the keys.
    """
    query, key, value, masks, _ = given
    log_prior = arguments.log_prior
    # Of a single component the merge has no gradient for the prior, so that too is in the keys.
    on_keys = log_prior is not None and (log_prior.shape[-1] > 1 or key.shape[2] == 1)
    of_keys = replace(
        arguments,
        log_prior=log_prior if on_keys else None,
        include_log_det=False,
        equal_variance=True,  # the norms of queries follow, outside of the kernel
    )
    rows, keys = expand_to_dot(query, key, of_keys)
    offsets = _row_offsets(rows[..., : query.shape[-1]], arguments, with_prior=not on_keys)
    outputs, normalisers = [], []
    for r in range(keys.shape[2]):
        out, normaliser = attention_and_normaliser(
            rows, keys[:, :, r], value, masks=masks, scale=1.0
        )
        outputs.append(out)
        normalisers.append(normaliser + offsets[..., r : r + 1])
    return merge_partials(outputs, normalisers)[0]


def _row_offsets(query: Tensor, arguments: MGKArguments, *, with_prior: bool) -> Tensor:
    """Return what a component's scores share in a row, broadcastable to (B, H, N, K).

    Args:
        query: moved as in `expand_to_dot`, (B, H, N, E).
        arguments: prior and variances.
        with_prior: whether log π belongs to it.
    """
    dtype, heads, size = compute_dtype(query), query.shape[1], query.shape[-1]
    precision = repeat_rows(1.0 / arguments.variance.to(dtype), heads)  # (H, K)
    offset = torch.zeros_like(precision)
    if with_prior and arguments.log_prior is not None:
        offset = offset + repeat_rows(arguments.log_prior[..., 0].to(dtype), heads)
    if arguments.include_log_det:
        offset = offset + (size / 2.0) * precision.log()
    offset = offset[None, :, None]
    if arguments.score == "gaussian" and not arguments.equal_variance:
        difference = (precision - precision[:, :1].detach()) * -0.5
        squares = query.to(dtype).square().sum(-1, keepdim=True)
        offset = offset + squares * difference[:, None]
    return offset
