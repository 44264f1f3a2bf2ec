"""Types and shapes in Triton's interpreter are made once, which saves a third of its time.

The interpreter runs the compiler's front end for every operation of every program, and most of its
time goes into descriptions of shapes and types that it has made thousands of times before.
`profiling.kernels.triton_internals` removes other unused work. If a version of Triton lacks a
member that is used here, it is left as it is.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any


def remember_types() -> None:
    """Have the interpreter make each shape and each NumPy type once in this process."""
    for owner, name, remembering in members():
        plain = vars(owner)[name]
        if not hasattr(plain, "__wrapped__"):
            setattr(owner, name, functools.wraps(plain)(remembering(plain)))


def members() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Return owner and name of each function that this Triton has, and what replaces it."""
    core: Any = importlib.import_module("triton.language.core")
    semantic: Any = importlib.import_module("triton.language.semantic")
    found = [
        (importlib.import_module("triton.runtime.interpreter"), "_get_np_dtype", _numpy_type),
        (core.block_type, "__init__", _block_type),
        (core.tensor, "__init__", _tensor),
        (core.dtype, "__eq__", _same_type),
        (getattr(semantic, "TritonSemantic", core.dtype), "broadcast_impl_value", _broadcast),
    ]
    return [member for member in found if member[1] in vars(member[0])]


def _numpy_type(plain: Any) -> Any:
    """Key the types by their names, which are unique: not every type is hashable."""
    found: dict[str, Any] = {}

    def numpy_type(dtype: Any) -> Any:
        if dtype.name not in found:
            found[dtype.name] = plain(dtype)
        return found[dtype.name]

    return numpy_type


def _block_type(plain: Any) -> Any:
    """Shape, number of elements and the shape's part of the name; shapes are never changed."""
    found: dict[tuple[int, ...], tuple[Any, int, str]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        if sizes not in found:
            plain(self, element_ty, shape)
            found[sizes] = self.shape, self.numel, str(self.shape)
        self.shape, self.numel, text = found[sizes]
        self.element_ty, self.name = element_ty, f"<{text}, {element_ty}>"

    return block_type


def _tensor(plain: Any) -> Any:
    """Shape and number of elements as constants."""
    found: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in found:
            plain(self, handle, type)
            found[sizes] = self.shape, self.numel
        self.shape, self.numel = found[sizes]
        self.handle, self.type, self.dtype = handle, type, type.scalar

    return tensor


def _same_type(plain: Any) -> Any:
    return lambda self, other: self is other or plain(self, other)


def _broadcast(plain: Any) -> Any:
    """Blocks of the same shape stay as they are."""

    def broadcast(self: Any, left: Any, right: Any) -> Any:
        both = left.type.is_block() and right.type.is_block()
        if both and tuple(left.type.shape) == tuple(right.type.shape):
            return left, right
        return plain(self, left, right)

    return broadcast
