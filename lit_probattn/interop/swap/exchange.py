"""Projections of known classes that are exchanged: keys of several components need new widths."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_probattn.interop.swap.hosts.base import Host, Place, replace_everywhere
from lit_probattn.interop.swap.plan import Planned
from lit_probattn.interop.swap.recipe import RecipeLayer
from lit_probattn.interop.swap.report import LayerReport
from lit_probattn.interop.swap.settings import Settings
from lit_probattn.interop.weights import HeadWeights, group_heads, merge_heads, widen_keys


@torch.no_grad()
def convert(
    planned: list[Planned], settings: Settings, recipe: Mapping[str, RecipeLayer] | None
) -> tuple[list[HeadWeights], dict[str, list[list[int]] | None]]:
    """Return the new weights of every layer, in its dtype; the model is only read."""
    made: list[HeadWeights] = []
    groups: dict[str, list[list[int]] | None] = {}
    for index, plan in enumerate(planned):
        weights = plan.host.read(plan.place, plan.sizes)
        dtype = first_weight(plan.place).dtype
        size, name = settings.group_size, plan.place.name
        groups[name] = None
        if size > 1:
            joined = group_heads(weights, size) if recipe is None else recipe[name].groups
            assert joined is not None  # a recipe with fewer heads was checked for it
            weights, groups[name] = merge_heads(weights, joined, plan.sizes.rotary), joined
        times = settings.keys_per_head // size
        seed = settings.seed * 100_003 + index
        made.append(widen_keys(weights, times, settings.spread, seed).to(dtype))
    return made, groups


@torch.no_grad()
def exchange(
    model: nn.Module, planned: list[Planned], made: list[HeadWeights], settings: Settings
) -> dict[str, LayerReport]:
    """Exchange all layers; return what became of each."""
    before = [_measure(plan.host, plan.place) for plan in planned]
    counts = [_count(plan.host, plan.place) for plan in planned]
    places = []
    for plan, weights in zip(planned, made, strict=True):
        core = plan.core.to(first_weight(plan.place).device, first_weight(plan.place).dtype)
        owned = plan.host.owned(plan.place)
        core.requires_grad_(any(p.requires_grad for m in owned for p in m.parameters()))
        new = plan.host.put(plan.place, weights, core, settings)
        module = plan.place.module if new is None else new
        if new is not None:
            replace_everywhere(model, plan.place.module, new)
        places.append(Place(plan.place.name, module, plan.place.parent, model))
    for host in {plan.host for plan in planned}:
        host.finish(model)
    done = {}
    for plan, place, old, count, weights in zip(planned, places, before, counts, made, strict=True):
        error, note = _error(old, _measure(plan.host, place))
        s, layout = plan.sizes, plan.core.layout
        components, bytes_each = settings.components, first_weight(place).element_size()
        done[place.name] = LayerReport(
            name=place.name,
            kind=type(plan.place.module).__name__,
            action="swapped",
            heads=(s.num_heads, layout.out),
            kv_heads=(s.num_kv_heads, layout.key),
            components=(1, components),
            parameters=(count, _count(plan.host, place)),
            cache_bytes=(
                s.num_kv_heads * (s.head_dim + s.value_head_dim) * bytes_each,
                layout.key * (layout.keys_per_head * s.head_dim + s.value_head_dim) * bytes_each,
            ),
            error=error,
            groups=weights.groups,
            note=note,
        )
    return done


def first_weight(place: Place) -> Tensor:
    """Return a weight of a layer, for its device and dtype."""
    return next(place.module.parameters())


def _count(host: Host, place: Place) -> int:
    owned = {id(p): p.numel() for m in host.owned(place) for p in m.parameters()}
    return sum(owned.values())


def _measure(host: Host, place: Place) -> Tensor | str:
    """Return what a layer makes of a random input in evaluation, or why it cannot be asked."""
    if first_weight(place).device.type == "meta":
        return "not measured: no weights"
    with _evaluation(*host.owned(place)):
        return host.probe(place).double()


def _error(old: Tensor | str, new: Tensor | str) -> tuple[float | None, str]:
    if isinstance(old, str) or isinstance(new, str):
        return None, str(old)
    return float((new - old).norm() / old.norm()), ""


@contextmanager
def _evaluation(*modules: nn.Module) -> Any:
    """Switch modules to evaluation for a while."""
    every = [m for module in modules for m in module.modules()]
    modes = [m.training for m in every]
    for m in every:
        m.training = False
    try:
        yield
    finally:
        for m, mode in zip(every, modes, strict=True):
            m.training = mode
