"""Placement of cores at the attention calls of a model, without changing its other weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lit_probattn.attention.call import HeadLayout, outline
from lit_probattn.attention.core import Core
from lit_probattn.base.errors import UnsupportedError
from lit_probattn.functional.call import head_call
from lit_probattn.interop.swap.core import fitted_call
from lit_probattn.interop.swap.cores import Cores, core_of, make_core, token_hooks
from lit_probattn.interop.swap.discovery.example import Example
from lit_probattn.interop.swap.discovery.projections import check_holders
from lit_probattn.interop.swap.discovery.recording import recording
from lit_probattn.interop.swap.discovery.sites import Site
from lit_probattn.interop.swap.interface import (
    InterfaceCores,
    keep_function,
    keep_tokens,
    pack_cache,
    use_in,
)
from lit_probattn.interop.swap.plan import choose_layers, refuse, refuse_what_is_lost
from lit_probattn.interop.swap.recipe import RecipeLayer
from lit_probattn.interop.swap.report import LayerReport
from lit_probattn.interop.swap.settings import Settings
from lit_probattn.interop.swap.share import (
    Change,
    convert,
    exchange,
    new_layout,
    outputs,
    put_new_widths,
    sharing_of,
    write_rows,
)
from lit_probattn.interop.swap.taking import Attending, give_cores
from lit_probattn.interop.swap.written import AttendingInWriting

_MODES = {"function": Attending, "written": AttendingInWriting}


@contextmanager
def prepared(model: nn.Module) -> Iterator[None]:
    """Let a model's libraries call attention functions that can be replaced.

    transformers calls the function by its name, and timm calls PyTorch's function. Modules without
    cores are as before afterwards; after an error, the whole model is.
    """
    interfaces = use_in(model)
    unfused: list[Any] = [m for m in model.modules() if getattr(m, "fused_attn", None) is False]
    for module in unfused:
        module.fused_attn = True
    try:
        yield
    except BaseException:
        for module in unfused:
            module.fused_attn = False
        for part, name in reversed(interfaces):
            part.set_attn_implementation(name)
        raise
    for module in unfused:
        module.fused_attn = hasattr(module, "cores")


def find_sites(
    model: nn.Module, run: Example, written_out: bool, needs_weights: bool
) -> tuple[list[Site], dict[str, str]]:
    """Return the attention calls of one run, and softmaxes that are not over keys, by module.

    Args:
        model: the model.
        run: runs the example.
        written_out: whether to swap softmaxes in separate operations.
        needs_weights: whether to also determine the weights that compute heads.

    Raises:
        ValueError: the example does not run, or contains no attention call.
    """
    with recording(model, marks=True) as first, suppress(Exception):  # the next run raises it
        run(model)
    read = {key: rows for key, rows in first.readers.items() if len(rows) == 1}
    marked = [first.sites[key] for key in read]
    for site in marked:
        (site.reader,) = read[site.name, site.index].values()
    with recording(model) as found, outputs(marked if needs_weights else []) as seen:
        _run(run, model)
        if needs_weights:
            found.find_makers()
    for place, site in enumerate(marked):
        key = site.name, site.index
        known = found.sites.get(key)
        if known is not None and not needs_weights:
            known.reader = site.reader
        elif known is not None and known.made is not None:
            (rows,) = read[key]
            known.made = replace(known.made, weights={**known.made.weights, "out": rows})
            known.reader, known.before = site.reader, seen[place][0]
    sites = list(found.sites.values())
    owners = {site.name for site in sites}
    for site in sites:
        if site.way == "written" and not written_out:
            site.refusal = (
                f"its softmax is written out ({site.where}): written_out=True follows its "
                "products, for about three times the memory of its maps"
            )
    lost = {name: where for name, where in found.written.items() if name not in owners}
    return sites, lost


def _run(run: Example, model: nn.Module) -> None:
    try:
        run(model)
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ValueError(f"the example does not run ({text}): pass example=") from error


def run_of_multihead(model: nn.Module) -> Example | None:
    """Return a function that runs each `nn.MultiheadAttention`, if no other module attends.

    Args:
        model: a model whose input is unknown.
    """
    every = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    others = [
        m for m in model.modules()
        if any(word in type(m).__name__ for word in ("Attention", "Attn"))
        and not any(isinstance(part, nn.MultiheadAttention) for part in m.modules())
        and next(m.parameters(), None) is not None
    ]  # fmt: skip
    if not every or others or every[0] is model:
        return None

    def run(_: nn.Module) -> None:
        for layer in every:
            like = layer.out_proj.weight
            sizes = (layer.embed_dim, layer.kdim, layer.vdim)
            tokens = [
                torch.randn(2, 16, size, generator=torch.Generator().manual_seed(seed)).to(like)
                for seed, size in enumerate(sizes)
            ]
            if not layer.batch_first:
                tokens = [t.transpose(0, 1) for t in tokens]
            is_self = len(set(sizes)) == 1
            layer(*(tokens[:1] * 3 if is_self else tokens), need_weights=False)

    return run


def sites_of_recipe(model: nn.Module, layers: Mapping[str, RecipeLayer]) -> list[Site]:
    """Return the calls listed in a recipe."""
    sites = []
    for name, layer in layers.items():
        module = model.get_submodule(name)
        for index, call in enumerate(layer.calls):
            query, key, value, size, value_size = call["heads"]
            layout = HeadLayout(query, key, value, query, size, value_size)
            site = Site(name, module, index, call["way"], layout, call["cross"])
            site.made, site.width = layer.projections[index], call["width"]
            sites.append(site)
    return sites


@dataclass
class Placing:
    """The planned changes of a model.

    Args:
        sites: all recorded calls.
        chosen: calls to swap.
        kept: reasons for keeping the others, by module.
        parts: an entry of `Cores` for each chosen call.
        changes: changes of their projections; None if unchanged.
        counts: parameters of each module before the swap.
    """

    sites: list[Site]
    chosen: list[Site]
    kept: dict[str, str]
    parts: list[nn.Module]
    changes: list[Change | None] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


def plan_sites(
    model: nn.Module,
    sites: list[Site],
    settings: Settings,
    layers: Sequence[str] | None,
    keep: Sequence[str],
    unfollowed: Mapping[str, str] | None = None,
) -> Placing:
    """Create a core for every call, or reject the model.

    Args:
        model: the model.
        sites: attention calls.
        settings: variant and options.
        layers: names or patterns of modules to swap. None means all.
        keep: names or patterns of modules to leave unchanged.
        unfollowed: modules with a softmax that is not over keys, and its location.

    Raises:
        ValueError: a module cannot be swapped; the message names all of them with the reason.
    """
    there = {name: module for name, module in model.named_modules() if _is_swapped(module)}
    others = {**dict.fromkeys(there, ""), **(unfollowed or {})}
    names = list(dict.fromkeys([*(s.name for s in sites), *others]))
    if not names:
        raise ValueError("the example contains no attention call")
    wanted, kept = choose_layers(names, layers, keep)
    chosen = [site for site in sites if site.name in wanted]
    refused: dict[str, tuple[str, nn.Module, str]] = {}

    def say(name: str, reason: str) -> None:
        refused.setdefault(name, (name, model.get_submodule(name), reason))

    parts = []
    for name, where in others.items():
        if name not in wanted:
            continue
        if name in there:
            say(name, "it is swapped already: it is one of our layers")
        else:
            say(name, f"its softmax is written out ({where}), but it is not over the keys of a "
                "product of queries and keys: list the layer in keep")  # fmt: skip
    for site in chosen:
        try:
            _check(model, site, [*kept, *there], settings.keys_per_head > 1)
            joins = settings.keys_per_head > 1
            heads = new_layout(site, settings) if joins else site.layout
            part = make_core(settings, heads, site.is_cross, site.width)
            _check_masks(part, site)
            parts.append(part)
        except UnsupportedError as error:
            say(site.name, str(error))
    refuse(list(refused.values()), len(wanted))
    placing = Placing(sites, chosen, kept, parts, [None] * len(chosen))
    placing.counts = {site.name: _count(site) for site in chosen}
    return placing


def change_projections(
    model: nn.Module,
    placing: Placing,
    settings: Settings,
    run: Example | None,
    recipe: Mapping[str, RecipeLayer] | None,
) -> None:
    """Join heads and add key components, if the variant has several.

    Raises:
        ValueError: a host computes one key per head, and its widths cannot be changed.
    """
    if settings.keys_per_head == 1:
        return
    known: list[Any] = [None] * len(placing.chosen)
    if recipe is not None:
        known = [recipe[site.name].calls[site.index]["groups"] for site in placing.chosen]
    changes = convert(model, placing.chosen, settings, known)
    if recipe is not None:
        for change in changes:
            change.exchanged = recipe[change.site.name].calls[change.site.index]["exchanged"]
            if change.exchanged:
                put_new_widths(model, change)
    elif run is not None:
        exchange(model, changes, run)
    rest = [
        (change, part)
        for change, part in zip(changes, placing.parts, strict=True)
        if not change.exchanged
    ]
    lacking = [
        (c.site.name, c.site.module, "its projections compute one key per head, and their widths "
         "are fixed: use smgk, or heads=1/K with K components")
        for c, _ in rest if c.more_keys and c.site.way == "interface"
    ]  # fmt: skip
    refuse(lacking, len(placing.chosen))
    write_rows(model, [change for change, _ in rest], [part for _, part in rest])
    placing.changes = list(changes)


def _check(model: nn.Module, site: Site, others: Sequence[str], changes_weights: bool) -> None:
    """Raise if a call cannot be swapped.

    Raises:
        UnsupportedError: it cannot; the message gives the reason.
    """
    refuse_what_is_lost(model, site.name, [site.module], replaced=False)
    if changes_weights and site.made is not None:
        paths = {r.parameter.rpartition(".")[0] for r in site.made.weights.values()}
        holders = [model.get_submodule(path) for path in paths]
        refuse_what_is_lost(model, site.name, [site.module, *holders])
        check_holders(model, site, site.made)
    if site.refusal:
        raise UnsupportedError(site.refusal)
    if site.way != "interface" and "forward" in vars(site.module):
        raise UnsupportedError(
            "its forward is replaced in the object, so that a swap would have no effect: delete "
            "the attribute, swap, and replace it again"
        )
    if hasattr(site.module, "cores"):
        raise UnsupportedError("it already has an attribute `cores`")
    if site.way != "interface":
        inside = f"{site.name}." if site.name else ""
        held = [name for name in others if name.startswith(inside) and name != site.name]
        if held:
            raise UnsupportedError(
                f"it contains {held[0]}, which also attends and is kept: their calls cannot be "
                "distinguished"
            )


def _check_masks(part: nn.Module, site: Site) -> None:
    """Raise if the variant does not support the mask and the bias of the example.

    Raises:
        UnsupportedError: it does not; the message is the variant's.
    """
    if not site.inputs or site.way == "written":  # a recipe; or masks are unknown until the swap
        return
    core = core_of(part)
    given = {name: _detached(value) for name, value in site.inputs.items() if name != "scale"}
    query = given.pop("query").expand(len(given["value"]), -1, -1, -1)
    look = not core.makes.has_scores
    try:
        call = head_call(query, num_heads=query.shape[1], look=look, **given)
        call = replace(call, side=query)  # a forward has one
        core.variant(outline(core.layout, 1, 1, 1)).check(call)
    except ValueError as error:
        raise UnsupportedError(str(error)) from error


def _is_swapped(module: Any) -> bool:
    """Whether a module itself contains a core."""
    return isinstance(getattr(module, "cores", None), Cores) or any(
        isinstance(part, Core) for part in module.children()
    )


def place(model: nn.Module, placing: Placing) -> None:
    """Assign the cores to every module."""
    given: dict[str, Cores] = {}
    for site, part, change in zip(placing.chosen, placing.parts, placing.changes, strict=True):
        like = _weight_near(model, site)
        if like is not None:
            part.to(like.device, like.dtype)
        trains = any(p.requires_grad for p in site.module.parameters())
        if next(site.module.parameters(), None) is None:
            trains = like is None or like.requires_grad
        part.requires_grad_(trains)
        if site.name not in given:
            in_library = site.way == "interface"
            given[site.name] = InterfaceCores() if in_library else Cores(_MODES[site.way])
        given[site.name].append(part)
        given[site.name].sharing.append(sharing_of(model, change))
        if site.way == "interface" and token_hooks(part):
            site.module.register_forward_pre_hook(keep_tokens, with_kwargs=True)
        if change is not None and change.exchanged and change.layout.keys_per_head > 1:
            site.module.register_forward_pre_hook(pack_cache, with_kwargs=True)
    for site in placing.chosen:
        if site.index == 0:
            cores, holder = given[site.name], site.module
            cores.train(holder.training)
            if cores.mode is None:
                holder.cores = cores
                keep_function(holder)
            else:
                give_cores(holder, cores)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and any(
            isinstance(m, Cores) for m in module.modules()
        ):
            module.use_nested_tensor = False


def _weight_near(model: nn.Module, site: Site) -> Tensor | None:
    """Return a weight of the module, or of the nearest enclosing module that has one."""
    name = site.name
    while True:
        holder = model.get_submodule(name) if name else model
        found = next((p for p in holder.parameters() if p.is_floating_point()), None)
        if found is not None or not name:
            return found
        name = name.rpartition(".")[0]


def report(
    model: nn.Module, placing: Placing, settings: Settings, run: Example | None
) -> dict[str, list[LayerReport]]:
    """Return the report of every module."""
    if not placing.chosen:
        return {}
    errors: dict[int, float | None] = {}
    is_meta = any(p.is_meta for p in model.parameters())
    if settings.keys_per_head > 1 and run is not None:
        with recording(model), outputs(placing.chosen) as seen:
            _run(run, model)
        errors = {place: values[0] for place, values in seen.items()}
    done: dict[str, list[LayerReport]] = {}
    names = {module: name for name, module in model.named_modules()}
    for place, (site, part, change) in enumerate(
        zip(placing.chosen, placing.parts, placing.changes, strict=True)
    ):
        error, note = errors.get(place), ""
        if error is None:
            note = "not measured: no weights" if is_meta else "not measured: no example"
        if change is None and site.output is not None and site.way != "written":
            try:
                error = _error(part, site, site.output)
            except (ValueError, NotImplementedError) as problem:
                note = f"not measured: {problem}"
        elif change is not None and run is not None and error is None:
            note = "not measured: its heads are read by more than one weight"
        heads, core = site.layout, core_of(part)
        now = core.layout
        old = heads.key * heads.head_dim + heads.value * heads.value_head_dim
        new = now.key * now.keys_per_head * now.head_dim + now.value * now.value_head_dim
        if change is None or (site.way == "interface" and not change.exchanged):
            new = old  # the library stores all of its heads
        like = _weight_near(model, site)
        size = 1 if like is None else like.element_size()
        before, after = placing.counts[site.name], _count(site)
        is_inside = site.reader is None or site.reader in set(site.module.modules())
        done.setdefault(site.name, []).append(
            LayerReport(
                name=site.name if site.index == 0 else f"{site.name}, call {site.index + 1}",
                kind=type(site.module).__name__,
                action="swapped",
                heads=(heads.out, now.out),
                kv_heads=(heads.key, now.key),
                components=(1, settings.components),
                parameters=(before, after),
                cache_bytes=(old * size, new * size),
                error=error,
                groups=None if change is None else change.weights.groups,
                note="" if error is not None else note,
                output="" if is_inside else names[site.reader],
            )
        )
    return done


def _count(site: Site) -> int:
    """Count the parameters of a module and of the module that reads its heads."""
    owned = [site.module, *([] if site.reader is None else [site.reader])]
    return sum(p.numel() for p in {id(p): p for m in owned for p in m.parameters()}.values())


@torch.no_grad()
def _error(part: nn.Module, site: Site, output: Tensor) -> float:
    """Return ‖new − old‖ / ‖old‖ of the result for the heads of the example."""
    core, was = core_of(part), part.training
    core.eval()
    new = core(fitted_call(core, **{n: _detached(v) for n, v in site.inputs.items()}))
    core.train(was)
    return float((new.double() - output.double()).norm() / output.double().norm())


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
