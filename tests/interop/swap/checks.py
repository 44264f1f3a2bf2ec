"""What every host must keep: outputs, gradients, similar heads, dropout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import lit_probattn
from lit_probattn.interop.swap.plan import find_layers
from lit_probattn.interop.swap.report import Report

Call = Callable[[nn.Module], Tensor]
TIGHT = {"rtol": 1e-9, "atol": 1e-9}


def swapped(model: nn.Module, *arguments: Any, **options: Any) -> tuple[nn.Module, Report]:
    """A swapped copy; the model stays as it is."""
    return lit_probattn.swap(copy.deepcopy(model), *arguments, **options)


def gradients(model: nn.Module, call: Call) -> tuple[Tensor, dict[str, Tensor]]:
    """An output, and the gradients of a function of it that mixes all its entries."""
    model.zero_grad()
    output = call(model)
    output.sin().sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return output.detach(), grads


def assert_same_model(
    old: nn.Module, new: nn.Module, call: Call, tolerance: dict[str, float] = TIGHT
) -> None:
    """Outputs are equal, and the gradients of all that both have: what is around attention too.

    Gradients of projections that have other shapes are left to `assert_same_projections`.
    """
    before, old_grads = gradients(old, call)
    after, new_grads = gradients(new, call)
    torch.testing.assert_close(after, before, **tolerance)
    both = [n for n, g in old_grads.items() if n in new_grads and new_grads[n].shape == g.shape]
    assert len(both) >= 2
    for name in both:
        torch.testing.assert_close(new_grads[name], old_grads[name], msg=name, **tolerance)
    with torch.no_grad():  # the paths of inference
        torch.testing.assert_close(call(new), before, **tolerance)


def assert_same_projections(
    old: nn.Module, new: nn.Module, call: Call, tolerance: dict[str, float] = TIGHT
) -> None:
    """The gradients inside attention are equal, those of a key's components in sum.

    Read through the hosts, so that fused and separate projections compare.
    """
    found = []
    for model in (old, new):
        gradients(model, call)
        found.append({f.place.name: f for f in find_layers(model)})
    assert found[0].keys() == found[1].keys()
    for name, one in found[0].items():
        grads = (
            projection_gradients(one.place.module),
            projection_gradients(found[1][name].place.module),
        )
        for before, after in zip(*grads, strict=True):
            assert before.norm() > 0
            if before.shape != after.shape:  # (H·K·E, C): the components of every head
                sizes = (old_heads(one.place.module), 2, -1)
                after = after.unflatten(0, sizes).sum(1).flatten(0, 1)
            torch.testing.assert_close(after, before, msg=name, **tolerance)


def old_heads(layer: Any) -> int:
    for name in ("num_kv_heads", "num_heads", "num_attention_heads", "n_heads"):
        if hasattr(layer, name):
            return int(getattr(layer, name))
    config = layer.config
    return int(getattr(config, "num_key_value_heads", config.num_attention_heads))


def projection_gradients(layer: Any) -> list[Tensor]:
    """Gradients of query, key and value weights, whoever holds them."""
    layer = getattr(layer, "layer", layer)
    if isinstance(layer, nn.MultiheadAttention) and layer.in_proj_weight is None:
        parts = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
        return [part.grad for part in parts]
    joint = getattr(layer, "in_proj_weight", None)
    if joint is None:
        joint = getattr(getattr(layer, "qkv", None), "weight", None)
    if joint is not None:
        return list(joint.grad.chunk(3))
    for names in (
        ("query_proj", "key_proj", "value_proj"),
        ("q_proj", "k_proj", "v_proj"),
        ("query", "key", "value"),
        ("q", "k", "v"),
    ):
        if hasattr(layer, names[0]):
            return [getattr(layer, name).weight.grad for name in names]
    sizes = layer.split_size  # GPT-2
    return list(layer.c_attn.weight.grad.T.split(sizes))


def make_pairs_equal(model: nn.Module, pairs: list[tuple[int, int]]) -> None:
    """Give the second key head of every pair the maps of the first, its query heads too.

    Then joining the pairs loses nothing, whatever the output projection makes of them.
    """
    with torch.no_grad():
        for found in find_layers(model):
            layer: Any = found.place.module
            sizes = found.host.sizes(found.place)
            for rows, heads in projection_rows(layer, sizes.num_heads, sizes.num_kv_heads):
                by_head = rows.unflatten(0, (sizes.num_kv_heads, heads, -1))
                for first, second in pairs:
                    by_head[second] = by_head[first].clone()


def projection_rows(layer: Any, heads: int, kv: int) -> list[tuple[Tensor, int]]:
    """Weights and biases of queries, keys and values as views, heads of each per key head."""
    groups = (heads // kv, 1, 1)
    joint = []
    if getattr(layer, "in_proj_weight", None) is not None:
        joint = [layer.in_proj_weight, layer.in_proj_bias]
    elif getattr(layer, "qkv", None) is not None:
        joint = [layer.qkv.weight, layer.qkv.bias]
    elif hasattr(layer, "c_attn"):
        joint = [layer.c_attn.weight.T, layer.c_attn.bias]
    rows = []
    for tensor in joint:
        if tensor is not None:
            rows += list(zip(tensor.chunk(3), groups, strict=True))
    if not joint:
        names = next(
            names
            for names in (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), "qkv")
            if hasattr(layer, names[0])
        )
        for name, size in zip(names, groups, strict=True):
            linear = getattr(layer, name)
            rows += [(t, size) for t in (linear.weight, linear.bias) if t is not None]
    extra = ((getattr(layer, "q_bias", None), 1), (getattr(layer, "v_bias", None), 1))
    return rows + [(t, size) for t, size in extra if t is not None]


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
