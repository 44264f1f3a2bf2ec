"""Classes that modules get at run time, which intercept attention or store fewer weight rows.

A module keeps its name, its position, and the names of its parameters; copies and pickles restore
the class from the original class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def first_tokens(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the first tensor (B, N, C) among the arguments of a module."""
    every = (*args, *kwargs.values())
    return next((x for x in every if isinstance(x, Tensor) and x.dim() == 3), None)


class Mixed:
    """Base of host classes with mixins."""

    host_class: type
    takes: bool
    narrowed: tuple[str, ...]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the original class: the mixed class is created at run time."""
        return _again, (self.host_class, self.takes, self.narrowed), self.__dict__


class Taken(Mixed):
    """A module whose attention calls are computed by its cores."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward."""
        cores: Any = self.cores  # type: ignore[attr-defined]
        calls = cores.mode(self)
        if cores.reads_tokens:
            cores.tokens = first_tokens(args, kwargs)
        with calls:
            out = super().forward(*args, **kwargs)  # type: ignore[misc]
        cores.tokens = None
        calls.finish()
        return out


@dataclass(frozen=True)
class Kept:
    """Stored rows of a parameter.

    Args:
        axis: axis of the parameter.
        size: number of rows of the full parameter.
        runs: runs of consecutive stored rows: first row and count.
    """

    axis: int
    size: int
    runs: tuple[tuple[int, int], ...]

    def spread(self, small: Tensor, axis: int) -> Tensor:
        """Return the full tensor, with zeros for dropped rows."""
        parts, place, at = [], 0, 0
        for start, count in (*self.runs, (self.size, 0)):
            shape = [*small.shape]
            shape[axis] = start - place
            parts += [small.new_zeros(shape), small.narrow(axis, at, count)]
            place, at = start + count, at + count
        return torch.cat(parts, axis)

    def pick(self, full: Tensor, axis: int) -> Tensor:
        """Return the stored rows."""
        return torch.cat([full.narrow(axis, start, count) for start, count in self.runs], axis)

    @property
    def rows(self) -> list[int]:
        """Indices of the stored rows."""
        return [row for start, count in self.runs for row in range(start, start + count)]


class Narrow(Mixed):
    """A linear layer some of whose outputs are zero, or some of whose inputs are ignored."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, C) to (…, C') by the stored rows or columns."""
        layer: Any = self
        weight: Any = nn.Module.__getattr__(layer, "weight")
        kept: Kept = layer.kept["weight"]
        if kept.axis == 1:
            return F.linear(kept.pick(x, x.dim() - 1), weight, layer.bias)
        bias: Any = None if layer.bias is None else nn.Module.__getattr__(layer, "bias")
        return kept.spread(F.linear(x, weight, bias), x.dim() - 1)


def _whole(name: str) -> property:
    """Return a property with all rows of a parameter, zero if not stored."""

    def whole(self: Any) -> Tensor:
        small: Any = nn.Module.__getattr__(self, name)
        kept: Kept = self.kept[name]
        return kept.spread(small, kept.axis)

    return property(whole)


@cache
def mixed(host: type, takes: bool, narrowed: tuple[str, ...]) -> type:
    """Return a class of the same name with the requested mixins."""
    bases: list[type] = [Taken] if takes else []
    if "weight" in narrowed and getattr(host, "forward", None) is nn.Linear.forward:
        bases.append(Narrow)
    own = {"__module__": host.__module__, "host_class": host, "takes": takes, "narrowed": narrowed}
    wholes = {name: _whole(name) for name in narrowed}
    return type(host)(host.__name__, (*(bases or [Mixed]), host), {**own, **wholes})


def _again(host: type, takes: bool, narrowed: tuple[str, ...]) -> Any:
    made: Any = mixed(host, takes, narrowed)
    return made.__new__(made)


def take_calls(module: Any) -> None:
    """Route the attention calls of a module to its `cores`."""
    cls: Any = type(module)
    module.__class__ = mixed(getattr(cls, "host_class", cls), True, getattr(cls, "narrowed", ()))


def keep_rows(module: Any, name: str, axis: int, rows: list[int]) -> None:
    """Store only some rows of a parameter; the module reads zeros for the others."""
    cls: Any = type(module)
    full: Tensor = getattr(module, name)
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and sum(runs[-1]) == row:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((row, 1))
    kept = Kept(axis, full.shape[axis], tuple(runs))
    small = kept.pick(full.detach(), axis).contiguous()
    setattr(module, name, nn.Parameter(small, full.requires_grad))
    module.kept = {**getattr(module, "kept", {}), name: kept}
    names = tuple(module.kept)
    module.__class__ = mixed(getattr(cls, "host_class", cls), getattr(cls, "takes", False), names)


def parameter_of(module: nn.Module, name: str) -> Tensor:
    """Return a parameter by its name below a module, with its stored rows only.

    Raises:
        RuntimeError: its layer was wrapped or replaced after the swap.
    """
    path, _, own = name.rpartition(".")
    holder: Any = module.get_submodule(path)
    try:
        held: Any = nn.Module.__getattr__(holder, own)
    except AttributeError:
        held = None
    kept: Kept | None = getattr(holder, "kept", {}).get(own)
    if not isinstance(held, Tensor) or (
        kept is not None and held.shape[kept.axis] != sum(count for _, count in kept.runs)
    ):
        kind = type(holder)
        raise RuntimeError(
            f"{path or type(module).__name__} was wrapped or replaced after the swap, which had "
            f"changed the rows of its {own} (now: {kind.__module__}.{kind.__name__}): adapters and "
            "quantisation must leave it out, or come before the swap and be merged"
        )
    return held
