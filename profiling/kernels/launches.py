"""How many launches one call takes: Triton kernels, torch operations in and around operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lit_probattn.kernels.operator import IMPLEMENTATIONS
from lit_probattn.kernels.runtime import recording
from lit_probattn.torch_internals import TorchDispatchMode

# What makes room or another view, and launches nothing.
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
        inside: torch operations inside our operators, by name.
        outside: torch operations around them: priors, variances, and their gradients.
    """

    kernels: list[str] = field(default_factory=list)
    inside: Counter[str] = field(default_factory=Counter)
    outside: Counter[str] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        """Launches of our operators."""
        return len(self.kernels) + self.inside.total()


class _Count(TorchDispatchMode):
    """Counts operations by name; what our operators do counts for itself."""

    def __init__(self, found: Launches, counter: Counter[str]) -> None:
        super().__init__()
        self.found, self.counter = found, counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        path = func.name().split(".")[0]
        run = IMPLEMENTATIONS.get(path)
        if run is not None:
            with _Count(self.found, self.found.inside):
                return run(*args)
        with self:  # to and reshape launch something only sometimes
            out = func.decompose(*args, **(kwargs or {}))
        if out is not NotImplemented:
            return out
        name = path.split("::")[1]
        if name not in _FREE:
            self.counter[name] += 1
        return func(*args, **(kwargs or {}))


def count_launches(run: Callable[[], object]) -> Launches:
    """Return the launches of a call, of which no Triton kernel runs; tensors are on any device."""
    found = Launches()
    with recording() as recorded, _Count(found, found.outside):
        run()
    found.kernels = [launched.kernel.__name__ for launched in recorded]
    return found
