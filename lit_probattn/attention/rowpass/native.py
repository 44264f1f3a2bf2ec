"""The pass over rows in C, as `attention/rowpass` calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lit_probattn.attention.rowpass.terms import Place, RowGrads, RowTerms
from lit_probattn.base.memory import only_shapes
from lit_probattn.base.torch_internals import outside_graphs
from lit_probattn.randomness import STREAM_DROPOUT

if TYPE_CHECKING:
    from lit_probattn.kernels.cpu.rows import Block


@outside_graphs
def rows_forward(terms: RowTerms, place: Place, maps: Sequence[Tensor], out: Tensor) -> None:
    """Write the dropped weights into `out`, (count, n, l), which may be the first map.

    float32 and float64 on the CPU; a graph of torch.compile breaks here.
    """
    if only_shapes(out):  # the library writes in place
        return
    from lit_probattn.kernels.cpu import rows as native

    native.rows_forward(_block(terms, place), maps, out)


@outside_graphs
def rows_backward(
    terms: RowTerms,
    place: Place,
    maps: Sequence[Tensor],
    weights: Tensor,
    grad: Tensor,
    wanted: RowGrads,
) -> None:
    """Fill `weights` with the dropped weights and turn `grad` into the gradient of l."""
    from lit_probattn.kernels.cpu import rows as native

    count, rows, cols = place.shape
    found = native.RowGrads(wanted.maps)
    components = terms.num_components
    if wanted.row is not None:
        found.row_terms = grad.new_empty(count, rows, components)
    if wanted.col is not None:
        threads = torch.get_num_threads()
        found.col_terms = grad.new_zeros(threads, count, components, cols)
    if terms.coef is not None:
        found.coef = grad.new_empty(count, rows, components)
    if not only_shapes(grad):
        native.rows_backward(_block(terms, place), maps, weights, grad, found)
    if wanted.row is not None and found.row_terms is not None:
        wanted.row.copy_(found.row_terms)
    if wanted.col is not None and found.col_terms is not None:
        torch.sum(found.col_terms, 0, out=wanted.col)
    if wanted.coef is not None and found.coef is not None:
        torch.sum(found.coef, 1, out=wanted.coef)


def _block(terms: RowTerms, place: Place) -> Block:
    """Describe a block to the library; every tensor stays alive through `terms`."""
    from lit_probattn.kernels.cpu import rows as native

    kinds = {"soft": native.SOFT, "hard": native.HARD, "sum": native.SUM}
    masks, dropout = terms.masks, terms.dropout
    count, rows, cols = place.shape
    block = native.Block(
        heads=terms.num_heads,
        first=place.first,
        count=count,
        row=place.rows.start,
        rows=rows,
        cols=cols,
        all_rows=masks.num_queries,
        all_cols=masks.num_keys,
        components=terms.num_components,
        kind=kinds[terms.reduction],
        shared=terms.shared,
        common=terms.common,
        causal=masks.is_causal,
        causal_offset=masks.causal_offset,
        masked=masks.has_pair_mask or masks.bias is not None,
        dropped=dropout is not None,
    )
    for name, tensor in (("coef", terms.coef), ("row_terms", terms.row), ("col_terms", terms.col)):
        if tensor is not None:
            setattr(block, name, tensor.data_ptr())
    for name, tensor in (("bias", masks.bias), ("pair_mask", masks.attn_mask)):
        if tensor is not None:
            setattr(block, name, tensor.data_ptr())
            strides = [
                0 if n == 1 else s for n, s in zip(tensor.shape, tensor.stride(), strict=True)
            ]
            getattr(block, name.removesuffix("_mask") + "_strides")[:] = strides
    if masks.key_mask is not None:
        block.key_mask = masks.key_mask.data_ptr()
        block.key_stride = masks.key_mask.stride(0)
    if dropout is not None and terms.samples is not None:
        block.samples = terms.samples.data_ptr()
        block.k0, block.k1 = dropout.key.philox_key(STREAM_DROPOUT)
        block.threshold, block.scale = dropout.threshold, dropout.scale
    return block
