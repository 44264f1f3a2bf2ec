"""Whether PyTorch records a graph of a call, transforms it, or differentiates it twice."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor

from lit_probattn.base.torch_internals import (
    is_batched_gradient,
    is_exporting,
    is_proxied,
    is_transformed,
)

__all__ = [
    "NO_SECOND_DERIVATIVE",
    "Graph",
    "fixed_sizes",
    "is_symbol",
    "is_transformed",
    "once_differentiable",
    "reject_nested",
    "reject_second_derivative",
    "reject_several_gradients",
    "written",
]

# Kind of recording: torch.compile, whose graphs may contain operators of this package; or export,
# ONNX, torch.jit.trace and make_fx, whose programs contain only PyTorch's operators.
Graph = Literal["compiled", "exported"]

_FIXED: ContextVar[bool] = ContextVar("fixed_sizes", default=False)
_Backward = Callable[..., Any]
NO_SECOND_DERIVATIVE = (
    'create_graph=True: this attention backend has no second derivative; use backend="reference"'
)


def written() -> Graph | None:
    """Return how the operations of this call are recorded into a graph, or None.

    Code outside of operators is then missing from the graph, or a constant in it.
    """
    if is_exporting() or torch.jit.is_tracing():
        return "exported"
    if torch.compiler.is_compiling():
        return "compiled"
    return "exported" if is_proxied() else None


def is_symbol(size: int) -> bool:
    """Return whether a size is dynamic in an exported program, so not a Python number.

    `torch.jit.trace` records sizes as tensors, which are dynamic outside of `fixed_sizes`.
    """
    return isinstance(size, torch.SymInt) or (isinstance(size, Tensor) and not _FIXED.get())


@contextlib.contextmanager
def fixed_sizes() -> Iterator[None]:
    """Trace for the sizes of the inputs only, as counters of operations do."""
    token = _FIXED.set(True)
    try:
        yield
    finally:
        _FIXED.reset(token)


def once_differentiable(backward: _Backward) -> _Backward:
    """Reject `create_graph=True` in the backward of an `autograd.Function`.

    PyTorch's decorator of this name detaches instead, and raises only where the second derivative
    reaches an input that `torch.autograd.grad` did not skip: others are silently wrong.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor) -> Any:
        reject_second_derivative()
        with torch.no_grad():
            return backward(ctx, *grads)

    return run


def reject_second_derivative() -> None:
    """Raise if a backward pass is differentiated; for code that computes gradients.

    Raises:
        NotImplementedError: the backward pass runs with `create_graph=True`.
    """
    if torch.is_grad_enabled() and written() is None:
        raise NotImplementedError(NO_SECOND_DERIVATIVE)


def reject_several_gradients(*grads: Tensor | None) -> None:
    """Raise if a backward pass gets several gradients at once; for code that adds in place.

    Raises:
        NotImplementedError: the backward pass runs with `is_grads_batched=True`.
    """
    if written() is None and any(g is not None and is_batched_gradient(g) for g in grads):
        raise NotImplementedError(
            "is_grads_batched=True (vectorize=True): this attention backend computes one gradient "
            'at a time; use backend="reference"'
        )


def reject_nested(name: str, tensor: Tensor) -> None:
    """Raise for nested (jagged) tensors.

    Raises:
        NotImplementedError: the tensor is nested.
    """
    if tensor.is_nested:
        raise NotImplementedError(
            f"{name} is a nested tensor, which attention does not support: pad it "
            "(torch.nested.to_padded_tensor) and pass key_mask, True where a token is real"
        )
