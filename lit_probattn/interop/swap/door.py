"""`swap` replaces the attention of a model in place and keeps its weights."""

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
    """Replace the attention of a model by a variant of this package, in place.

        model, report = lit_probattn.swap(model, "smgk")
        model, report = lit_probattn.swap(model, "mgk", heads=0.5)
        print(report)

    One run of an example finds the calls of softmax(Q Kᵀ) V. Each is replaced by a core of the
    variant with the same heads, stored as `cores` of the calling module; all weights are unchanged.
    Several keys per head and fewer heads change the projections, whose rows are determined from
    gradients: projections get new widths if a second run confirms the new heads; otherwise rows of
    merged heads are dropped, and the core has the weights of further keys.

    All layers are planned before any is changed: if one of them cannot be swapped, the model is
    unchanged. Call `swap` before creating an optimiser and before wrapping the model. A layer whose
    weights are all frozen stays frozen completely.

    With heads=1, score=dot, spread=0 and equal variances the output of the model is unchanged. With
    heads=1/K, every K key heads become one head with K keys and one value, together with their
    query heads: heads with the most similar bilinear forms are merged, and logits and values
    reduced to the old head size with the least squared error in the weights. Such a model is the
    starting point of fine-tuning.

    Args:
        model: any module that contains attention layers.
        variant: a name of `lit_probattn.list_attention()`, the path of such a file, or a class of
            layers; or a recipe, `report.recipe`, which builds the same model again, so that
            `model.load_state_dict` matches. A recipe excludes all other arguments.
        example: one batch for the model: a tensor, a tuple of arguments, a mapping of keyword
            arguments, or a function of the model. None means the input that transformers or timm
            describe, or a separate run of each `nn.MultiheadAttention`.
        heads: fraction of the heads to keep: 1, 1/2, 1/3, … Values below 1 require a variant with
            several keys per head, such as mgk, mlk or your own classes.
        num_components: K, a multiple of 1/heads. None means 2, or 1/heads if that is larger.
        score: `dot`, which starts with the old scores, or `gaussian`, which does so only if all
            keys of a head have the same norm. None means dot; gaussian for smgk.
        spread: initial distance of components that were one key: standard deviation in units of
            the standard deviation of the key's weights, default 0.1; the error is of second order.
            Equal components (0) stay equal. For smgk, the standard deviation of the shifts.
        layers: names or patterns (`encoder.layer.*.attention.self`) of the layers to swap. None
            means all.
        keep: names or patterns of layers to leave unchanged.
        seed: seed of the distances between components, and of a variant's initial parameters.
        written_out: whether to swap attention whose softmax the model computes in separate
            operations, by following its products; about three times the memory of its weights.
        options: other arguments of the variant, such as `learn_variance=True` or `e_step="hard"`.

    Returns:
        The same model, and a report of the changes of each layer.

    Raises:
        ValueError: an argument is unknown or invalid; the model is wrapped for several processes
            or has no attention layers; there is no example, or it does not run; or layers cannot be
            swapped, in which case the message names all of them with the reason.
    """
    check_model(model)
    check_patterns(layers=layers, keep=keep)
    recipe: dict[str, RecipeLayer] | None = None
    if isinstance(variant, Mapping):
        given = (example, heads, num_components, score, spread, layers, tuple(keep), seed, options)
        if given != (None, 1.0, None, None, 0.1, None, (), 0, {}) or written_out:
            raise ValueError("a recipe contains all arguments: pass no other argument with it")
        settings, recipe = read_recipe(variant)
        check_layers(recipe, model)
    else:
        settings = Settings(
            *(_name(variant), heads, num_components, score, spread, seed, options),
            factory=None if isinstance(variant, str) else variant,
        )
    with torch.random.fork_rng(devices=()):
        return _swap(model, settings, recipe, example, layers, keep, written_out)


def _name(variant: Any) -> Any:
    """Return a name for a factory of layers; other objects are returned unchanged."""
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
    """Find attention calls, plan all changes, then change projections and add cores."""
    run: Example | None = None
    lost: dict[str, str] = {}
    if recipe is None:
        run = _runner(model, example)
    with prepared(model):
        if run is None:
            sites = sites_of_recipe(model, recipe or {})
        else:
            sites, lost = find_sites(model, run, written_out, settings.keys_per_head > 1)
        placing = plan_sites(model, sites, settings, layers, keep, lost)
        change_projections(model, placing, settings, run, recipe)
        place(model, placing)
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
    """Return a function that runs the model.

    Raises:
        ValueError: the input of the model is unknown, or the model has no weights.
    """
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("the model has no weights: pass a recipe, or load them first")
    run = runner(model, example) or run_of_multihead(model)
    if run is None:
        raise ValueError(
            "pass example=, one batch that the model takes: a run of it finds attention calls"
        )
    return run


def _entry(placing: Placing, name: str, settings: Settings) -> RecipeLayer:
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
    swapped = [r for r in reports if r.swapped]
    lines = [f"{len(swapped)} of {len(reports)} attention layers are now {settings.variant}:"]
    before, after = (sum(r.parameters[i] for r in swapped) for i in (0, 1))
    cache = [sum(r.cache_bytes[i] for r in swapped) for i in (0, 1)]
    lines.append(
        f"  parameters {before} -> {after}, keys and values of a token {cache[0]} -> {cache[1]} "
        "bytes"
    )
    if not settings.has_own_core:
        return lines
    if settings.chosen_score == "gaussian":
        lines.append("  score gaussian: starts with the old scores only if all keys have one norm")
    else:
        lines.append("  score dot: equal components compute the same as one key")
    if settings.group_size > 1:
        lines.append(
            f"  {settings.group_size} heads became one: the most similar by their bilinear forms, "
            "reduced with the least squared error in the weights; expect to fine-tune"
        )
    if settings.keys_per_head > settings.group_size and settings.spread:
        lines.append(
            f"  components start {settings.spread} apart, in standard deviations of the key's "
            "weights"
        )
    elif settings.keys_per_head > settings.group_size:
        lines.append("  components start equal (spread=0) and stay equal: for comparison only")
    if settings.options.get("prior_share") == "head_position":
        lines.append(
            "  prior_share head_position: positions include padding, so outputs after padding on "
            "the left differ from those without"
        )
    return lines
