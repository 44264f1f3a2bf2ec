"""Attention block by block with the rows of a block in C."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lit_probattn.attention.call import HeadCall
from lit_probattn.attention.engines.blocks import by_blocks
from lit_probattn.attention.functional import repeat_heads
from lit_probattn.attention.rowpass.attention import row_attention
from lit_probattn.attention.variant import MapFunction, Scores
from lit_probattn.base.memory import is_predicting
from lit_probattn.base.torch_internals import constant_in_graphs


def by_rows(call: HeadCall, scores: Scores) -> Tensor:
    """Block by block, gradients by hand, the rows of a block in C."""
    noise = scores.noise
    if isinstance(scores.reduce, MapFunction) or (noise is not None and noise.per_head):
        return by_blocks(call, scores, native=True)
    heads = call.value.shape[1] if scores.shares_maps else scores.query.shape[1]
    coef, col = scores.coef, scores.col
    return row_attention(
        *(scores.query * scores.scale, scores.key, call.value, call.masks, call.dropout),
        coef=None if coef is None else repeat_heads(coef[None], heads)[0],
        row=scores.row,
        col=None if col is None else repeat_heads(col, heads),
        reduction=scores.reduce,
        noise_scale=None if noise is None else noise.scale,
        draws=None if noise is None else noise.draws,
    )


def missing_library(call: HeadCall, variant: Any) -> str | None:
    """Where the rows of blocks that PyTorch scores are in C, no operator of a graph holds them."""
    if call.graph == "compiled" and variant.needs().keys() & {"function", "head noise"}:
        return "cannot be compiled: its scores are no operator of a graph"
    return native_refusal(call.device)


@constant_in_graphs
def native_refusal(device: str) -> str | None:
    """Return why the C library cannot serve tensors on a device ("cannot …"), or None if it can."""
    if device != "cpu":
        return f"cannot run on {device}: it is for the CPU"
    if is_predicting():  # nothing would run: nothing is compiled and tested
        from lit_probattn.kernels.cpu.library import obstacle

        return obstacle()
    from lit_probattn.kernels.cpu.selftest import failure

    return failure()
