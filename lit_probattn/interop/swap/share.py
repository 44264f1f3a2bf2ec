"""Fewer heads, or keys with several components: weights are read by heads, merged and written.

If a host infers the number of heads from the widths of its projections, these get new widths, which
a second run of the example verifies. Otherwise the host keeps all its heads: weight rows of removed
heads are dropped (`classes.keep_rows`), and further key components are computed in addition to the
first (`taking.Attending`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lit_probattn.attention.call import HeadLayout
from lit_probattn.base.errors import UnsupportedError
from lit_probattn.interop.swap.classes import keep_rows
from lit_probattn.interop.swap.cores import Sharing
from lit_probattn.interop.swap.discovery.recording import recording
from lit_probattn.interop.swap.discovery.sites import ROLES, Projections, Rows, Site
from lit_probattn.interop.swap.settings import Settings
from lit_probattn.interop.weights import (
    HeadWeights,
    group_heads,
    merge_heads,
    read_heads,
    widen_keys,
)


@dataclass
class Change:
    """The change of the projections of a call.

    Args:
        site: the call.
        made: its current weights.
        weights: the new weights.
        groups: key heads to join. None means that all are kept.
        exchanged: whether the host has fewer heads and more keys.
    """

    site: Site
    made: Projections
    weights: HeadWeights
    groups: list[list[int]] | None
    exchanged: bool = False

    @property
    def layout(self) -> HeadLayout:
        """Heads of the core."""
        kv, times, size = self.weights.key.shape[:3]
        heads = self.weights.query.shape[0]
        return HeadLayout(heads, kv, kv, heads, size, self.site.layout.value_head_dim, times)

    @property
    def seen(self) -> HeadLayout:
        """Heads of the host with new widths."""
        new = self.layout
        return replace(new, key=new.key * new.keys_per_head, keys_per_head=1)

    @property
    def more_keys(self) -> int:
        """Components of a key that the host's heads do not compute."""
        return self.layout.key * self.layout.keys_per_head // self.site.layout.key - 1


def new_layout(site: Site, settings: Settings) -> HeadLayout:
    """Return the heads of a site's core.

    Raises:
        UnsupportedError: heads cannot be joined, or their weights are unknown.
    """
    given, size, made = site.layout, settings.group_size, site.made
    assert made is not None
    if size > 1 and made.fixed:
        raise UnsupportedError(f"its number of heads cannot change: {made.fixed}")
    if given.key != given.value or given.query % given.key:
        raise UnsupportedError(
            f"{given.query} query, {given.key} key and {given.value} value heads are not groups"
        )
    if given.key % size:
        raise UnsupportedError(
            f"{given.key} key heads cannot be joined in groups of {size} (heads={settings.heads})"
        )
    if size > 1 and "out" not in made.weights:
        raise UnsupportedError(
            "the weight that reads its heads is unknown: a gate or a norm over all heads precedes "
            "it, or there are several"
        )
    heads, kv = given.query // size, given.key // size
    sizes = (heads, kv, kv, heads, given.head_dim, given.value_head_dim)
    return HeadLayout(*sizes, keys_per_head=settings.keys_per_head)


@torch.no_grad()
def convert(
    model: nn.Module,
    sites: Sequence[Site],
    settings: Settings,
    groups: Sequence[list[list[int]] | None],
) -> list[Change]:
    """Return the new weights of every call, in the model's dtype; the model is not changed.

    Args:
        model: the model.
        sites: calls with known weights.
        settings: number of heads to join, and components.
        groups: key heads to join. None means the most similar.
    """
    changes = []
    for index, (site, known) in enumerate(zip(sites, groups, strict=True)):
        made = site.made
        assert made is not None
        weights = _read(model, site, made)
        like = model.get_parameter(made.weights["query"].parameter)
        joined = None
        if settings.group_size > 1:
            joined = group_heads(weights, settings.group_size) if known is None else known
            weights = merge_heads(weights, joined, made.rotary)
        times = settings.keys_per_head // settings.group_size
        seed = settings.seed * 100_003 + index
        weights = widen_keys(weights, times, settings.spread, seed).to(like.dtype)
        changes.append(Change(site, made, weights, joined))
    return changes


def _read(model: nn.Module, site: Site, made: Projections) -> HeadWeights:
    pairs = []
    for role in ROLES:
        rows, bias = made.weights[role], made.biases.get(role)
        weight = _picked(model, rows)
        weight = weight if rows.axis == 0 else weight.mT
        pairs.append((weight, None if bias is None else _picked(model, bias)))
    out = pairs[0][0].new_zeros(1, site.layout.out * site.layout.value_head_dim)
    if "out" in made.weights:
        rows = made.weights["out"]
        out = _picked(model, rows)
        out = out if rows.axis == 1 else out.mT
    query, key, value = pairs
    return read_heads(query, key, value, (out, None), site.layout.query, site.layout.key)


