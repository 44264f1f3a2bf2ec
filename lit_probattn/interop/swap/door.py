"""`swap`: the attention layers of a model become ours, in place, with their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lit_probattn.interop.swap.hosts.base import Host, Place, replace_everywhere
from lit_probattn.interop.swap.plan import (
    Planned,
    check_model,
    choose_layers,
    find_layers,
    plan_layers,
)
from lit_probattn.interop.swap.recipe import (
    RecipeLayer,
    check_layers,
    check_sizes,
    read_recipe,
    write_recipe,
)
from lit_probattn.interop.swap.report import LayerReport, Report
from lit_probattn.interop.swap.settings import Settings
from lit_probattn.interop.weights import HeadWeights, group_heads, merge_heads, widen_keys

Model = TypeVar("Model", bound=nn.Module)


@torch.no_grad()
def swap(
    model: Model,
    variant: str | Mapping[str, Any] = "mgk",
    *,
    heads: float = 1.0,
    num_components: int | None = None,
    score: str | None = None,
    spread: float = 0.1,
    layers: Sequence[str] | None = None,
    keep: Sequence[str] = (),
    seed: int = 0,
    **options: Any,
) -> tuple[Model, Report]:
    """Exchange the attention layers of a model of torch, timm or transformers, in place.

        model, report = lit_probattn.swap(model, "mgk", heads=0.5)
        print(report)

    Every layer is planned before one is touched: if one of them cannot be swapped, the model is
    left as it was. Do this before an optimiser is made and before the model is wrapped. A layer
    whose weights are all frozen stays frozen as a whole.

    With heads=1, score=dot, spread=0 and equal variances the model computes what it computed. With
    heads=1/K every K key heads become one head with K keys and one value, and the query heads with
    them: the most similar ones by their bilinear forms, their logits and values cut to the old head
    size with the least squared error in the weights. Such a model is where fine-tuning starts.

    Args:
        model: any module that holds attention layers.
        variant: `mgk`, `smgk` or `softmax`; or a recipe, `report.recipe`, which builds the same
            model again, so that `model.load_state_dict` fits. A recipe takes no other argument.
        heads: share of the heads that stays: 1, 1/2, 1/3, …
        num_components: K, a multiple of 1/heads. None means 2, or 1/heads where that is more.
        score: `dot`, which starts at the old scores, or `gaussian`, which does so only where all
            keys of a head have one norm. None means dot; gaussian for smgk.
        spread: how far components start apart, which were one key: standard deviation in units of
            that of the key's weights, 0.1 unless it is given; the error is of second order. Equal
            components (0) stay equal for ever. For smgk, the standard deviation of the shifts.
        layers: names or patterns (`encoder.layer.*.attention.self`) of the layers to swap. None
            means all.
        keep: names or patterns of layers to leave as they are.
        seed: of the differences between components.
        options: other arguments of the variant, such as `learn_variance=True` or `e_step="hard"`.

    Returns:
        The same model, and what was done to each layer.

    Raises:
        ValueError: an argument is unknown or does not fit; the model is wrapped for several
            processes or has no attention layers; or layers cannot be swapped, all of them named
            with the reason.
    """
    check_model(model)
    found = find_layers(model)
    recipe: dict[str, RecipeLayer] | None = None
    if isinstance(variant, Mapping):
        given = (heads, num_components, score, spread, layers, tuple(keep), seed, options)
        if given != (1.0, None, None, 0.1, None, (), 0, {}):
            raise ValueError("a recipe says everything: give no other argument beside it")
        settings, recipe = read_recipe(variant)
        check_layers(recipe, found)
        chosen, kept = choose_layers(found, list(recipe), ())
    else:
        settings = Settings(variant, heads, num_components, score, spread, seed, options)
        chosen, kept = choose_layers(found, layers, keep)
    planned = plan_layers(chosen, settings)
    if recipe is None and any(_first(plan.place).device.type == "meta" for plan in planned):
        raise ValueError("the model has no weights: give a recipe, or load them first")
    if recipe is not None:
        check_sizes(recipe, planned)
    state = torch.get_rng_state()
    try:
        made, groups = _convert(planned, settings, recipe)
        done = _exchange(model, planned, made, settings)
    finally:
        torch.set_rng_state(state)
    reports = []
    for each in found:
        name, kind = each.place.name, type(each.place.module).__name__
        reports.append(done.get(name) or LayerReport(name, kind, f"kept: {kept[name]}"))
    recipe_out = write_recipe(settings, planned, groups)
    return model, Report(reports, recipe_out, _summary(settings, reports))


def _convert(
    planned: list[Planned], settings: Settings, recipe: Mapping[str, RecipeLayer] | None
) -> tuple[list[HeadWeights], dict[str, list[list[int]] | None]]:
    """Return the new weights of every layer, in its dtype; the model is only read."""
    made: list[HeadWeights] = []
    groups: dict[str, list[list[int]] | None] = {}
    for index, plan in enumerate(planned):
        weights = plan.host.read(plan.place, plan.sizes)
        dtype = _first(plan.place).dtype
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


def _exchange(
    model: nn.Module, planned: list[Planned], made: list[HeadWeights], settings: Settings
) -> dict[str, LayerReport]:
    """Exchange all layers; return what became of each."""
    before = [_measure(plan.host, plan.place) for plan in planned]
    counts = [_count(plan.host, plan.place) for plan in planned]
    places = []
    for plan, weights in zip(planned, made, strict=True):
        core = plan.core.to(_first(plan.place).device, _first(plan.place).dtype)
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
        components, bytes_each = settings.components, _first(place).element_size()
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


def _first(place: Place) -> Tensor:
    return next(place.module.parameters())


def _count(host: Host, place: Place) -> int:
    owned = {id(p): p.numel() for m in host.owned(place) for p in m.parameters()}
    return sum(owned.values())


def _measure(host: Host, place: Place) -> Tensor | str:
    """Return what a layer makes of a random input in evaluation, or why it cannot be asked."""
    if _first(place).device.type == "meta":
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


def _summary(settings: Settings, reports: list[LayerReport]) -> list[str]:
    """Return what a reader of the table must know."""
    swapped = [r for r in reports if r.swapped]
    lines = [f"{len(swapped)} of {len(reports)} attention layers are {settings.variant} now:"]
    before, after = (sum(r.parameters[i] for r in swapped) for i in (0, 1))
    cache = [sum(r.cache_bytes[i] for r in swapped) for i in (0, 1)]
    lines.append(
        f"  parameters {before} -> {after}, keys and values of a token {cache[0]} -> {cache[1]} "
        "bytes"
    )
    if settings.chosen_score == "gaussian":
        lines.append("  score gaussian: starts at the old scores only where all keys have one norm")
    else:
        lines.append("  score dot: equal components compute what one key did")
    if settings.group_size > 1:
        lines.append(
            f"  {settings.group_size} heads became one: the most similar by their bilinear forms, "
            "cut with the least squared error in the weights; expect to fine-tune"
        )
    if settings.keys_per_head > settings.group_size and settings.spread:
        lines.append(
            f"  components start {settings.spread} apart, in standard deviations of the key's "
            "weights"
        )
    elif settings.keys_per_head > settings.group_size:
        lines.append("  components start equal (spread=0) and will stay so: for comparison only")
    return lines
