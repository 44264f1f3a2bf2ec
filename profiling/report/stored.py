"""Read the rows of an existing report from its `rows.csv` and `report.json`.

The `rows.csv` of a committed report omits constant columns: provenance is in `report.json`, and the
others follow from the sweep file. A report can therefore be rendered again after its results are
deleted.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_probattn.base.errors import ConfigError
from lit_probattn.experiments.page import DATA, read
from profiling.measure.rows import ProfileRow, to_frame
from profiling.report.tables import variants_of
from profiling.sweep.config import SweepConfig
from profiling.sweep.plan import Point, make_plan
from profiling.sweep.points import point_rows

_KEYS = (
    *("quantity", "variant", "embed_dim", "seq_len", "grid_heads", "batch_size"),
    *("mode", "backend", "dtype"),
)
_MADE = {
    **{"command": "command", "device_name": "machine"},
    **{"versions": "versions", "git_revision": "revision"},
}
_CHANGED = ", so the sweep file has changed since the report was written: run the sweep again"


def is_report(folder: Path) -> bool:
    """Return whether a folder contains the report of a sweep."""
    return (folder / DATA).is_file()


def stored_rows(config: SweepConfig, folder: Path, root: Path) -> list[ProfileRow]:
    """Return the rows of a report.

    Args:
        config: the sweep.
        folder: the report folder.
        root: folder to which paths in the sweep file are relative.

    Raises:
        ConfigError: the report is of another sweep, or the variants or the grid of the sweep have
            changed since it was written.
    """
    data = read(folder)
    if data["kind"] != "sweep":
        raise ConfigError(
            f"{folder}: expected the report of a sweep, received kind {data['kind']!r}"
        )
    made = {column: data["made"][name] for column, name in _MADE.items()}
    with (folder / "rows.csv").open(encoding="utf-8", newline="") as file:
        lines = [{k: v for k, v in line.items() if v} for line in csv.DictReader(file)]
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    keys = [key for key in _KEYS if any(key in line for line in lines)]
    for line in lines:
        groups.setdefault(tuple(line.get(key, "") for key in keys), []).append(line)
    rows: list[ProfileRow] = []
    for point in make_plan(config, root):
        entries = groups.pop(_place(point, keys), None)
        if entries is None:
            raise ConfigError(f"{folder}: rows.csv: missing rows of {point.label}{_CHANGED}")
        rows += _rows_of(point, entries, made)
    if groups:
        raise ConfigError(f"{folder}: rows.csv: unknown {' '.join(next(iter(groups)))}{_CHANGED}")
    if variants_of(to_frame(rows, list(config.variants))) != data["about"]["variants"]:
        raise ConfigError(f"{folder}: the variants of the report differ{_CHANGED}")
    return rows


def _place(point: Point, keys: list[str]) -> tuple[str, ...]:
    values = (getattr(point, key) for key in keys)
    return tuple("" if value is None else str(value) for value in values)


def _rows_of(
    point: Point, lines: list[dict[str, str]], made: Mapping[str, str]
) -> list[ProfileRow]:
    entries: list[dict[str, Any]] = [
        {**made, **{k: v for k, v in line.items() if k in ProfileRow.model_fields}}
        for line in lines
    ]
    return point_rows(point, entries, None)
