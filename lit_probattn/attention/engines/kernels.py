"""Attention by the fused kernels of `lit_probattn/kernels`."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_probattn.attention.call import HeadCall, pair_arguments
from lit_probattn.attention.variant import Layers, MapFunction, Scores, Variant
from lit_probattn.base.torch_internals import constant_in_graphs

# Widest value head of these kernels: wider values of heads that share a map are split.
WIDEST_IN_KERNEL = 128


def by_kernels(call: HeadCall, scores: Scores) -> Tensor:
    """Fused attention, forward and backward, O(N) memory."""
    if scores.shares_maps:
        return _by_map_kernels(call, scores)
    from lit_probattn.kernels.dense.operators import MixtureInputs
    from lit_probattn.kernels.dense.operators import mixture_attention as fused

    out, _ = fused(
        *MixtureInputs(
            query=scores.query,
            key=scores.key,
            value=call.value,
            scales=scores.coef,
            row_bias=None if scores.row is None else scores.row.transpose(2, 3),
            key_bias=scores.col,
            scale=scores.scale,
            hard=scores.reduce == "hard",
            **pair_arguments(call),
        )
    )
    return out


def lower_points(
    query: Tensor,
    key: Tensor,
    precision: Tensor,
    *,
    offset: Tensor | None = None,
    shift: Tensor | None = None,
    gaussian: bool = True,
    equal: bool = False,
) -> Scores:
    """Return the normal form of mixtures of Gaussian keys, in two kernel launches with backward.

    Operations of PyTorch would need a dozen or more. The sum over components is soft.

    Args:
        query: (B, H, N, E).
        key: (B, H_key, K, L, E), or K = 1 with `shift`.
        precision: τ, (H_key, K).
        offset: log-prior and normalising terms, (H_key, K, 1 or L). None means 0.
        shift: b_r, (H_key, K, E). None means K keys per position.
        gaussian: −τ_r ‖query − key − b_r‖² / 2; otherwise τ_r query · (key + b_r).
        equal: whether τ is known to be the same for all components of a head.
    """
    from lit_probattn.kernels.dense.lowering import lower_points as fused

    by_position = offset is not None and offset.shape[2] > 1
    once = precision.new_zeros(*precision.shape, 1) if offset is None or by_position else offset
    numbers = [precision[..., None], once] + ([] if shift is None else [shift])
    together = torch.cat(numbers, 2).float()
    equal = equal and (precision.shape[1] == 1 or not precision.requires_grad)
    query, key, row, col = fused(query, key, together, gaussian, equal)
    if offset is not None and by_position:
        col = col + offset
    coef = precision[:, :1] if equal else precision
    row = row.transpose(2, 3) if row.dim() > 1 else None
    return Scores(query, key, coef=coef, row=row, col=col)


def _by_map_kernels(call: HeadCall, scores: Scores) -> Tensor:
    """Attend if heads mix maps; mixing weights and noise scales are float32 in the kernels."""
    from lit_probattn.kernels.fish.operators import fish_attention

    heads, noise = call.value.shape[1], scores.noise
    layers: Layers | None = None
    if isinstance(scores.reduce, MapFunction):
        assert isinstance(scores.reduce.form, Layers)
        layers = scores.reduce.form
        noise = layers.noise
    first = scores.coef if layers is None else layers.first
    assert first is not None
    scale = None if noise is None else noise.scale
    if len(first) == 1:  # all heads are equal
        first = first.expand(heads, -1)
        if scale is not None and noise is not None and noise.per_head:
            scale = scale.expand(heads)
    return fish_attention(
        *(scores.query, scores.key[:, :, 0], call.value),
        first=first,
        first_bias=None if layers is None else layers.bias,
        second=None if layers is None else layers.second,
        noise_scale=scale,
        noise_per_head=noise is not None and noise.per_head,
        noise_draw=None if noise is None else noise.draws.words(scores.query),
        first_row=0 if noise is None else noise.draws.first_row,
        on_global=scores.scale,
        **pair_arguments(call),
    )


def kernel_refusal(call: HeadCall, variant: Variant, query_size: int = 0) -> str | None:
    """Return why the variant's fused kernels do not support a call ("cannot …"), or None.

    The family's self-test runs at the first call on a GPU with this dtype and these head sizes.

    Args:
        call: the call.
        variant: the variant, whose `kernel` is the family.
        query_size: size of a query head in the kernel. 0 means the size in the call.
    """
    bias, pairs = call.masks.bias, (call.masks.num_queries, call.masks.num_keys)
    needs_grad = call.bias_needs_grad and variant.kernel.startswith("fish/")
    if bias is not None and needs_grad and bias.shape[2:] != pairs:
        return (
            f"cannot give a gradient to a bias of shape {tuple(bias.shape)}, broadcast over "
            f"queries or keys: expected (…, {pairs[0]}, {pairs[1]})"
        )
    sizes = (query_size or call.query.shape[-1], call.value.shape[-1])
    return _refusal(variant.kernel, call.device, call.query.dtype, sizes)


@constant_in_graphs
def _refusal(
    family: str, device: str, dtype: torch.dtype, head_dims: tuple[int, int]
) -> str | None:
    from lit_probattn.kernels.runtime import refusal
    from lit_probattn.kernels.selftest import failure

    reason = refusal(device, dtype, *head_dims)
    if reason is None and device == "cuda":
        reason = failure(family, dtype, head_dims)
    return reason
