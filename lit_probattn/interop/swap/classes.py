"""Classes that modules get at run time: calls of attention are taken, or weights have fewer rows.

A module keeps its name, its place, and the names of its parameters; copies and pickles find the
class again by the one that it was.
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
    """A class of a host with something mixed in."""

    host_class: type
    takes: bool
    narrowed: tuple[str, ...]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Name the class that it was: the mixed one is made at run time."""
        return _again, (self.host_class, self.takes, self.narrowed), self.__dict__


class Taken(Mixed):
    """A module whose calls of attention go to its cores."""

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
    """The rows of a parameter that are kept.

    Args:
        axis: of the parameter.
        size: rows that the host sees.
        runs: rows that are kept one after the other: the first, and how many.
    """

    axis: int
    size: int
    runs: tuple[tuple[int, int], ...]

    def spread(self, small: Tensor, axis: int) -> Tensor:
        """Return a tensor with zeros where rows were dropped."""
        parts, place, at = [], 0, 0
        for start, count in (*self.runs, (self.size, 0)):
            shape = [*small.shape]
            shape[axis] = start - place
            parts += [small.new_zeros(shape), small.narrow(axis, at, count)]
            place, at = start + count, at + count
        return torch.cat(parts, axis)

    def pick(self, full: Tensor, axis: int) -> Tensor:
        """Return the rows that are kept."""
        return torch.cat([full.narrow(axis, start, count) for start, count in self.runs], axis)

    @property
    def rows(self) -> list[int]:
        """The rows that are kept."""
        return [row for start, count in self.runs for row in range(start, start + count)]


class Narrow(Mixed):
    """A linear layer of which some outputs are zero, or some inputs do not matter."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, C) to (…, C'), by the rows or columns that are kept."""
        layer: Any = self
        weight: Any = nn.Module.__getattr__(layer, "weight")
        kept: Kept = layer.kept["weight"]
        if kept.axis == 1:
            return F.linear(kept.pick(x, x.dim() - 1), weight, layer.bias)
        bias: Any = None if layer.bias is None else nn.Module.__getattr__(layer, "bias")
        return kept.spread(F.linear(x, weight, bias), x.dim() - 1)


def _whole(name: str) -> property:
    """Return a parameter with all of its rows, of which those that are not kept are zeros."""

    def whole(self: Any) -> Tensor:
        small: Any = nn.Module.__getattr__(self, name)
        kept: Kept = self.kept[name]
        return kept.spread(small, kept.axis)

    return property(whole)


@cache
def mixed(host: type, takes: bool, narrowed: tuple[str, ...]) -> type:
    """Return a class of the same name with what is asked mixed in."""
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
    """Let the calls of attention of a module go to its `cores`."""
    cls: Any = type(module)
    module.__class__ = mixed(getattr(cls, "host_class", cls), True, getattr(cls, "narrowed", ()))


def keep_rows(module: Any, name: str, axis: int, rows: list[int]) -> None:
    """Keep only some rows of a parameter; the module sees zeros in the place of the others."""
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
    """Return a parameter by its name below a module, with the rows that it keeps."""
    path, _, own = name.rpartition(".")
    held: Any = nn.Module.__getattr__(module.get_submodule(path), own)
    assert isinstance(held, torch.Tensor)
    return held
