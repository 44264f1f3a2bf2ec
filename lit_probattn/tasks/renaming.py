"""Checkpoints of before cores had names of their own: names and order brought to today's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lit_probattn.attention import Attention


def core_names(module: nn.Module) -> dict[str, str]:
    """Return names without the core's, as old state dicts have them, with today's: old -> new."""
    found: dict[str, str] = {}
    for prefix, layer in module.named_modules():
        if isinstance(layer, Attention):
            start = f"{prefix}." if prefix else ""
            found |= {f"{start}{name}": f"{start}core.{name}" for name in layer.core.state_dict()}
    return found


def rename_checkpoint(
    checkpoint: dict[str, Any], module: nn.Module, make_optimizer: Callable[[], Optimizer]
) -> None:
    """Rename weights and bring the optimiser's state to today's order of parameters, in place.

    Optimisers keep their state by the position of a parameter in its group. What cores own stood
    before or among the projections and stands after them now; the old order is that of the
    checkpoint's own state dict. States that are kept by name are renamed. A checkpoint with today's
    names is left alone.

    Args:
        checkpoint: with `state_dict` and `optimizer_states`.
        module: what the weights belong to.
        make_optimizer: makes an optimiser of that module, for its groups.
    """
    state: dict[str, Tensor] = checkpoint.get("state_dict", {})
    renamed = {old: new for old, new in core_names(module).items() if old in state}
    if not renamed:
        return
    state = {renamed.get(name, name): value for name, value in state.items()}
    checkpoint["state_dict"] = state
    order = {name: position for position, name in enumerate(state)}
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for stored in checkpoint.get("optimizer_states", []):
        if all(isinstance(key, int) for key in stored["state"]):
            groups = [[names[id(p)] for p in g["params"]] for g in make_optimizer().param_groups]
            stored["state"] = _reordered(stored, groups, order)
            continue
        stored["state"] = {renamed.get(k, k): v for k, v in stored["state"].items()}
        for group in stored["param_groups"]:
            group["params"] = [renamed.get(name, name) for name in group["params"]]


def _reordered(
    stored: dict[str, Any], groups: list[list[str]], order: dict[str, int]
) -> dict[int, Any]:
    """Return the state of each parameter under its position in today's groups.

    Raises:
        ValueError: the groups have other sizes.
    """
    sizes = [len(group["params"]) for group in stored["param_groups"]]
    if sizes != [len(group) for group in groups]:
        raise ValueError(
            f"the checkpoint's optimiser has groups of {sizes} parameters, this model "
            f"{[len(group) for group in groups]}: it belongs to another configuration"
        )
    found = {}
    for group, kept in zip(groups, stored["param_groups"], strict=True):
        before = sorted(group, key=order.__getitem__)
        positions = dict(zip(before, kept["params"], strict=True))
        for name, position in zip(group, kept["params"], strict=True):
            if positions[name] in stored["state"]:
                found[position] = stored["state"][positions[name]]
    return found
