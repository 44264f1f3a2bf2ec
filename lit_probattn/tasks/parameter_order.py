"""The order in which optimisers receive the parameters of a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


def groups_of_bert(module: nn.Module) -> list[dict[str, Any]]:
    """Return parameter groups of an optimiser: biases and layer norms have no weight decay.

    Source: BERT (Devlin et al., 2019), `optimization.py` of its code.
    """
    named = ordered_parameters(module)
    norms = {
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        if isinstance(part, nn.LayerNorm)
        for name, _ in part.named_parameters(recurse=False)
    }
    undecayed = {name for name in named if name in norms or name.rpartition(".")[2] == "bias"}
    return [
        {"params": [p for name, p in named.items() if name not in undecayed]},
        {"params": [p for name, p in named.items() if name in undecayed], "weight_decay": 0.0},
    ]


def _walk(module: nn.Module) -> Iterator[Parameter]:
    if isinstance(module, Attention):
        yield from module.core.parameters(recurse=False)
    yield from module.parameters(recurse=False)
    for child in module.children():
        yield from _walk(child)
