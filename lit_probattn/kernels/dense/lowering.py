"""The normal form of Gaussian keys as PyTorch operators: moved points and terms in one launch.

    s_ijr = τ_r query_i · (key_jr + b_r) + o_r [− τ_r ‖query_i‖² / 2 − τ_r ‖key_jr + b_r‖² / 2]

(brackets: gaussian), up to a constant per row, is τ_r query'_i · key'_jr + row_ir + col_jr,

    row_ir = τ_r query'_i · b_r [− (τ_r − τ_0) ‖query'_i‖² / 2]
    col_jr = o_r [− τ_r ‖key'_jr + b_r‖² / 2]

where gaussian points are translated by one vector per head and rounded: terms are computed from the
rounded points. Backward has one launch for points and one that sums over them, in a fixed order. It
reads moved points, which attention also saves, so the original points are not saved.

`MGK.terms` derives the same terms with PyTorch operations for the other engines. A common
derivation would compute the factors of q·b, ‖q‖² and ‖k + b‖² from τ in PyTorch: two more launches
in forward and seven in backward. The equation shares no code with either, because it is their
reference in tests.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_probattn.kernels.operator import define_operators, new_gradients
from lit_probattn.kernels.runtime import HeadRows, head_rows, launch, padded, unit_stride, unseen

_BLOCK = 64  # points per program


class PointInputs(NamedTuple):
    """The arguments of the operator.

    Args:
        query: (B, H, N, E).
        key: (B, H_key, K, L, E), or K = 1 if components share it; H_key divides H.
        numbers: τ_r, o_r and, with shifts, b_r, concatenated, (H_key, K, 2 or 2 + E), float32.
        equal_precision: whether τ is known to be the same for all components of a head.
    """

    query: Tensor
    key: Tensor
    numbers: Tensor
    gaussian: bool
    equal_precision: bool


class Side(NamedTuple):
    """Queries or keys as kernel arguments; counts are `unseen`.

    Args:
        given: input in forward; buffer of its gradient in backward.
        moved: output in forward, input in backward.
        grad: gradient of `moved`, in backward.
        terms: (B, heads, K, points), output in forward, their gradient in backward; None if they
            are 0.
    """

    given: HeadRows
    moved: HeadRows
    grad: HeadRows | None
    terms: Tensor | None
    num_points: int
    num_heads: int
    end: None = None  # see `runtime.Pairs`


class PointForm(NamedTuple):
    """Compile-time properties of the kernels."""

    components: int
    products: int
    gaussian: bool
    shifted: bool
    key_dim: int
    key_pad: int


def _side(given: Tensor, moved: Tensor, terms: Tensor | None, grad: Tensor | None = None) -> Side:
    rows = None if grad is None else head_rows(unit_stride(grad))
    sizes = unseen(given.shape[-2]), unseen(given.shape[1])
    terms = terms if terms is None or terms.dim() > 1 else None
    return Side(head_rows(given), head_rows(moved), rows, terms, *sizes)


def _form(x: PointInputs) -> tuple[PointForm, int]:
    """Return the compile-time properties, and the number of programs per key head."""
    (batch, heads, rows, width), (_, key_heads, products, keys, _) = x.query.shape, x.key.shape
    shifted = x.numbers.shape[2] > 2
    form = PointForm(x.numbers.shape[1], products, x.gaussian, shifted, width, padded(width))
    programs = heads // key_heads * math.ceil(rows / _BLOCK) + math.ceil(keys / _BLOCK)
    return form, batch * programs


def _new_outputs(x: PointInputs) -> tuple[Tensor, ...]:
    """Return buffers for query', key', row (empty if it is 0) and col."""
    batch, components = len(x.query), x.numbers.shape[1]
    varies = x.gaussian and not x.equal_precision and components > 1
    row = (batch, x.query.shape[1], components, x.query.shape[2])
    col = (batch, x.key.shape[1], components, x.key.shape[3])
    shapes = row if varies or x.numbers.shape[2] > 2 else (0,), col
    moved = new_gradients(x, ("query", "key"), keep_strides=True)
    return *moved, *(x.query.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _forward(x: PointInputs) -> tuple[Tensor, ...]:
    from lit_probattn.kernels.dense.lowering_kernels import terms_kernel

    query, key, row, col = outputs = _new_outputs(x)
    sides = _side(unit_stride(x.query), query, row), _side(unit_stride(x.key), key, col)
    form, programs = _form(x)
    launch(
        *(terms_kernel, x.key.shape[1] * programs, (*sides, x.numbers.contiguous())),
        {"form": form, "BLOCK": _BLOCK, "num_warps": 4},
    )
    return outputs


def _backward(x: PointInputs, *args: Any) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and numbers; `x` has the moved points."""
    from lit_probattn.kernels.dense.lowering_kernels import terms_backward_kernel

    *found, skipped = args
    grads = query, key, numbers = new_gradients(x, x._fields[:3], skipped, keep_strides=True)
    moved = [torch.zeros_like(a) if g is None else g for a, g in zip(x[:2], found[:2], strict=True)]
    row, col = (None if grad is None else grad.contiguous() for grad in found[2:])
    form, programs = _form(x)
    parts = None if skipped else numbers.new_empty(*x.numbers.shape, programs)
    sides = _side(query, x.query, row, moved[0]), _side(key, x.key, col, moved[1])
    launch(
        *(terms_backward_kernel, x.key.shape[1] * programs),
        (*sides, x.numbers.contiguous(), parts, unseen(programs)),
        {"form": form, "BLOCK": _BLOCK, "num_warps": 4},
    )
    if parts is not None:
        torch.sum(parts, -1, out=numbers)
    return grads


def _flops(x: Any, backward: bool) -> int:
    """Return products of shifts with queries, and keys if Gaussian; doubled in backward."""
    batch, heads, rows, width = x.query
    points = heads * rows + (x.key[1] * x.key[3] if x.gaussian else 0)
    found = 2 * batch * points * x.numbers[1] * width if x.numbers[2] > 2 else 0
    return 2 * found if backward else found


lower_points = define_operators(
    ("lower_points", "lower_points_backward"),
    PointInputs,
    _forward,
    _backward,
    new_outputs=_new_outputs,
    gradients=PointInputs._fields[:3],
    flops=_flops,
    optional=(("numbers",),),
    has_normaliser=False,
    num_outputs=4,
    keep_strides=True,
    outputs_for={"query": 0, "key": 1},
)
