"""Names of variants as in the README: variant, number of heads, number of score maps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from lit_probattn.records.figures import readable
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
_FEATURES = {"favor": "FAVOR", "dpfp": "DPFP", "relu": "linear with ReLU"}
_E_STEPS = {"hard": "hard E-step", "soft": "Soft-E"}


def variant_name(attention_class: str, options: Mapping[str, Any], heads: Iterable[float]) -> str:
    """Return a name such as `sMGK, 4 heads` or `Hard FiSH, 8 heads from 2 score maps`.

    Args:
        attention_class: name of the layer's class.
        options: arguments of the class.
        heads: numbers of heads that occur; omitted from the name if they vary.
    """
    name = attention_class.removesuffix("Attention").replace("LinearFiSH", "LFiSH")
    name = name.lower() if name[1:].islower() else name
    if name == "softmax" and options.get("score") == "gaussian":
        name = "Gaussian"
    if name == "linear":
        name = _FEATURES.get(str(options.get("feature_map")), name)
    if options.get("shifted_keys"):
        name = f"s{name}"
    if name.endswith("MGK") and options.get("score") == "dot":
        name = f"softmax {name}"
    if options.get("mixer") in ("mlp", "relu_sum"):
        name = f"G{name}"
    if options.get("mixer") == "shared":
        name = name.replace("FiSH", "MiSH")
    if options.get("noise") == "none":
        name = f"Hard {name}"
    if step := _E_STEPS.get(str(options.get("e_step"))):
        name = f"{name} with {step}"
    if options.get("learn_variance"):
        name = f"{name} with learned variance"
    if options.get("num_kv_heads") == 1 and options.get("num_heads") != 1:
        name = "multi-query" if name == "softmax" else f"multi-query {name}"
    name = readable(name)
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
