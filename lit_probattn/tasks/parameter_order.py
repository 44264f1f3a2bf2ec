"""The order in which optimisers are given the parameters of a module."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn import Parameter

from lit_probattn.attention import Attention


def ordered_parameters(module: nn.Module) -> dict[str, Parameter]:
    """Return every parameter once, by name, in the order in which optimisers are given them.

    It is the order of `module.parameters()`, but what a core owns itself stands before its layer's
    projections. Optimisers keep their state by position, and clipping sums the norms of gradients
    in this order, so checkpoints continue to the last bit only while it stays as it is.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {names[id(parameter)]: parameter for parameter in _walk(module)}


def _walk(module: nn.Module) -> Iterator[Parameter]:
    if isinstance(module, Attention):
        yield from module.core.parameters(recurse=False)
    yield from module.parameters(recurse=False)
    for child in module.children():
        yield from _walk(child)
