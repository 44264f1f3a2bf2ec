"""Numbers that are printed in a paper and require no training: counted on models, or computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from lit_probattn.base.config_files import find
from lit_probattn.base.errors import ConfigError
from lit_probattn.compare.model import build_task
from lit_probattn.compare.runs import Run
from lit_probattn.compare.tables import read_table
from lit_probattn.configs import attention_entry, class_of, read_yaml
from lit_probattn.experiments.expectations import Bound


@dataclass(frozen=True)
class Computed:
    """A printed number and how it is computed.

    Args:
        printed: task, method, heads, metric and split in published.csv.
        unit: unit of the number.
        by: a name of `WAYS`.
        of: argument of the function `by`.
        bound: kind of bound, if the paper prints a bound; None for the number itself.
    """

    printed: tuple[str, ...]
    unit: str
    by: str
    of: str
    bound: Bound | None = None

    def value(self, folder: Path) -> float:
        """Return the number in its unit.

        Args:
            folder: folder of the tables.
        """
        return _value(self.by, self.of, folder)


@cache
def _value(by: str, of: str, folder: Path) -> float:
    return WAYS[by](of, folder)


def _model(of: str, folder: Path) -> torch.nn.Module:
    """Return the model of `TABLE TASK ROW` on the meta device."""
    table_name, task, row = of.split()
    table = read_table(table_name, folder)
    ((entry, found),) = table.select([task, row])
    run = Run(entry, found, 0)
    with torch.device("meta"):
        model: torch.nn.Module = build_task(run, run.data()).model
    return model


def million_parameters(of: str, folder: Path) -> float:
    """Return the parameters of the model of `TABLE TASK ROW` in millions, shared ones once."""
    return sum(p.numel() for p in _model(of, folder).parameters()) / 1e6


def window_tokens(of: str, folder: Path) -> float:
    """Return the number of tokens of an attention window in the model of `TABLE TASK ROW`.

    Raises:
        ConfigError: the model has no windows, or windows of several sizes.
    """
    modules = _model(of, folder).modules()
    found = [getattr(module, "window_size", None) for module in modules]
    sizes = {math.prod(size) for size in found if size is not None}
    if len(sizes) != 1:
        raise ConfigError(f"{of}: expected windows of one size, received {sorted(sizes)}")
    return float(sizes.pop())


def percent_saved(of: str, folder: Path) -> float:
    """Return the percentage by which a variant's attention is cheaper than softmax, by formula.

    Args:
        of: `CONFIG VARIANT` of configs/profiling, at the largest width and length of its grid.
        folder: unused.
    """
    name, variant = of.split()
    content = read_yaml(find(f"configs/profiling/{name}.yaml"))
    width, length = (max(content["grid"][key]) for key in ("embed_dim", "seq_len"))

    def macs(chosen: str) -> int:
        entry = content["variants"][chosen]["attention"]
        known = attention_entry(entry["config"])
        options = {**known["init_args"], **entry["init_args"]}
        head_dim = width // content["model"]["head_dim_divisor"]
        with torch.device("meta"):
            layer = class_of(known["class_path"])(width, **options, head_dim=head_dim)
        return int(layer.cost(length).macs)

    return 100 * (1 - macs(variant) / macs(content["baseline"]))


WAYS: dict[str, Callable[[str, Path], float]] = {
    "million_parameters": million_parameters,
    "window_tokens": window_tokens,
    "percent_saved": percent_saved,
}
