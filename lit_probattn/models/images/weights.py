"""Weights of replaced layers: initialised, copied from timm's layers, or loaded."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lit_probattn.attention.layer import PROJECTIONS, Attention
from lit_probattn.models.images.layers import TokenAttention, WindowAttention

INIT_STD = 0.02
KINDS = ("weight", "bias")


@torch.no_grad()
def draw_weights(layer: Attention) -> None:
    """Initialise the projections as in timm: truncated normal, std 0.02, zero biases."""
    for linear in layer.children():
        if isinstance(linear, nn.Linear):
            nn.init.trunc_normal_(linear.weight, std=INIT_STD)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)


def copy_weights(old: Any, layer: Attention) -> None:
    """Initialise a layer with the projections of the timm layer that it replaces.

    Raises:
        ValueError: see `copy_projections`.
    """
    draw_weights(layer)
    state = {f"qkv.{name}": tensor for name, tensor in old.qkv.state_dict().items()}
    state |= {f"proj.{name}": tensor for name, tensor in old.proj.state_dict().items()}
    copy_projections(state, layer)


@torch.no_grad()
def copy_projections(state: Mapping[str, Tensor], layer: Attention) -> None:
    """Fill the projections of a layer from timm's joint projection.

    If queries or keys have fewer heads than timm's layer, head k of G takes timm's first head j
    with ⌊jG/H⌋ = k: the one that `mixing_init=copy` maps to it.

    Args:
        state: `qkv.weight` (3·H·E, C) in the order queries, keys, values, `proj.weight`
            (C, H·E), and their biases if they exist.

    Raises:
        ValueError: the sizes do not match, or the layer has more than one key per position.
    """
    layout = layer.layout
    if layout.keys_per_head > 1 or layout.value_head_dim != layout.head_dim:
        has = f"{layout.keys_per_head} keys per position"
        if layout.keys_per_head == 1:
            has = f"value heads of size {layout.value_head_dim}"
        raise ValueError(
            f"cannot copy heads of size {layout.head_dim} with one key per position: the new layer "
            f"has {has}; use init=fresh"
        )
    heads, width = layer.num_heads, layer.num_heads * layer.head_dim
    expected = {"qkv.weight": (3 * width, layer.embed_dim), "proj.weight": (layer.embed_dim, width)}
    for name, shape in expected.items():
        if tuple(state[name].shape) != shape:
            raise ValueError(
                f"{name} of the replaced layer has shape {tuple(state[name].shape)}, the new layer "
                f"requires {shape}"
            )
    targets = (layer.query_proj, layer.key_proj, layer.value_proj)
    for kind in KINDS:
        if f"qkv.{kind}" not in state:
            continue
        for part, target in zip(state[f"qkv.{kind}"].chunk(3), targets, strict=True):
            tensor = getattr(target, kind)
            if tensor is not None:
                tensor.copy_(_choose_heads(part, heads, tensor.shape[0] // layer.head_dim))
    for kind in KINDS:
        tensor = getattr(layer.out_proj, kind)
        if tensor is not None and f"proj.{kind}" in state:
            tensor.copy_(state[f"proj.{kind}"])


def _choose_heads(rows: Tensor, num_heads: int, num_kept: int) -> Tensor:
    """Return the rows of the first head of each group: (H·E, …) -> (kept·E, …)."""
    if num_kept > num_heads:
        raise ValueError(
            f"cannot copy {num_heads} heads into {num_kept}: the new layer has more heads; use "
            "init=fresh"
        )
    first = [-(-k * num_heads // num_kept) for k in range(num_kept)]
    return rows.unflatten(0, (num_heads, -1))[first].flatten(0, 1)


def load_timm_state_dict(
    model: nn.Module, state: Mapping[str, Tensor], *, projections: bool = False
) -> list[str]:
    """Load a state dict of the original timm model into a model with replaced attention.

    All parts that were not replaced, and the relative position tables, must be present with their
    shapes. If anything does not match, nothing is loaded.

    Args:
        state: state dict of the timm model with the same name and options.
        projections: also fill the projections of replaced layers, by `copy_projections`.

    Returns:
        Names in the model that kept their values.

    Raises:
        ValueError: the state dict belongs to another model; the message lists differences.
    """
    replaced = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, TokenAttention | WindowAttention)
    }
    own = model.state_dict()
    inside = {name for name in own if any(name.startswith(f"{r}.attention.") for r in replaced)}
    theirs = {f"{r}.{part}.{kind}" for r in replaced for part in ("qkv", "proj") for kind in KINDS}
    _check_same_model(own, state, inside, theirs)
    if projections:
        required = {f"{r}.{part}.weight" for r in replaced for part in ("qkv", "proj")}
        if required - state.keys():
            raise ValueError(f"missing from the state dict: {sorted(required - state.keys())[0]}")
    filled: dict[str, Tensor] = {}  # all of it first: an error leaves the model as it was
    copied = list(replaced) if projections else []
    for name in copied:
        layer, parts = copy.deepcopy(replaced[name].attention), ("qkv", "proj")
        keys = [f"{part}.{kind}" for part in parts for kind in KINDS]
        copy_projections({k: state[f"{name}.{k}"] for k in keys if f"{name}.{k}" in state}, layer)
        filled |= {f"{name}.attention.{key}": value for key, value in layer.state_dict().items()}
    loaded = [name for name in own if name not in inside]
    model.load_state_dict({name: state[name] for name in loaded} | filled, strict=False)
    projected = {f"{r}.attention.{p}.{kind}" for r in copied for p in PROJECTIONS for kind in KINDS}
    return sorted(inside - projected)


def _check_same_model(
    own: Mapping[str, Tensor], state: Mapping[str, Tensor], inside: set[str], theirs: set[str]
) -> None:
    missing = [name for name in own if name not in inside and name not in state]
    extra = [name for name in state if name not in own and name not in theirs]
    shapes = [
        f"{name} {tuple(state[name].shape)} instead of {tuple(own[name].shape)}"
        for name in own
        if name in state and name not in inside and state[name].shape != own[name].shape
    ]
    differences = {"missing": missing, "unexpected": extra, "different shape": shapes}
    if any(differences.values()):
        text = "; ".join(
            f"{kind}: {', '.join(names[:3])}" + (f" and {len(names) - 3} more" * (len(names) > 3))
            for kind, names in differences.items()
            if names
        )
        raise ValueError(f"the state dict belongs to another model: {text}")
