"""The recipe of a swap: plain values from which the same model is built again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from lit_probattn.base.errors import nearest
from lit_probattn.interop.swap.settings import Settings

# Raised when the meaning of a recipe changes.
VERSION = 1
# How a model hands over its heads; see `sites.Way`.
WAYS = ("interface", "function", "written")
# What is said of a layer.
_KEYS = ("class", "heads", "groups", "calls")


def write_recipe(settings: Settings, layers: Mapping[str, RecipeLayer]) -> dict[str, Any]:
    """Return settings, and for every swapped layer its class, its heads and what was done."""
    entries = {
        name: {"class": x.kind, "heads": x.heads, "groups": x.groups, "calls": x.calls}
        for name, x in layers.items()
    }
    return {"version": VERSION, "settings": settings.to_dict(), "layers": entries}


@dataclass(frozen=True)
class RecipeLayer:
    """What a recipe says of one layer.

    Args:
        name: of the layer, for messages.
        kind: its class.
        heads: query heads, key heads and head size before the swap.
        groups: key heads that were joined. None means that all stayed.
        calls: how its forward attends, where cores were put at its calls: `way` (see `sites.Way`),
            `heads` (of queries, keys and values, and the two head sizes) and `cross`. None where
            its projections were exchanged.
        size: key heads of a group, by the settings.

    Raises:
        ValueError: a value is of another form; the message names layer and key.
    """

    name: str
    kind: str
    heads: list[int]
    groups: list[list[int]] | None
    calls: list[dict[str, Any]] | None
    size: int

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str):
            self._refuse("class", "a name", self.kind)
        if not _are_numbers(self.heads, 3) or min(self.heads) < 1:
            self._refuse("heads", "three whole numbers", self.heads)
        query, key, _ = self.heads
        if query % key or key % self.size:
            raise ValueError(
                f"recipe, layer {self.name}, heads: {query} query heads are no multiple of {key} "
                f"key heads, or those none of {self.size}"
            )
        self._check_calls()
        groups, size = self.groups, self.size
        if size == 1:
            if groups is not None:
                self._refuse("groups", "null, as all heads stay", groups)
            return
        if not isinstance(groups, list) or not all(_are_numbers(g, size) for g in groups):
            self._refuse("groups", f"groups of {size} heads", groups)
            return
        if sorted(head for group in groups for head in group) != list(range(key)):
            self._refuse("groups", f"each of 0 to {key - 1} once", groups)

    def _check_calls(self) -> None:
        if self.calls is None:
            return
        if not isinstance(self.calls, list) or not self.calls:
            self._refuse("calls", "null or a list of calls", self.calls)
        for call in self.calls:
            if not isinstance(call, dict) or set(call) != {"way", "heads", "cross"}:
                self._refuse("calls", "way, heads and cross of each", call)
            if call["way"] not in WAYS or not isinstance(call["cross"], bool):
                self._refuse("calls", f"a way among {', '.join(WAYS)}, and cross", call)
            if not _are_numbers(call["heads"], 5) or min(call["heads"]) < 1:
                self._refuse("calls", "five whole numbers of heads", call["heads"])

    def _refuse(self, key: str, expected: str, found: object) -> None:
        raise ValueError(
            f"recipe, layer {self.name}, {key}: expected {expected}, received {found!r}"
        )


def _are_numbers(value: object, count: int) -> bool:
    """Whether a value is a list of so many whole numbers."""
    return isinstance(value, list) and [type(v) for v in value] == [int] * count


def _mapping(where: str, value: object, keys: Collection[str], wanted: str = "") -> dict[str, Any]:
    """Return a value that must be a mapping; with keys, of just these.

    Raises:
        ValueError: it is none, or has other keys.
    """
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{where}: expected a mapping{wanted}, received {value!r}")
    for key in sorted(value.keys() - set(keys)) if keys else ():
        raise ValueError(f"{where}: unknown key {key!r}{nearest(key, keys)}")
    return dict(value)


def read_recipe(recipe: Mapping[str, Any]) -> tuple[Settings, dict[str, RecipeLayer]]:
    """Return the settings and the layers of a recipe.

    Raises:
        ValueError: it is no recipe, one of another version, or a part is of another form.
    """
    missing = {"version", "settings", "layers"} - recipe.keys()
    if missing:
        raise ValueError(f"not a recipe of swap: missing {', '.join(sorted(missing))}")
    if type(recipe["version"]) is not int or recipe["version"] != VERSION:
        raise ValueError(f"the recipe has version {recipe['version']!r}, expected {VERSION}")
    known = [field.name for field in fields(Settings) if field.name != "factory"]
    try:
        settings = Settings(**_mapping("settings", recipe["settings"], known))
    except ValueError as error:
        raise ValueError(f"not a recipe of swap: {error}") from error
    layers = {}
    for name, given in _mapping("recipe, layers", recipe["layers"], (), " of names").items():
        values = _mapping(f"recipe, layer {name}", given, _KEYS)
        missing = set(_KEYS) - values.keys()
        if missing:
            raise ValueError(f"recipe, layer {name}: missing {', '.join(sorted(missing))}")
        parts = (values["class"], values["heads"], values["groups"], values["calls"])
        layers[name] = RecipeLayer(name, *parts, settings.group_size)
    return settings, layers


def check_layers(layers: Mapping[str, RecipeLayer], model: nn.Module) -> None:
    """Refuse a model that is not the one of the recipe.

    Raises:
        ValueError: it names every layer that is missing or of another class.
    """
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    wrong = [
        f"  {name}: the recipe has {layer.kind}, the model {kinds.get(name, 'no such layer')}"
        for name, layer in layers.items()
        if kinds.get(name) != layer.kind
    ]
    if wrong:
        raise ValueError("the recipe is for another model:\n" + "\n".join(wrong))


def check_sizes(layers: Mapping[str, RecipeLayer], heads: Mapping[str, list[int]]) -> None:
    """Refuse layers of other sizes.

    Args:
        layers: of the recipe.
        heads: query heads, key heads and head size of the model's layers.

    Raises:
        ValueError: it names every layer whose heads differ.
    """
    wrong = [
        f"  {name}: the recipe has {layers[name].heads}, the model {found}"
        for name, found in heads.items()
        if found != layers[name].heads
    ]
    if wrong:
        raise ValueError(
            "the recipe is for another model (heads, key heads, head size):\n" + "\n".join(wrong)
        )
