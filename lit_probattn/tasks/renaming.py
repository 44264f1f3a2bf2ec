"""Checkpoints written before cores had names: renamed weights, and the order of the optimiser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from lit_probattn.attention import Attention


def core_names(module: nn.Module) -> dict[str, str]:
    """Return names without the core's, as old state dicts have them, with today's: old -> new."""
    found: dict[str, str] = {}
    for prefix, layer in module.named_modules():
        if isinstance(layer, Attention):
            start = f"{prefix}." if prefix else ""
            found |= {f"{start}{name}": f"{start}core.{name}" for name in layer.core.state_dict()}
    return found


def ordered_parameters(module: nn.Module) -> dict[str, Parameter]:
    """Return every parameter once, by name, in the order in which optimisers are given them.

    It is the order of `module.parameters()`, but what a core owns itself stands before its layer's
    projections, as it did when layers owned it. Optimisers keep their state by position, so old
    checkpoints go on fitting; and clipping sums the norms of gradients in this order, so a run goes
    on to the last bit.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {names[id(parameter)]: parameter for parameter in _walk(module)}


def _walk(module: nn.Module) -> Iterator[Parameter]:
    if isinstance(module, Attention):
        yield from module.core.parameters(recurse=False)
    yield from module.parameters(recurse=False)
    for child in module.children():
        yield from _walk(child)


def rename_checkpoint(checkpoint: dict[str, Any], module: nn.Module) -> None:
    """Rename weights, and states of the optimiser that are kept by name, in place.

    States that are kept by position fit as they are, see `ordered_parameters`. A checkpoint with
    today's names is left alone.
    """
    state: dict[str, Tensor] = checkpoint.get("state_dict", {})
    renamed = {old: new for old, new in core_names(module).items() if old in state}
    if not renamed:
        return
    checkpoint["state_dict"] = {renamed.get(name, name): value for name, value in state.items()}
    for stored in checkpoint.get("optimizer_states", []):
        stored["state"] = {renamed.get(key, key): value for key, value in stored["state"].items()}
        for group in stored["param_groups"]:
            group["params"] = [renamed.get(name, name) for name in group["params"]]
