"""What every host must keep: outputs, gradients, similar heads, dropout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import lit_probattn
from lit_probattn.interop.swap.discovery.sites import Rows
from lit_probattn.interop.swap.report import Report

Call = Callable[[nn.Module], Tensor]
TIGHT = {"rtol": 1e-9, "atol": 1e-9}


def swapped(model: nn.Module, *arguments: Any, **options: Any) -> tuple[nn.Module, Report]:
    """A swapped copy; the model stays as it is."""
    return lit_probattn.swap(copy.deepcopy(model), *arguments, **options)


def gradients(
    model: nn.Module, call: Call, report: Report | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """An output, and the gradients of a function of it that mixes all its entries.

    Those of a key's components are summed: what the host's own weight would have.
    """
    model.zero_grad()
    output = call(model)
    output.sin().sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for name, index, call_entry in calls_of(report):
        module: Any = model.get_submodule(name)
        core = module.cores.core(index)
        made, layout = call_entry["projections"], core.layout
        times = layout.keys_per_head
        for part, own in (("weights", "key_weight"), ("biases", "key_bias")):
            if made is None or "key" not in made[part]:
                continue
            rows = Rows(**made[part]["key"])
            grad = grads[rows.parameter].movedim(rows.axis, 0)
            if call_entry["exchanged"]:
                start, count = rows.starts[0], layout.key * times * layout.head_dim
                parts = grad[start : start + count].unflatten(0, (layout.key, times, -1))
                new = [grad[:start], parts.sum(1).flatten(0, 1), grad[start + count :]]
                grad = torch.cat(new)
            elif times > 1:
                more = getattr(core, own).grad.movedim(1 + rows.axis, 1).sum(0)
                grad = grad.index_add(0, torch.tensor(rows.all()), more)
            grads[rows.parameter] = grad.movedim(0, rows.axis)
    return output.detach(), grads


def calls_of(report: Report | None) -> list[tuple[str, int, dict[str, Any]]]:
    """Every call of a recipe: name of the module, index and entry."""
    layers = {} if report is None else report.recipe["layers"]
    return [(n, i, c) for n, layer in layers.items() for i, c in enumerate(layer["calls"])]


def assert_same_model(
    old: nn.Module,
    new: nn.Module,
    call: Call,
    tolerance: dict[str, float] = TIGHT,
    report: Report | None = None,
) -> None:
    """Outputs are equal, and the gradients of all weights of the host."""
    before, old_grads = gradients(old, call)
    after, new_grads = gradients(new, call, report)
    torch.testing.assert_close(after, before, **tolerance)
    assert len(old_grads) >= 2
    for name, grad in old_grads.items():
        torch.testing.assert_close(new_grads[name], grad, msg=name, **tolerance)
    with torch.no_grad():  # the paths of inference
        torch.testing.assert_close(call(new), before, **tolerance)


def make_pairs_equal(model: nn.Module, call: Call, pairs: list[tuple[int, int]], **more) -> None:
    """Give the second key head of every pair the maps of the first, its query heads too.

    Then joining the pairs loses nothing, whatever the output projection makes of them.
    """
    _, report = swapped(model, "mgk", example=call, **more)
    for _, _, entry in calls_of(report):
        made = entry["projections"]
        every = [
            (role, rows) for part in ("weights", "biases") for role, rows in made[part].items()
        ]
        for role, given in every:
            if role == "out":
                continue
            rows = Rows(**given)
            each = len(rows.starts) // len(made["weights"]["key"]["starts"])
            held = model.get_parameter(rows.parameter).data
            for first, second in pairs:
                for i in range(each):
                    one, other = (torch.tensor(rows.of(h * each + i)) for h in (first, second))
                    held.index_copy_(rows.axis, other, held.index_select(rows.axis, one))


def assert_trains_in_one_graph(model: nn.Module, call: Call) -> None:
    """Compiled and eager training draw alike, gradients too; another seed draws otherwise."""
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = []
    for function, seed in ((model, 4), (compiled, 4), (compiled, 5)):
        model.zero_grad()
        torch.manual_seed(seed)
        out = call(function)
        out.square().mean().backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append((out.detach(), grads))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-8)
    assert not torch.allclose(found[2][0], found[1][0], rtol=1e-3)
