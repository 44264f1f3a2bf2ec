"""Softmax and dropout of a block of scores in C, forward and backward (`kernels/cpu/rows.h`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lit_probattn.attention.masks import Block, Masks
from lit_probattn.base.memory import only_shapes
from lit_probattn.base.torch_internals import outside_graphs
from lit_probattn.randomness import STREAM_DROPOUT, AttentionDropout

if TYPE_CHECKING:
    from lit_probattn.kernels.cpu import rows


@outside_graphs
def softmax_rows(
    scores: Tensor, block: Block, masks: Masks, dropout: AttentionDropout | None
) -> None:
    """Replace scores by the dropped weights; a graph of torch.compile breaks here.

    Args:
        scores: (B, H, n, l), contiguous, float32 or float64 on the CPU; a bias is part of them.
        block: which queries and keys these are.
        masks: what each query may see.
        dropout: one decision per pair.
    """
    if only_shapes(scores):  # the library writes in place
        return
    from lit_probattn.kernels.cpu.rows import rows_forward

    described, _alive = _describe(scores, block, masks, dropout)
    maps = scores.flatten(0, 1)
    rows_forward(described, [maps], maps)


@outside_graphs
def softmax_rows_backward(
    scores: Tensor,
    weights: Tensor,
    grad: Tensor,
    block: Block,
    masks: Masks,
    dropout: AttentionDropout | None,
) -> None:
    """Fill `weights` with the dropped weights and turn `grad`, theirs, into that of the scores.

    Args:
        scores: (B, H, n, l), contiguous, and so are `weights` and `grad`.
        weights: anything of this shape.
        grad: gradient of the dropped weights.
        block: as in forward, like the two below.
        masks: what each query may see.
        dropout: one decision per pair.
    """
    if only_shapes(scores):
        return
    from lit_probattn.kernels.cpu.rows import RowGrads, rows_backward

    described, _alive = _describe(scores, block, masks, dropout)
    flat = grad.flatten(0, 1)
    parts = [scores.flatten(0, 1)], weights.flatten(0, 1), flat
    rows_backward(described, *parts, RowGrads([flat]))


def _describe(
    scores: Tensor, block: Block, masks: Masks, dropout: AttentionDropout | None
) -> tuple[rows.Block, Tensor | None]:
    """Describe a block to the library, and return what must stay alive while it runs."""
    from lit_probattn.kernels.cpu import rows

    batch, heads, num_rows, num_keys = scores.shape
    found = rows.Block(
        heads=heads,
        first=0,
        count=batch * heads,
        row=block.rows.start,
        rows=num_rows,
        cols=num_keys,
        all_rows=masks.num_queries,
        all_cols=masks.num_keys,
        components=1,
        kind=rows.SOFT,
        causal=masks.is_causal,
        causal_offset=masks.causal_offset,
        masked=masks.has_pair_mask,
        dropped=dropout is not None,
    )
    if masks.attn_mask is not None:
        mask = masks.attn_mask
        found.pair_mask = mask.data_ptr()
        strides = zip(mask.shape, mask.stride(), strict=True)
        found.pair_strides[:] = [0 if size == 1 else stride for size, stride in strides]
    if masks.key_mask is not None:
        found.key_mask = masks.key_mask.data_ptr()
        found.key_stride = masks.key_mask.stride(0)
    if dropout is None:
        return found, None
    samples = dropout.key.samples(batch, torch.device("cpu"))
    found.samples = samples.data_ptr()
    found.k0, found.k1 = dropout.key.philox_key(STREAM_DROPOUT)
    found.threshold, found.scale = dropout.threshold, dropout.scale
    return found, samples
