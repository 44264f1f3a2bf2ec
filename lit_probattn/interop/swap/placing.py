"""Cores at the calls of attention that an example has shown; all weights stay the host's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lit_probattn.attention import Attention
from lit_probattn.attention.call import HeadLayout
from lit_probattn.attention.core import Core
from lit_probattn.base.errors import UnsupportedError
from lit_probattn.interop.swap.core import fitted_call
from lit_probattn.interop.swap.cores import Cores, make_core
from lit_probattn.interop.swap.example import Example
from lit_probattn.interop.swap.interface import Swapped, use_in
from lit_probattn.interop.swap.plan import choose_layers, refuse, refuse_what_is_lost
from lit_probattn.interop.swap.recipe import RecipeLayer
from lit_probattn.interop.swap.report import LayerReport
from lit_probattn.interop.swap.settings import Settings
from lit_probattn.interop.swap.sites import Site, recording
from lit_probattn.interop.swap.taking import Attending, give_cores
from lit_probattn.interop.swap.written import AttendingInWriting

_MODES = {"interface": None, "function": Attending, "written": AttendingInWriting}


class Prepared:
    """A model whose libraries hand over their heads; what was set can be put back.

    transformers calls our function by its name, and timm calls PyTorch's.
    """

    def __init__(self, model: nn.Module) -> None:
        self.interfaces = use_in(model)
        self.unfused: list[Any] = []
        for module in model.modules():
            part: Any = module
            if getattr(part, "fused_attn", None) is False:
                self.unfused.append(part)
                part.fused_attn = True

    def put_back(self, kept: Callable[[nn.Module], bool] | None = None) -> None:
        """Put back what was set; of the modules that are kept where it is asked."""
        for module in self.unfused:
            if kept is None or kept(module):
                module.fused_attn = False
        if kept is None:
            for module, name in reversed(self.interfaces):
                module.set_attn_implementation(name)


@contextmanager
def prepared(model: nn.Module) -> Iterator[Prepared]:
    """Prepare a model; an error puts everything back."""
    state = Prepared(model)
    try:
        yield state
    except BaseException:
        state.put_back()
        raise


def find_sites(
    model: nn.Module, run: Example, written_out: bool
) -> tuple[list[Site], dict[str, str]]:
    """Return the calls of attention of one run, and softmaxes that nobody can follow, by module.

    Raises:
        ValueError: the example does not run, or reached no attention.
    """
    with recording(model) as found:
        try:
            run(model)
        except Exception as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise ValueError(f"the example does not run ({text}): give example=") from error
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


def sites_of_multihead(model: nn.Module) -> list[Site]:
    """Return the calls of a model without an example, where `nn.MultiheadAttention` makes them."""
    return [
        Site(name, module, 0, "function", _heads_of_multihead(module), is_cross=False)
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)
    ]


def _heads_of_multihead(module: nn.MultiheadAttention) -> HeadLayout:
    heads, size = module.num_heads, module.head_dim
    return HeadLayout(heads, heads, heads, heads, size, size)


def sites_of_recipe(model: nn.Module, layers: Mapping[str, RecipeLayer]) -> list[Site]:
    """Return the calls that a recipe names."""
    sites = []
    for name, layer in layers.items():
        module = model.get_submodule(name)
        for index, call in enumerate(layer.calls or ()):
            query, key, value, size, value_size = call["heads"]
            layout = HeadLayout(query, key, value, query, size, value_size)
            sites.append(Site(name, module, index, call["way"], layout, call["cross"]))
    return sites


@dataclass
class Placing:
    """What is to be placed, and what is left.

    Args:
        sites: all calls that were found.
        chosen: those that are swapped.
        kept: why the others are not, by module.
        parts: an entry of `Cores` for each of the chosen.
    """

    sites: list[Site]
    chosen: list[Site]
    kept: dict[str, str]
    parts: list[nn.Module]


def plan_sites(
    model: nn.Module,
    sites: list[Site],
    settings: Settings,
    layers: Sequence[str] | None,
    keep: Sequence[str],
    unfollowed: Mapping[str, str] | None = None,
) -> Placing:
    """Make a core for every call, or refuse the model as a whole.

    Args:
        model: the model.
        sites: calls of attention.
        settings: variant and options.
        layers: names or patterns of modules to swap. None means all.
        keep: names or patterns of modules to leave as they are.
        unfollowed: modules with a softmax that nobody can follow, and where it is.

    Raises:
        ValueError: it names every module that cannot be swapped, with the reason.
    """
    there = {name: module for name, module in model.named_modules() if _is_swapped(module)}
    others = {**dict.fromkeys(there, ""), **(unfollowed or {})}
    names = list(dict.fromkeys([*(s.name for s in sites), *others]))
    if not names:
        raise ValueError("the example reached no attention")
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
            say(name, f"its softmax is written out ({where}), of what is no product of queries and "
                "keys any more: keep it")  # fmt: skip
    for site in chosen:
        try:
            _check(model, site, [*kept, *there])
            parts.append(make_core(settings, site.layout, site.is_cross))
        except UnsupportedError as error:
            say(site.name, str(error))
    refuse(list(refused.values()), len(wanted))
    return Placing(sites, chosen, kept, parts)


def _check(model: nn.Module, site: Site, others: Sequence[str]) -> None:
    """Refuse a call that cannot be swapped.

    Raises:
        UnsupportedError: it says why.
    """
    if site.refusal:
        raise UnsupportedError(site.refusal)
    if hasattr(site.module, "cores"):
        raise UnsupportedError("it has an attribute `cores` of its own")
    if site.way != "interface":
        inside = f"{site.name}." if site.name else ""
        held = [name for name in others if name.startswith(inside) and name != site.name]
        if held:
            raise UnsupportedError(
                f"it holds {held[0]}, which attends too and stays: whose call is whose could not "
                "be told"
            )
    refuse_what_is_lost(model, site.name, [site.module], replaced=False)


def _is_swapped(module: Any) -> bool:
    """Whether a module holds a core already, not below other modules."""
    return isinstance(getattr(module, "cores", None), Cores) or any(
        isinstance(part, Core) for part in module.children()
    )


def place(model: nn.Module, placing: Placing, settings: Settings) -> dict[str, list[LayerReport]]:
    """Give every module its cores; return what became of each, by module."""
    done: dict[str, list[LayerReport]] = {}
    given: dict[str, Cores] = {}
    for site, part in zip(placing.chosen, placing.parts, strict=True):
        like = _weight_near(model, site)
        old = sum(p.numel() for p in site.module.parameters())
        if like is not None:
            part.to(like.device, like.dtype)
        trains = any(p.requires_grad for p in site.module.parameters())
        if next(site.module.parameters(), None) is None:
            trains = like is None or like.requires_grad
        part.requires_grad_(trains)
        cores = given.setdefault(site.name, Cores(_MODES[site.way]))
        cores.append(part)
        number = sum(p.numel() for p in part.parameters())
        report = _report(site, part, settings, old, number)
        done.setdefault(site.name, []).append(report)
    for site in placing.chosen:
        if site.index == 0:
            cores, holder = given[site.name], site.module
            cores.train(holder.training)
            if cores.mode is None:
                holder.cores, holder.swapped = cores, Swapped(None)  # type: ignore[assignment]
            else:
                give_cores(holder, cores)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and any(
            isinstance(m, Cores) for m in module.modules()
        ):
            module.use_nested_tensor = False
    return done


def _weight_near(model: nn.Module, site: Site) -> Tensor | None:
    """Return a weight of the module, or of the nearest module around it that has one."""
    name = site.name
    while True:
        holder = model.get_submodule(name) if name else model
        found = next((p for p in holder.parameters() if p.is_floating_point()), None)
        if found is not None or not name:
            return found
        name = name.rpartition(".")[0]


def _report(site: Site, part: nn.Module, settings: Settings, old: int, more: int) -> LayerReport:
    heads: HeadLayout = site.layout
    core: Any = part.core if isinstance(part, Attention) else part
    stored = heads.key * heads.head_dim + heads.value * heads.value_head_dim
    output, error, note = site.output, None, "not measured: without an example"
    if output is not None:
        note, stored = "", stored * output.element_size()
        try:
            error = _error(core, site, output)
        except (ValueError, NotImplementedError) as problem:
            note = f"not measured: {problem}"
    return LayerReport(
        name=site.name if site.index == 0 else f"{site.name}, call {site.index + 1}",
        kind=type(site.module).__name__,
        action="swapped",
        heads=(heads.query, heads.query),
        kv_heads=(heads.key, core.layout.key),
        components=(1, settings.components),
        parameters=(old, old + more),
        cache_bytes=(stored, stored),
        error=error,
        note=note,
    )


@torch.no_grad()
def _error(core: Any, site: Site, output: Tensor) -> float:
    """Return ‖new − old‖ / ‖old‖ of what is made of the heads of the example."""
    was = core.training
    core.eval()
    new = core(fitted_call(core, **{n: _detached(v) for n, v in site.inputs.items()}))
    core.train(was)
    return float((new.double() - output.double()).norm() / output.double().norm())


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
