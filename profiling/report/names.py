"""Names of variants as in the README: variant, number of heads, number of score maps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from lit_probattn.records.tables import counted

# Axes of the grid of a sweep, their labels in figures, and their letters.
AXES = {
    "embed_dim": "model width D (embedding dimension)",
    "seq_len": "sequence length N (tokens)",
    "grid_heads": "heads of the baseline",
}
LETTERS = {"embed_dim": "D", "seq_len": "N", "grid_heads": "heads"}
# Scopes of costs as in reports.
SCOPES = {"attention": "attention layer", "layers": "block", "model": "model"}
_MIXED = {"mlp": "GFiSH", "relu_sum": "GFiSH", "shared": "MiSH"}
_E_STEPS = {"hard": "hard E-step", "soft": "Soft-E"}


def variant_name(attention_class: str, options: Mapping[str, Any], heads: Iterable[float]) -> str:
    """Return a name such as `sMGK, 4 heads` or `Hard FiSH, 8 heads from 2 score maps`.

    Args:
        attention_class: name of the layer's class.
        options: arguments of the class.
        heads: numbers of heads that occur; omitted from the name if they vary.
    """
    name = attention_class.removesuffix("Attention")
    name = name.lower() if name[1:].islower() else name
    if name == "softmax" and options.get("score") == "gaussian":
        name = "Gaussian"
    if options.get("shifted_keys"):
        name = f"s{name}"
    name = name.replace("FiSH", _MIXED.get(str(options.get("mixer")), "FiSH"))
    if options.get("noise") == "none":
        name = f"Hard {name}"
    if step := _E_STEPS.get(str(options.get("e_step"))):
        name = f"{name} with {step}"
    several = sorted(set(heads))
    if len(several) != 1:
        return name
    maps = options.get("num_global_heads")
    mixed = f" from {counted(int(maps), 'score map')}" if maps is not None else ""
    return f"{name}, {counted(int(several[0]), 'head')}{mixed}"


def name_of(variant: Mapping[str, str], heads_vary: bool = False) -> str:
    """Return the name of a variant from its entry in `report.json`."""
    options = json.loads(variant["attention_args"])
    heads = [] if heads_vary or "num_heads" not in options else [options["num_heads"]]
    return variant_name(variant["attention_class"], options, heads)


def told_apart(names: Mapping[str, str]) -> dict[str, str]:
    """Return names by variant; if several variants have one name, each is followed by its key.

    Args:
        names: names by the variants' keys, such as `mgk4`.
    """
    counts = Counter(names.values())
    return {key: f"{name} ({key})" if counts[name] > 1 else name for key, name in names.items()}
