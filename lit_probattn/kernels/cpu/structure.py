"""Calls of the C library: structures that describe them, and their gradients."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor

from lit_probattn.base.graphs import once_differentiable, written
from lit_probattn.base.torch_internals import is_batched_gradient
from lit_probattn.kernels.operator import define_operators

# Components, maps, hidden units, and heads with layers; positions of a tile or a chunk: constants
# of vectors.h.
MOST, TALL = 16, 48


def numbers(names: str) -> list[tuple[str, Any]]:
    """Return fields of integers, names separated by blanks."""
    return [(name, ctypes.c_int64) for name in names.split()]


def reals(names: str) -> list[tuple[str, Any]]:
    """Return fields of floating-point numbers."""
    return [(name, ctypes.c_double) for name in names.split()]


def pointers(names: str) -> list[tuple[str, Any]]:
    """Return fields of addresses."""
    return [(name, ctypes.c_void_p) for name in names.split()]


def strides(names: str) -> list[tuple[str, Any]]:
    """Return fields `<name>_strides` from words `<name>:<count>`."""
    found = []
    for name, count in (part.split(":") for part in names.split()):
        found.append((f"{name}_strides", ctypes.c_int64 * int(count)))
    return found


class Block(ctypes.Structure):
    """Description of a call that C code reads; keeps the tensors whose addresses it contains."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.tensors: list[Tensor] = []

    def put(self, name: str, tensor: Tensor) -> None:
        """Set the address of a tensor, and its strides if C code reads them.

        Raises:
            NotImplementedError: the tensor has no memory, as a DTensor.
        """
        address = tensor.data_ptr()
        if not address and tensor.numel():
            raise NotImplementedError(
                f"the C library cannot read {name}: a {type(tensor).__name__} has no memory; pass "
                "plain tensors (of a DTensor: to_local), or use backend='reference'"
            )
        self.tensors.append(tensor)
        setattr(self, name, address)
        found = getattr(self, f"{name}_strides", None)
        if found is not None:
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            found[:] = [0 if n == 1 else s for n, s in steps][: len(found)]

    def read(self, name: str, tensor: Tensor | None) -> None:
        """Put an input, copied if dimensions whose strides C code does not read are not dense."""
        if tensor is None:
            return
        num_strides = len(getattr(self, f"{name}_strides", ()))
        is_row = num_strides == tensor.dim() - 1 and tensor.stride(-1) == 1
        dense = num_strides == tensor.dim() or is_row
        self.put(name, tensor if dense else tensor.contiguous())


def define(
    name: str,
    inputs: type[Any],
    forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[[Any, Tensor, Tensor, Tensor, Sequence[str]], tuple[Tensor, ...]],
    new_outputs: Callable[[Any], tuple[Tensor, ...]],
    gradients: tuple[str, ...],
) -> Callable[[Any], Tensor]:
    """Return a function of `inputs` with explicit gradients; in graphs it is `lit_probattn::name`.

    Args:
        name: name of the operator.
        inputs: a NamedTuple of the arguments, tensors first.
        forward: returns the result and what backward needs besides the inputs; may take whether
            there is a backward pass.
        backward: takes inputs, gradient, result, what `forward` kept, and the names of gradients
            that are not needed; returns those of `gradients`.
        new_outputs: returns buffers for what `forward` returns.
        gradients: names of the inputs that have gradients.
    """
    kinds = get_type_hints(inputs).values()
    num_tensors = sum(kind in (Tensor, Tensor | None) for kind in kinds)
    operator = define_operators(
        (name, f"{name}_backward"),
        inputs,
        forward,
        backward,
        new_outputs=new_outputs,
        gradients=gradients,
        optional=tuple((name,) for name in gradients),
        flops=None,
        keep_strides=True,
        dtype=None,
    )

    class Differentiated(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensor:
            out, kept = forward(inputs(*args), any(ctx.needs_input_grad))
            ctx.switches = args[num_tensors:]
            ctx.save_for_backward(out, kept, *args[:num_tensors])
            return out

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            if is_batched_gradient(grad):
                raise NotImplementedError(
                    "is_grads_batched=True: this attention backend computes one gradient at a "
                    'time; use backend="reference"'
                )
            out, kept, *tensors = ctx.saved_tensors
            needs = dict(zip(inputs._fields, ctx.needs_input_grad, strict=True))
            skipped = [name for name in gradients if not needs[name]]
            found = backward(inputs(*tensors, *ctx.switches), grad, out, kept, skipped)
            made = {n: x for n, x in zip(gradients, found, strict=True) if needs[n]}
            return tuple(made.get(name) for name in inputs._fields)

    apply: Callable[..., Tensor] = Differentiated.apply
    return lambda call: operator(*call)[0] if written() == "compiled" else apply(*call)
