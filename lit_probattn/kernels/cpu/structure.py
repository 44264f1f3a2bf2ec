"""Structures that describe calls of the C library."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

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
