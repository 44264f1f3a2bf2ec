"""The recipe of a swap: plain values from which the same model is built again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lit_probattn.interop.swap.plan import Found, Planned
from lit_probattn.interop.swap.settings import Settings

# Raised when the meaning of a recipe changes.
VERSION = 1


def write_recipe(
    settings: Settings, planned: list[Planned], groups: Mapping[str, list[list[int]] | None]
) -> dict[str, Any]:
    """Return settings, and for every swapped layer its class, its heads and how they were joined.

    Args:
        settings: of the swap.
        planned: the layers.
        groups: key heads that were joined, by the layer's name.
    """
    layers = {
        plan.place.name: {
            "class": type(plan.place.module).__name__,
            "heads": [plan.sizes.num_heads, plan.sizes.num_kv_heads, plan.sizes.head_dim],
            "groups": groups[plan.place.name],
        }
        for plan in planned
    }
    return {"version": VERSION, "settings": settings.to_dict(), "layers": layers}


def read_recipe(recipe: Mapping[str, Any]) -> tuple[Settings, dict[str, dict[str, Any]]]:
    """Return the settings and the layers of a recipe.

    Raises:
        ValueError: it is no recipe, or one of a later version.
    """
    missing = {"version", "settings", "layers"} - recipe.keys()
    if missing:
        raise ValueError(f"not a recipe of swap: missing {', '.join(sorted(missing))}")
    if recipe["version"] != VERSION:
        raise ValueError(f"the recipe has version {recipe['version']}, expected {VERSION}")
    try:
        return Settings(**recipe["settings"]), dict(recipe["layers"])
    except TypeError as error:
        raise ValueError(f"not a recipe of swap: {error}") from error


def check_layers(layers: Mapping[str, dict[str, Any]], found: list[Found]) -> None:
    """Refuse a model that is not the one of the recipe.

    Raises:
        ValueError: it names every layer that is missing or of another class.
    """
    kinds = {f.place.name: type(f.place.module).__name__ for f in found}
    wrong = [
        f"  {name}: the recipe has {layer['class']}, the model {kinds.get(name, 'no such layer')}"
        for name, layer in layers.items()
        if kinds.get(name) != layer["class"]
    ]
    if wrong:
        raise ValueError("the recipe is for another model:\n" + "\n".join(wrong))


def check_sizes(layers: Mapping[str, dict[str, Any]], planned: list[Planned]) -> None:
    """Refuse layers of other sizes.

    Raises:
        ValueError: it names every layer whose heads differ.
    """
    wrong = []
    for plan in planned:
        heads = [plan.sizes.num_heads, plan.sizes.num_kv_heads, plan.sizes.head_dim]
        given = layers[plan.place.name]["heads"]
        if heads != given:
            wrong.append(f"  {plan.place.name}: the recipe has {given}, the model {heads}")
    if wrong:
        raise ValueError(
            "the recipe is for another model (heads, key heads, head size):\n" + "\n".join(wrong)
        )
