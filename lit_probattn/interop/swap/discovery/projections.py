"""Weights that compute the heads of an attention call, and the weight that reads its results.

A weight row contributes to a head exactly if the head's gradient is nonzero there. The output
projection is the product that receives the results of a call: in a run in which every element of
head h is h + 1, its input contains these numbers in the order of its columns.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lit_probattn.base.errors import UnsupportedError
from lit_probattn.base.torch_internals import outside_functions
from lit_probattn.interop.swap.discovery.sites import ROLES, Projections, Rows, Site
from lit_probattn.interop.weights import RotaryPairs

# Functions that multiply by a weight: index of the multiplied argument, index of the weight, and
# axis of the weight's inputs.
PRODUCTS = {
    F.linear: (0, 1, 1),
    torch.addmm: (1, 2, 0),
    torch.matmul: (0, 1, 0),
    torch.Tensor.matmul: (0, 1, 0),
    torch.Tensor.__matmul__: (0, 1, 0),
}


def find_makers(site: Site, names: dict[int, str]) -> Projections:
    """Return the rows that compute queries, keys and values of a call, without `out`.

    Args:
        site: a call whose heads have their graph.
        names: names of all parameters, by identity.

    Raises:
        UnsupportedError: the rows cannot be determined.
    """
    owned = [p for p in site.module.parameters() if p.requires_grad]
    weights, biases = {}, {}
    with outside_functions():
        repeats = _unrepeat(site)
        for role in ROLES:
            weights[role], bias = _rows_of(role, site.inputs[role], owned, names)
            if bias is not None:
                biases[role] = bias
        key = next(p for p in owned if names[id(p)] == weights["key"].parameter)
        rotary, fixed = _rotation(site, key, weights["key"])
    return Projections(weights, biases, rotary, fixed, repeats)


def _unrepeat(site: Site) -> int:
    """Reduce repeated key heads to one each, if a host repeats them for its query heads."""
    key, value = site.inputs["key"], site.inputs["value"]
    equal = [torch.equal(key[:, 0], head) for head in key.unbind(1)]
    times = (*equal, False).index(False)
    heads = key.shape[1]
    if times == 1 or heads % times or value.shape[1] != heads:
        return 1
    for tensor in (key, value):
        if not torch.equal(tensor[:, ::times].repeat_interleave(times, 1), tensor):
            return 1
    site.inputs |= {"key": key[:, ::times], "value": value[:, ::times]}
    site.layout = replace(site.layout, key=heads // times, value=heads // times)
    return times


def _rows_of(
    role: str, heads: Tensor, owned: Sequence[Tensor], names: dict[int, str]
) -> tuple[Rows, Rows | None]:
    """Return the rows of the weight and the bias that compute heads (B, H, N, E)."""
    if not heads.requires_grad or not owned:
        raise UnsupportedError(f"its {role} heads are not computed by a weight of the module")
    generator = torch.Generator().manual_seed(0)
    supports: list[list[Tensor | None]] = []
    for head in heads.unbind(1):
        factors = torch.randn(head.shape, generator=generator).to(head)
        grads = torch.autograd.grad(
            (head * factors).sum(), owned, retain_graph=True, allow_unused=True
        )
        supports.append([None if g is None or not bool(g.any()) else g != 0 for g in grads])
    found: dict[bool, list[Rows]] = {True: [], False: []}
    for index, parameter in enumerate(owned):
        touched = [support[index] for support in supports]
        if all(t is None for t in touched):
            continue
        name, size = names[id(parameter)], heads.shape[-1]
        rows = None
        if parameter.dim() == 2 or (parameter.dim() == 1 and "bias" in name):
            rows = _disjoint_rows(name, touched, size)
        if rows is not None:
            found[parameter.dim() == 2].append(rows)
        elif any(
            t is None or touched[0] is None or not bool((t & touched[0]).any()) for t in touched
        ):  # parameters before the projections affect all heads equally
            raise UnsupportedError(f"{name} also affects its {role} heads, in an unknown way")
    if len(found[True]) != 1 or len(found[False]) > 1:
        those = [rows.parameter for both in found.values() for rows in both]
        told = f"{', '.join(those)}" if those else "no rows of a weight belong to only one head"
        raise UnsupportedError(f"the weight of its {role} heads is not unique: {told}")
    return found[True][0], next(iter(found[False]), None)


def _disjoint_rows(name: str, touched: Sequence[Tensor | None], size: int) -> Rows | None:
    """Return the rows of heads if each has as many rows as dimensions and heads share none."""
    for axis in range(2):
        heads = []
        for support in touched:
            if support is None or axis >= support.dim():
                return None
            rows = support if support.dim() == 1 else support.any(1 - axis)
            heads.append(rows.nonzero().flatten().tolist())
        flat = [row for head in heads for row in head]
        if any(len(head) != size for head in heads) or len(set(flat)) != len(flat):
            continue
        step = heads[0][1] - heads[0][0] if size > 1 else 1
        found = Rows(name, axis, tuple(head[0] for head in heads), step, size)
        if found.all() == flat:
            return found
    return None


def _rotation(site: Site, weight: Tensor, rows: Rows) -> tuple[RotaryPairs | None, str]:
    """Return the pairs of dimensions that are rotated, and why heads cannot be joined, if so.

    The last key's dimension e depends only on row e without rotation, and also on the row of its
    partner with rotation. With a norm after the projection, every dimension depends on all rows,
    and the host's configuration decides.
    """
    key, size = site.inputs["key"], rows.size
    tables: list[Tensor] = []
    for head in {0: 0, 1: key.shape[1] - 1}.values():
        last = key[0, head, -1]
        grads = [
            torch.autograd.grad(entry, weight, retain_graph=True)[0].index_select(
                rows.axis, torch.tensor(rows.of(head), device=weight.device)
            )
            for entry in last.unbind()
        ]
        table = torch.stack(grads)  # (entries, …)
        tables.append(table if rows.axis == 0 else table.mT)
    touched = (tables[0] != 0).any(-1)  # (entries, rows)
    alone = torch.eye(size, dtype=torch.bool, device=touched.device)
    if torch.equal(touched, alone):
        return None, ""
    partners = alone.view(size, -1, 2).any(-1) if size % 2 == 0 else alone
    forms: dict[RotaryPairs, Tensor] = {
        "halves": alone.roll(size // 2, 1) | alone,
        "neighbours": partners.repeat_interleave(2, 1),
    }
    for name, pairs in forms.items():
        if torch.equal(touched, pairs):
            bound = 1e-6 * float(tables[0].abs().max())
            if not torch.allclose(tables[0], tables[1], rtol=1e-3, atol=bound):
                return name, "each of its heads is rotated by separate angles"
            return name, ""
    if bool(touched.all()):
        return _named_rotation(site.module)
    return None, "only some of its dimensions are rotated"


def _named_rotation(module: Any) -> tuple[RotaryPairs | None, str]:
    """Return the rotated pairs of a host of transformers or timm, from its attributes."""
    if "position_embeddings" in inspect.signature(module.forward).parameters:
        given = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
        kinds = [given, *(v for v in given.values() if isinstance(v, dict))]
        if any(kind.get("partial_rotary_factor", 1.0) != 1.0 for kind in kinds):
            return "halves", "only some of its dimensions are rotated"
        return "halves", ""
    if hasattr(module, "num_prefix_tokens"):
        return ("halves" if getattr(module, "rotate_half", False) else "neighbours"), ""
    return None, ""


def reader_in(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], site: Site, names: dict[int, str]
) -> Rows | None:
    """Return the columns of a weight by which a function multiplies marked heads, or None.

    Raises:
        UnsupportedError: marked heads are multiplied by something other than a parameter.
    """
    if func not in PRODUCTS:
        return None
    at, weight_at, axis = PRODUCTS[func]
    given = dict(enumerate(args))
    if func is F.linear:
        given.setdefault(1, kwargs.get("weight"))
    x, weight = given.get(at), given.get(weight_at)
    heads, size = site.layout.out, site.layout.value_head_dim
    if not isinstance(x, Tensor) or x.shape[-1:] != (heads * size,) or x.dim() < 2:
        return None
    rows = x.detach().reshape(-1, heads * size)
    marks = rows[0].float()
    columns = [(marks == head + 1).nonzero().flatten().tolist() for head in range(heads)]
    if any(len(c) != size for c in columns) or not bool((rows == rows[:1]).all()):
        return None
    if id(weight) not in names:
        raise UnsupportedError("its heads are not multiplied by a parameter")
    step = columns[0][1] - columns[0][0] if size > 1 else 1
    found = Rows(names[id(weight)], axis, tuple(c[0] for c in columns), step, size)
    return found if found.all() == [c for head in columns for c in head] else None


def check_holders(model: nn.Module, site: Site, found: Projections) -> None:
    """Raise for weights of modules that do more than multiply.

    Raises:
        UnsupportedError: there is one; the message names the module's class.
    """
    for rows in found.weights.values():
        path, _, own = rows.parameter.rpartition(".")
        holder: Any = model.get_submodule(path)
        if holder is site.module or not own.startswith("weight"):
            continue
        kind = type(holder)
        is_conv1d = kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")
        if kind.forward is not nn.Linear.forward and not is_conv1d:
            name = path.removeprefix(f"{site.name}.")
            raise UnsupportedError(f"{name} is {kind.__name__}, expected torch.nn.Linear")
