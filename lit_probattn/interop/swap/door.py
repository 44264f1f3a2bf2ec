"""`swap`: the attention layers of a model become ours, in place, with their weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from lit_probattn.attention import Attention
from lit_probattn.interop.swap.discovery.example import Example, runner
from lit_probattn.interop.swap.placing import (
    Placing,
    change_projections,
    find_sites,
    place,
    plan_sites,
    prepared,
    report,
    run_of_multihead,
    sites_of_recipe,
)
from lit_probattn.interop.swap.plan import check_model, check_patterns
from lit_probattn.interop.swap.recipe import (
    RecipeLayer,
    check_layers,
    read_recipe,
    write_recipe,
)
from lit_probattn.interop.swap.report import LayerReport, Report
from lit_probattn.interop.swap.settings import Settings

Model = TypeVar("Model", bound=nn.Module)


def swap(
    model: Model,
    variant: str | Mapping[str, Any] | Callable[..., Attention] = "mgk",
    *,
    example: Any = None,
    heads: float = 1.0,
    num_components: int | None = None,
    score: str | None = None,
    spread: float = 0.1,
    layers: Sequence[str] | None = None,
    keep: Sequence[str] = (),
    seed: int = 0,
    written_out: bool = False,
    **options: Any,
) -> tuple[Model, Report]:
    """Let the attention of a model be a variant of this package, in place.

        model, report = lit_probattn.swap(model, "smgk")
        model, report = lit_probattn.swap(model, "mgk", heads=0.5)
        print(report)

    Where a model computes softmax(Q Kᵀ) V is found by one run of an example. A variant with the
    host's heads is put there, as `cores` of the module that makes the call, and all weights stay
    what they were. Several keys per head and fewer heads change the projections, whose rows are
    found by gradients: widths are exchanged where a second run shows the new heads, otherwise rows
    of joined heads are dropped and further keys get weights beside the core.

    Every layer is planned before one is touched: if one of them cannot be swapped, the model is
    left as it was. Do this before an optimiser is made and before the model is wrapped. A layer
    whose weights are all frozen stays frozen as a whole.

    With heads=1, score=dot, spread=0 and equal variances the model computes what it computed. With
    heads=1/K every K key heads become one head with K keys and one value, and the query heads with
    them: the most similar ones by their bilinear forms, their logits and values cut to the old head
    size with the least squared error in the weights. Such a model is where fine-tuning starts.

    Args:
        model: any module that holds attention layers.
        variant: a name of `lit_probattn.list_attention()`, the path of such a file, or a class of
            layers; or a recipe, `report.recipe`, which builds the same model again, so that
            `model.load_state_dict` fits. A recipe takes no other argument.
        example: one batch that the model takes: a tensor, a tuple of arguments, a mapping of named
            ones, or a function of the model. None means what transformers or timm say that the
            model takes, or each `nn.MultiheadAttention` by itself.
        heads: share of the heads that stays: 1, 1/2, 1/3, … Below 1 for variants with several keys
            per head: mgk, MLK, classes of your own.
        num_components: K, a multiple of 1/heads. None means 2, or 1/heads where that is more.
        score: `dot`, which starts at the old scores, or `gaussian`, which does so only where all
            keys of a head have one norm. None means dot; gaussian for smgk.
        spread: how far components start apart, which were one key: standard deviation in units of
            that of the key's weights, 0.1 unless it is given; the error is of second order. Equal
            components (0) stay equal for ever. For smgk, the standard deviation of the shifts.
        layers: names or patterns (`encoder.layer.*.attention.self`) of the layers to swap. None
            means all.
        keep: names or patterns of layers to leave as they are.
        seed: of the differences between components, and of what a variant draws at its start.
        written_out: whether to swap attention whose softmax the model writes out itself, by
            following its products; about three times the memory of its maps.
        options: other arguments of the variant, such as `learn_variance=True` or `e_step="hard"`.

    Returns:
        The same model, and what was done to each layer.

    Raises:
        ValueError: an argument is unknown or does not fit; the model is wrapped for several
            processes or has no attention layers; there is no example, or it does not run; or layers
            cannot be swapped, all of them named with the reason.
    """
    check_model(model)
    check_patterns(layers=layers, keep=keep)
    recipe: dict[str, RecipeLayer] | None = None
    if isinstance(variant, Mapping):
        given = (example, heads, num_components, score, spread, layers, tuple(keep), seed, options)
        if given != (None, 1.0, None, None, 0.1, None, (), 0, {}) or written_out:
            raise ValueError("a recipe says everything: give no other argument beside it")
        settings, recipe = read_recipe(variant)
        check_layers(recipe, model)
    else:
        settings = Settings(
            *(_name(variant), heads, num_components, score, spread, seed, options),
            factory=None if isinstance(variant, str) else variant,
        )
    state = torch.get_rng_state()
    try:
        return _swap(model, settings, recipe, example, layers, keep, written_out)
    finally:
        torch.set_rng_state(state)


def _name(variant: Any) -> Any:
    """Return a name for what makes layers; what is no name and makes none is returned as it is."""
    if isinstance(variant, str) or not callable(variant):
        return variant
    return f"{getattr(variant, '__module__', '')}.{getattr(variant, '__qualname__', repr(variant))}"


def _swap(
    model: Model,
    settings: Settings,
    recipe: Mapping[str, RecipeLayer] | None,
    example: Any,
    layers: Sequence[str] | None,
    keep: Sequence[str],
    written_out: bool,
) -> tuple[Model, Report]:
    """Find where a model attends, plan all of it, then change projections and put cores there."""
    run: Example | None = None
    lost: dict[str, str] = {}
    if recipe is None:
        run = _runner(model, example)
    with prepared(model) as state:
        if run is None:
            sites = sites_of_recipe(model, recipe or {})
        else:
            sites, lost = find_sites(model, run, written_out, settings.keys_per_head > 1)
        placing = plan_sites(model, sites, settings, layers, keep, lost)
        change_projections(model, placing, settings, run, recipe)
        place(model, placing)
        state.put_back(lambda module: not hasattr(module, "cores"))
    done = report(model, placing, settings, run)
    reports = []
    for name in dict.fromkeys([*(s.name for s in sites), *placing.kept]):
        kind = type(model.get_submodule(name)).__name__
        kept = f"kept: {placing.kept.get(name)}"
        reports.extend(done.get(name) or [LayerReport(name, kind, kept)])
    entries = recipe or {name: _entry(placing, name, settings) for name in done}
    out = write_recipe(settings, entries)
    return model, Report(reports, out, _summary(settings, reports))


def _runner(model: nn.Module, example: Any) -> Example:
    """Return what runs the model.

    Raises:
        ValueError: nobody knows what the model takes, or it has no weights.
    """
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("the model has no weights: give a recipe, or load them first")
    run = runner(model, example) or run_of_multihead(model)
    if run is None:
        raise ValueError(
            "give example=, one batch that the model takes: where it attends is found by running it"
        )
    return run


def _entry(placing: Placing, name: str, settings: Settings) -> RecipeLayer:
    """Return what a recipe says of a module with cores."""
    calls, kind = [], ""
    for site, change in zip(placing.chosen, placing.changes, strict=True):
        if site.name != name:
            continue
        h, kind = site.layout, type(site.module).__name__
        numbers = [h.query, h.key, h.value, h.head_dim, h.value_head_dim]
        what: dict[str, Any] = {"way": site.way, "heads": numbers, "cross": site.is_cross}
        what["width"] = site.width
        what |= {"groups": None, "exchanged": False, "projections": None}
        if change is not None:
            what |= {"groups": change.groups, "exchanged": change.exchanged}
            what["projections"] = change.made.to_dict()
        calls.append(what)
    return RecipeLayer(name, kind, calls, settings.group_size, settings.keys_per_head > 1)


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
    if not settings.has_own_core:
        return lines
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