def _picked(model: nn.Module, rows: Rows) -> Tensor:
    held = model.get_parameter(rows.parameter)
    return held.detach().index_select(rows.axis, torch.tensor(rows.all(), device=held.device))


def _written(change: Change) -> dict[str, Tensor]:
    """Return new weights by role, heads first; `out` is (H, E_v, C)."""
    new = change.weights
    return {
        "query": new.query,
        "key": new.key.flatten(0, 1),
        "value": new.value,
        "out": new.out.permute(1, 2, 0),
    }


# ---------------------------------------------------------------------- hosts with fixed heads
@torch.no_grad()
def write_rows(model: nn.Module, changes: Sequence[Change], parts: Sequence[nn.Module]) -> None:
    """Write new weights into the rows of the first heads, and drop the rows of the others.

    Args:
        model: the model.
        changes: planned changes of its calls.
        parts: entry of `Cores` for each, which gets the further key components.
    """
    full: dict[str, Tensor] = {}
    axes: dict[str, int] = {}
    dead: dict[str, set[int]] = {}

    def write(rows: Rows, heads: Tensor) -> None:
        """Write (H', rows, …) into the rows of the first H' heads."""
        held = full.setdefault(rows.parameter, model.get_parameter(rows.parameter).detach().clone())
        axes[rows.parameter] = rows.axis
        for head in range(len(rows.starts)):
            if head >= len(heads):
                dead.setdefault(rows.parameter, set()).update(rows.of(head))
                continue
            places = torch.tensor(rows.of(head), device=held.device)
            held.index_copy_(rows.axis, places, heads[head] if rows.axis == 0 else heads[head].mT)

    for change, part in zip(changes, parts, strict=True):
        each, times = _written(change), change.more_keys + 1
        every = each["key"].unflatten(0, (-1, times))
        each["key"] = every[:, 0]
        for role in ROLES:
            bias = change.made.biases.get(role)
            matrix = each[role] if bias is None else each[role][..., :-1]
            write(change.made.weights[role], matrix)
            if bias is not None:
                write(bias, each[role][..., -1])
        if change.layout.out < change.site.layout.out:
            write(change.made.weights["out"], each["out"])
        if times > 1:
            _add_keys(part, every[:, 1:].transpose(0, 1), change.made)
    for name, held in full.items():
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        model.get_parameter(name).copy_(held)
        if name in dead:
            left = sorted(set(range(held.shape[axes[name]])) - dead[name])
            keep_rows(module, own, axes[name], left)


def _add_keys(part: nn.Module, keys: Tensor, made: Projections) -> None:
    """Set the weights of further components in a core, (T, H_kv, E, C [+ 1])."""
    rows = keys.flatten(1, 2)
    if "key" in made.biases:
        part.key_bias = nn.Parameter(rows[..., -1].contiguous())
        rows = rows[..., :-1]
    weight = rows if made.weights["key"].axis == 0 else rows.mT
    part.key_weight = nn.Parameter(weight.contiguous())


def sharing_of(model: nn.Module, change: Change | None) -> Sharing:
    """Return the relation of a core's heads to the host's, after its weights are written."""
    if change is None:
        return Sharing()
    groups, repeats = change.weights.groups, change.made.repeats
    if change.exchanged:
        return Sharing(groups, repeats=repeats)
    inside = f"{change.site.name}." if change.site.name else ""
    key, bias = change.made.weights["key"], change.made.biases.get("key")
    names = dict.fromkeys(rows.parameter for rows in change.made.weights.values())
    selected = tuple(
        name.removeprefix(inside)
        for name in names
        if name.startswith(inside)
        and (_is_narrow(model, name) or (change.more_keys > 0 and name == key.parameter))
    )
    if not change.more_keys:
        return Sharing(groups, repeats=repeats, selected=selected)
    return Sharing(
        groups,
        key.parameter.removeprefix(inside),
        None if bias is None else bias.parameter.removeprefix(inside),
        key.axis,
        _kept(model, key),
        [] if bias is None else _kept(model, bias),
        repeats,
        selected,
    )


def _is_narrow(model: nn.Module, name: str) -> bool:
    """Return whether only some rows of a parameter are stored."""
    path, _, own = name.rpartition(".")
    return own in getattr(model.get_submodule(path), "kept", {})


def _kept(model: nn.Module, rows: Rows) -> list[int]:
    """Return the indices of rows among the stored rows of a parameter."""
    path, _, own = rows.parameter.rpartition(".")
    kept = getattr(model.get_submodule(path), "kept", {}).get(own)
    if kept is None:
        return rows.all()
    places = {row: place for place, row in enumerate(kept.rows)}
    return [places[row] for row in rows.all()]


