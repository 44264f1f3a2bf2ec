"""The order in which optimisers receive the parameters of a module."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn import Parameter

from lit_probattn.attention import Attention


def ordered_parameters(module: nn.Module) -> dict[str, Parameter]:
    """Return every parameter once, by name, in the order in which optimisers receive them.

    It is the order of `module.parameters()`, except that a core's parameters precede the
    projections of its layer. Optimisers store their state by position, and clipping sums gradient
    norms in this order, so bit-exact resuming depends on it.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {names[id(parameter)]: parameter for parameter in _walk(module)}


def _walk(module: nn.Module) -> Iterator[Parameter]:
    if isinstance(module, Attention):
        yield from module.core.parameters(recurse=False)
    yield from module.parameters(recurse=False)
    for child in module.children():
        yield from _walk(child)
