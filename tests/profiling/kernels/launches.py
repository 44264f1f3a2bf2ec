"""Count the launches of a call: Triton kernels, torch operations inside and around operators.

Also count the bytes that they move, in Triton's interpreter: each kernel reads and writes each byte
once, as if data shared by several programs stayed in the cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor

from lit_probattn.base.torch_internals import TorchDispatchMode, outside_modes
from lit_probattn.kernels.operator import IMPLEMENTATIONS
from lit_probattn.kernels.runtime import recording

# Operations that only allocate or return a view, without a launch.
_FREE = {
    *("view", "_unsafe_view", "expand", "transpose", "detach", "alias", "unsqueeze", "select"),
    *("slice", "split", "t", "permute", "as_strided", "empty", "new_empty", "empty_like"),
    *("empty_strided", "new_empty_strided", "squeeze", "unbind", "unfold", "_reshape_alias"),
    "split_with_sizes",
}


@dataclass
class Launches:
    """Launches of one call.

    Args:
        kernels: names of Triton kernels, in order.
        inside: torch operations inside this package's operators, by name.
        outside: torch operations around them: priors, variances, and their gradients.
        torch_bytes: bytes that all torch operations read and write.
        kernel_bytes: bytes that each kernel reads and writes, in order; set by `count_bytes` only.
    """

    kernels: list[str] = field(default_factory=list)
    inside: Counter[str] = field(default_factory=Counter)
    outside: Counter[str] = field(default_factory=Counter)
    torch_bytes: int = 0
    kernel_bytes: list[int] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Number of bytes that the call moves."""
        return self.torch_bytes + sum(self.kernel_bytes)

    @property
    def count(self) -> int:
        """Number of launches of this package's operators."""
        return len(self.kernels) + self.inside.total()


class _Count(TorchDispatchMode):
    """Counts operations by name; this package's operators count those inside them separately."""

    def __init__(self, found: Launches, counter: Counter[str]) -> None:
        super().__init__()
        self.found, self.counter = found, counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        path = func.name().split(".")[0]
        run = IMPLEMENTATIONS.get(path)
        if run is not None:
            with _Count(self.found, self.found.inside):
                return run(*args)
        with self:  # to and reshape do not always launch a kernel
            out = func.decompose(*args, **(kwargs or {}))
        if out is not NotImplemented:
            return out
        name = path.split("::")[1]
        out = func(*args, **(kwargs or {}))
        if name not in _FREE:
            self.counter[name] += 1
            self.found.torch_bytes += _tensor_bytes(args) + _tensor_bytes(out)
        return out


def _tensor_bytes(x: Any) -> int:
    """Return the bytes of tensors; broadcast elements count once."""
    if isinstance(x, Tensor):
        pairs = zip(x.shape, x.stride(), strict=True)
        return x.element_size() * int(np.prod([size if stride else 1 for size, stride in pairs]))
    return sum(map(_tensor_bytes, x)) if isinstance(x, list | tuple) else 0


def count_launches(run: Callable[[], object]) -> Launches:
    """Return the launches of a call without running Triton kernels; works on any device."""
    found = Launches()
    with recording() as recorded, _Count(found, found.outside):
        run()
    found.kernels = [launched.kernel.__name__ for launched in recorded]
    return found


def count_bytes(run: Callable[[], object]) -> Launches:
    """Run a call in the interpreter; return its launches and the bytes that they move."""
    found = Launches()
    with _addresses(found), _Count(found, found.outside):
        run()
    return found


@contextmanager
def _addresses(found: Launches) -> Iterator[None]:
    """Record the distinct addresses that each launch in the interpreter loads and stores."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    execute = GridExecutor.__call__
    seen: dict[str, list[np.ndarray[Any, Any]]] = {}

    def note(kind: str, pointers: Any, mask: Any) -> None:
        size = pointers.get_element_ty().primitive_bitwidth // 8
        addresses = np.unique(pointers.data[np.broadcast_to(mask.data, pointers.data.shape)])
        seen.setdefault(f"{kind} {size}", []).append(addresses)

    def noted_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        note("load", ptrs, mask)
        return load(self, ptrs, mask, *rest)

    def noted_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        note("store", ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        seen.clear()
        with outside_modes():  # the interpreter copies its arguments
            execute(self, *args, **kwargs)
        sizes = {kind: len(np.unique(np.concatenate(found))) for kind, found in seen.items()}
        found.kernels.append(self.fn.__name__)
        found.kernel_bytes.append(sum(int(k.split()[1]) * count for k, count in sizes.items()))

    with (
        mock.patch.object(InterpreterBuilder, "create_masked_load", noted_load),
        mock.patch.object(InterpreterBuilder, "create_masked_store", noted_store),
        mock.patch.object(GridExecutor, "__call__", run),
    ):
        yield
