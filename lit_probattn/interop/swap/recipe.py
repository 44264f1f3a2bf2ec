"""The recipe of a swap: plain values from which the same model is built again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, NoReturn, get_args

from torch import nn

from lit_probattn.base.errors import nearest, prefixed
from lit_probattn.interop.swap.discovery.sites import Projections, Way
from lit_probattn.interop.swap.settings import Settings

# Increased when the meaning of a recipe changes.
VERSION = 1
WAYS = get_args(Way)
# Keys of a layer, and of a call in its forward.
_KEYS = ("class", "calls")
_CALL_KEYS = ("way", "heads", "cross", "width", "groups", "exchanged", "projections")


def write_recipe(settings: Settings, layers: Mapping[str, RecipeLayer]) -> dict[str, Any]:
    """Return settings, and class, calls and changes of every swapped layer."""
    entries = {name: {"class": x.kind, "calls": x.calls} for name, x in layers.items()}
    return {"version": VERSION, "settings": settings.to_dict(), "layers": entries}


@dataclass(frozen=True)
class RecipeLayer:
    """The entry of one layer in a recipe.

    Args:
        name: name of the layer, for messages.
        kind: its class.
        calls: attention calls of its forward: `way` (see `Way`), `heads` (of queries, keys and
            values, and the two head sizes), `cross` and `width` (see `Site`); `groups` of merged
            key heads (or None), whether widths were `exchanged`, and the `projections` (None
            if unchanged).
        size: key heads per group, from the settings.
        has_components: whether projections change, from the settings.

    Raises:
        ValueError: a value is invalid; the message names layer and key.
    """

    name: str
    kind: str
    calls: list[dict[str, Any]]
    size: int
    has_components: bool

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str):
            self._refuse("class", "a name", self.kind)
        if not isinstance(self.calls, list) or not self.calls:
            self._refuse("calls", "a list of calls", self.calls)
        for call in self.calls:
            self._check_call(call)

    @property
    def projections(self) -> list[Projections | None]:
        """The weights that compute and read the heads of each call."""
        every = [call["projections"] for call in self.calls]
        return [None if given is None else Projections.from_dict(given) for given in every]

    def _check_call(self, call: Any) -> None:
        if not isinstance(call, dict) or set(call) != set(_CALL_KEYS):
            self._refuse("calls", f"{', '.join(_CALL_KEYS)} of each", call)
        if call["way"] not in WAYS:
            self._refuse("way", f"one of {', '.join(WAYS)}", call["way"])
        for key in ("cross", "exchanged"):
            if not isinstance(call[key], bool):
                self._refuse(key, "true or false", call[key])
        if not _are_numbers([call["width"]], 1) or call["width"] < 0:
            self._refuse("width", "a whole number", call["width"])
        heads = call["heads"]
        if not _are_numbers(heads, 5) or min(heads) < 1:
            self._refuse("heads", "five whole numbers", heads)
        query, key_heads = heads[:2]
        if self.has_components and (query % key_heads or key_heads % self.size):
            raise ValueError(
                f"recipe, layer {self.name}, heads: {query} query heads are no multiple of "
                f"{key_heads} key heads, or these no multiple of {self.size}"
            )
        self._check_groups(call["groups"], key_heads)
        if (call["projections"] is not None) != self.has_components:
            self._refuse("projections", "a value as in the settings", call["projections"])
        if self.has_components:
            try:
                Projections.from_dict(call["projections"])
            except (TypeError, KeyError, AttributeError):
                self._refuse("projections", "rows of weights and biases", call["projections"])

    def _check_groups(self, groups: Any, key_heads: int) -> None:
        size = self.size
        if size == 1:
            if groups is not None:
                self._refuse("groups", "null, because all heads are kept", groups)
            return
        if not isinstance(groups, list) or not all(_are_numbers(g, size) for g in groups):
            self._refuse("groups", f"groups of {size} heads", groups)
        if sorted(head for group in groups for head in group) != list(range(key_heads)):
            self._refuse("groups", f"each of 0 to {key_heads - 1} once", groups)

    def _refuse(self, key: str, expected: str, found: object) -> NoReturn:
        raise ValueError(
            f"recipe, layer {self.name}, {key}: expected {expected}, received {found!r}"
        )


def _are_numbers(value: object, count: int) -> bool:
    return isinstance(value, list) and [type(v) for v in value] == [int] * count


def _mapping(where: str, value: object, keys: Collection[str], wanted: str = "") -> dict[str, Any]:
    """Return a value that must be a mapping; with keys, only of these.

    Raises:
        ValueError: it is not a mapping, or has other keys.
    """
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{where}: expected a mapping{wanted}, received {value!r}")
    for key in sorted(value.keys() - set(keys)) if keys else ():
        raise ValueError(f"{where}: unknown key {key!r}{nearest(key, keys)}")
    return dict(value)


def read_recipe(recipe: Mapping[str, Any]) -> tuple[Settings, dict[str, RecipeLayer]]:
    """Return the settings and the layers of a recipe.

    Raises:
        ValueError: it is not a recipe, has another version, or a part is invalid.
    """
    missing = {"version", "settings", "layers"} - recipe.keys()
    if missing:
        raise ValueError(f"not a recipe of swap: missing {', '.join(sorted(missing))}")
    if type(recipe["version"]) is not int or recipe["version"] != VERSION:
        raise ValueError(f"the recipe has version {recipe['version']!r}, expected {VERSION}")
    known = [field.name for field in fields(Settings) if field.name != "factory"]
    with prefixed("not a recipe of swap", ValueError, to=ValueError):
        settings = Settings(**_mapping("settings", recipe["settings"], known))
    layers = {}
    for name, given in _mapping("recipe, layers", recipe["layers"], (), " of names").items():
        values = _mapping(f"recipe, layer {name}", given, _KEYS)
        missing = set(_KEYS) - values.keys()
        if missing:
            raise ValueError(f"recipe, layer {name}: missing {', '.join(sorted(missing))}")
        more = (settings.group_size, settings.keys_per_head > 1)
        layers[name] = RecipeLayer(name, values["class"], values["calls"], *more)
    return settings, layers


def check_layers(layers: Mapping[str, RecipeLayer], model: nn.Module) -> None:
    """Raise if a model does not match a recipe.

    Raises:
        ValueError: the message names each layer that is missing, has a different class, or lacks
            weights.
    """
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    shapes = {name: list(p.shape) for name, p in model.named_parameters()}
    wrong = []
    for name, layer in layers.items():
        if kinds.get(name) != layer.kind:
            found = kinds.get(name, "no such layer")
            wrong.append(f"  {name}: the recipe has {layer.kind}, the model {found}")
            continue
        for made in layer.projections:
            every = [] if made is None else [*made.weights.values(), *made.biases.values()]
            for rows in every:
                shape = shapes.get(rows.parameter)
                if shape is None or len(shape) <= rows.axis or shape[rows.axis] <= max(rows.all()):
                    wrong.append(f"  {name}: {rows.parameter} is {shape or 'missing'} in the model")
    if wrong:
        raise ValueError("the recipe is for another model:\n" + "\n".join(wrong))
