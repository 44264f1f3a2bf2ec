"""Layer-specific attention: a variant, a number of heads, a head size for each layer of a model.

    attention:
      default: {class_path: lit_probattn.attention.MGKAttention, init_args: {num_heads: 4}}
      layers:
        0: {num_heads: 8, head_dim: 16}   # the default with other arguments
        3: {class_path: lit_probattn.attention.SoftmaxAttention, init_args: {num_heads: 8}}

`in_full` expands this to the `PerLayer` that configurations store.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

from lit_probattn.attention.layer import Attention, AttentionFactory

CLASS_PATH = "lit_probattn.models.per_layer.PerLayer"


class PerLayer(Attention):
    """Attention of a model with layer-specific settings; see `layer_factories`.

    Subclasses `Attention` only so that configuration parsing accepts it; never instantiated. The
    model builds its layers from the arguments.

    Args:
        embed_dim: C, input and output width.
        head_dim: E, size of one head.
        default: factory of the layers that are not in `layers`.
        layers: factories by layer index, from 0.
        head_dims: E by layer index, which overrides the model's.

    Raises:
        ValueError: always, since it cannot be a single layer.
    """

    def __init__(
        self,
        embed_dim: int,
        *,
        default: AttentionFactory,
        layers: dict[int, AttentionFactory] | None = None,
        head_dims: dict[int, int] | None = None,
        head_dim: int | None = None,
    ) -> None:
        raise ValueError(
            "attention by layers requires a model that indexes its layers: set a single attention "
            "here"
        )


def per_layer(
    default: AttentionFactory,
    layers: dict[int, AttentionFactory] | None = None,
    head_dims: dict[int, int] | None = None,
) -> AttentionFactory:
    """Return the factory of a model with layer-specific attention; see `PerLayer`."""
    return partial(PerLayer, default=default, layers=layers, head_dims=head_dims)


def layer_factories(attention: AttentionFactory, num_layers: int) -> list[AttentionFactory]:
    """Return the factory of each of a model's attention layers.

    Args:
        attention: one factory for all layers, or a `PerLayer`, possibly with further arguments.
        num_layers: number of layers of the model.

    Raises:
        ValueError: the attention has an entry for a layer that the model does not have, or a head
            size below 1.
    """
    if not isinstance(attention, partial):
        return [attention] * num_layers
    if PerLayer in (attention.func, *attention.args):
        return _numbered(num_layers, **attention.keywords)
    if attention.args:
        return [attention] * num_layers
    made = layer_factories(attention.func, num_layers)
    return [partial(layer, **attention.keywords) for layer in made]


def differs_by_layer(attention: AttentionFactory | None) -> bool:
    """Whether a factory is a `PerLayer`, possibly with further arguments."""
    if not isinstance(attention, partial):
        return False
    return PerLayer in (attention.func, *attention.args) or differs_by_layer(attention.func)


def _numbered(
    num_layers: int,
    default: AttentionFactory,
    layers: Mapping[int, AttentionFactory] | None = None,
    head_dims: Mapping[int, int] | None = None,
    **overrides: Any,
) -> list[AttentionFactory]:
    layers, head_dims = layers or {}, head_dims or {}
    beyond = sorted({*layers, *head_dims} - set(range(num_layers)))
    if beyond:
        there = "1 layer, index 0" if num_layers == 1 else f"{num_layers} layers, indexed from 0"
        raise ValueError(
            f"attention is set for layer{'s' if len(beyond) > 1 else ''} "
            f"{', '.join(map(str, beyond))}, but the model has {there}"
        )
    factories = []
    for number in range(num_layers):
        made: AttentionFactory = partial(layers.get(number, default), **overrides)
        factories.append(_sized(made, head_dims[number]) if number in head_dims else made)
    return factories


def _sized(attention: AttentionFactory, own: int) -> AttentionFactory:
    """Return a factory of layers with head size `own`."""
    if own < 1:
        raise ValueError(f"head_dim of a layer must be at least 1, received {own}")

    def make(embed_dim: int, *, head_dim: int | None = None, **overrides: Any) -> Attention:
        return attention(embed_dim, head_dim=own, **overrides)

    return make


def attention_entries(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the attention entries (class path and arguments) of a configuration, in order."""
    if entry.get("class_path") != CLASS_PATH:
        return [entry]
    arguments = entry["init_args"]
    layers = arguments.get("layers") or {}
    return [arguments["default"], *(layers[number] for number in sorted(layers, key=int))]


def in_full(entry: Any) -> Any:
    """Expand the short form of a `PerLayer` to class path and arguments; otherwise unchanged.

    Raises:
        ValueError: a key, a layer or a layer's entry is invalid.
    """
    if not isinstance(entry, Mapping) or "default" not in entry or "class_path" in entry:
        return entry
    unknown = sorted(set(entry) - {"default", "layers"})
    if unknown:
        raise ValueError(
            "attention by layers supports the keys default and layers, received "
            f"{', '.join(unknown)}"
        )
    default = entry["default"]
    if not isinstance(default, Mapping) or "class_path" not in default:
        raise ValueError("attention.default must be an attention: class_path and init_args")
    given = entry.get("layers") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"attention.layers must map layer indices, received {given!r}")
    layers: dict[int, Any] = {}
    head_dims: dict[int, int] = {}
    for key, changes in given.items():
        number = _number(key)
        if not isinstance(changes, Mapping):
            raise ValueError(
                f"attention.layers.{number} must be an attention or arguments of the default, "
                f"received {changes!r}"
            )
        layers[number], head_dim = _layer(number, default, changes)
        if head_dim is not None:
            head_dims[number] = head_dim
    arguments = {"default": copy.deepcopy(dict(default)), "layers": layers, "head_dims": head_dims}
    return {"class_path": CLASS_PATH, "init_args": arguments}


def _number(key: Any) -> int:
    text = str(key)
    if not text.isdecimal():
        raise ValueError(f"attention.layers: keys must be layer indices from 0, received {key!r}")
    return int(text)


def _layer(
    number: int, default: Mapping[str, Any], changes: Mapping[str, Any]
) -> tuple[dict[str, Any], int | None]:
    """Return a layer's expanded attention, and its head size if it has one."""
    if "class_path" in changes:
        unknown = sorted(set(changes) - {"class_path", "init_args", "head_dim"})
        if unknown:
            raise ValueError(
                f"attention.layers.{number}: with class_path, only init_args and head_dim are "
                f"supported, received {', '.join(unknown)}"
            )
        made = {key: copy.deepcopy(changes[key]) for key in changes if key != "head_dim"}
        return made, changes.get("head_dim")
    own = {key: copy.deepcopy(value) for key, value in changes.items() if key != "head_dim"}
    arguments = {**copy.deepcopy(dict(default.get("init_args") or {})), **own}
    return {"class_path": default["class_path"], "init_args": arguments}, changes.get("head_dim")
