"""Names of variants as in the README: variant, number of heads, number of score maps."""

from __future__ import annotations

import json
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


def variant_name(attention_class: str, options: Mapping[str, Any], heads: Iterable[float]) -> str:
    """Return a name such as `sMGK, 4 heads` or `Hard FiSH, 8 heads from 2 score maps`.

    Args:
        attention_class: name of the layer's class.
        options: arguments of the class.
        heads: numbers of heads that occur; omitted from the name if they vary.
    """
    name = attention_class.removesuffix("Attention")
    name = name.lower() if name[1:].islower() else name
    if options.get("shifted_keys"):
        name = f"s{name}"
    if options.get("mixer") == "mlp":
        name = name.replace("FiSH", "GFiSH")
    if options.get("noise") == "none":
        name = f"Hard {name}"
    if options.get("e_step") == "hard":
        name = f"{name} with hard E-step"
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