# ---------------------------------------------------------------------- hosts that infer heads
def exchange(model: nn.Module, changes: Sequence[Change], run: Any) -> None:
    """Set new projections if a run of the example confirms the new heads; otherwise restore them.

    Args:
        model: the model.
        changes: planned changes of its calls; `exchanged` is set.
        run: runs the example.
    """
    kinds: dict[type, list[Change]] = {}
    for change in changes:
        if change.site.way != "written" and _is_exchangeable(model, change):
            kinds.setdefault(type(change.site.module), []).append(change)
    for same in kinds.values():
        undo = [step for change in same for step in put_new_widths(model, change)]
        try:
            with recording(model, marks=True) as found:
                run(model)
            seen = [found.sites.get((c.site.name, c.site.index)) for c in same]
        except Exception:  # a host that does not infer its heads may raise any exception
            seen = []
        fits = [s is not None and s.layout == c.seen for s, c in zip(seen, same, strict=False)]
        if len(fits) == len(same) and all(fits):
            for change in same:
                change.exchanged = True
            continue
        for holder, name, value in reversed(undo):
            setattr(holder, name, value)


def _is_exchangeable(model: nn.Module, change: Change) -> bool:
    """Whether heads fill their weights in order."""
    made, widths = change.made, []
    if made.weights.keys() != {*ROLES, "out"} or made.repeats > 1:
        return False
    for parts, roles in ((made.weights, (*ROLES, "out")), (made.biases, ROLES)):
        ends: dict[str, int] = {}
        for role in roles:
            if role not in parts:
                continue
            rows = parts[role]
            first, stop = ends.get(rows.parameter, 0), len(rows.all())
            if rows.all() != list(range(first, first + stop)):
                return False
            ends[rows.parameter] = first + stop
        widths += [(n, end, parts) for n, end in ends.items()]
    for name, end, parts in widths:
        axis = next(rows.axis for rows in parts.values() if rows.parameter == name)
        if model.get_parameter(name).shape[axis] != end:
            return False
    is_fused = len({made.weights[role].parameter for role in ROLES}) < 3
    return not is_fused or hasattr(change.site.module, "split_size")


@torch.no_grad()
def put_new_widths(model: nn.Module, change: Change) -> list[tuple[Any, str, Any]]:
    """Set the new projections of a call; return holder, name and value of each change to undo."""
    each, made, undo = _written(change), change.made, []
    new: dict[str, list[Tensor]] = {}
    axes: dict[str, int] = {}
    for role in (*ROLES, "out"):
        rows, bias = made.weights[role], made.biases.get(role)
        heads = each[role].flatten(0, 1)  # (rows, C [+ 1])
        matrix = heads if bias is None else heads[..., :-1]
        new.setdefault(rows.parameter, []).append(matrix if rows.axis == 0 else matrix.mT)
        axes[rows.parameter] = rows.axis
        if bias is not None:
            new.setdefault(bias.parameter, []).append(heads[..., -1])
            axes[bias.parameter] = 0
    for name, parts in new.items():
        path, _, own = name.rpartition(".")
        holder: Any = model.get_submodule(path)
        held = getattr(holder, own)
        whole = torch.cat(parts, axes[name]).contiguous()
        undo.append((holder, own, held))
        setattr(holder, own, nn.Parameter(whole.to(held), held.requires_grad))
        if whole.dim() == 2:
            is_linear = isinstance(holder, nn.Linear)
            sizes = ("out_features", "in_features") if is_linear else ("nx", "nf")
            for attribute, size in zip(sizes, whole.shape, strict=True):
                if hasattr(holder, attribute):
                    undo.append((holder, attribute, getattr(holder, attribute)))
                    setattr(holder, attribute, size)
    host: Any = change.site.module
    joint = [len(each[role].flatten(0, 1)) for role in ROLES]
    names = [made.weights[role].parameter for role in ROLES]
    if hasattr(host, "split_size"):
        undo.append((host, "split_size", host.split_size))
        host.split_size = [n for n, name in zip(joint, names, strict=True) if name == names[1]]
    return undo


# ---------------------------------------------------------------------- error of a swap
@contextmanager
def outputs(sites: Sequence[Site]) -> Iterator[dict[int, list[Any]]]:
    """Record the outputs of the readers of sites, by index in `sites`.

    If a site has a previous output, the difference ‖new − old‖ / ‖old‖ is recorded, and the model
    continues with the previous output, so that every layer is compared on its own inputs.
    """
    owners: dict[nn.Module, list[int]] = {}
    for place, site in enumerate(sites):
        if site.reader is not None:
            owners.setdefault(site.reader, []).append(place)
    seen: dict[int, list[Any]] = {}
    calls: dict[nn.Module, int] = {}

    def note(module: nn.Module, _: Any, output: Any) -> Any:
        places, call = owners[module], calls.get(module, 0)
        calls[module] = call + 1
        place = places[call % len(places)]
        first = output[0] if isinstance(output, tuple) else output
        before = sites[place].before
        if before is None or before.shape != first.shape:
            seen.setdefault(place, []).append(first.detach())
            return None
        if place in seen:
            return None  # a repeated call of the layer
        error = (first.detach() - before).double().norm() / before.double().norm()
        seen[place] = [float(error)]
        return (before, *output[1:]) if isinstance(output, tuple) else before

    hooks = [module.register_forward_hook(note) for module in owners]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
