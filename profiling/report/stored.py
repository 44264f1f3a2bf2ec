"""The rows of a report that is there already, from its own `rows.csv` and `report.json`.

A committed report keeps its numbers in `rows.csv`, without columns that hold one value: those that
say where a row was made stand in `report.json`, the others follow from the sweep's file. So a
report can be made again, with what reports say today, where the results it was made from are gone.
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
_CHANGED = ", so the sweep's file is not the one it was made from: run the sweep again"


def is_report(folder: Path) -> bool:
    """Whether a folder holds a report of a sweep."""
    return (folder / DATA).is_file()


def stored_rows(config: SweepConfig, folder: Path, root: Path) -> list[ProfileRow]:
    """Return the rows of a report.

    Args:
        config: its sweep.
        folder: of the report.
        root: folder that paths in the sweep's file start from.

    Raises:
        ConfigError: the report is not one of this sweep, or the sweep's variants or grid are others
            than when it was made.
    """
    data = read(folder)
    if data["kind"] != "sweep":
        raise ConfigError(f"{folder}: a report of kind {data['kind']!r}, expected that of a sweep")
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
            raise ConfigError(f"{folder}: rows.csv has no rows of {point.label}{_CHANGED}")
        rows += _rows_of(point, entries, made)
    if groups:
        raise ConfigError(f"{folder}: rows.csv has {' '.join(next(iter(groups)))}{_CHANGED}")
    if variants_of(to_frame(rows, list(config.variants))) != data["about"]["variants"]:
        raise ConfigError(f"{folder}: the report is of other variants{_CHANGED}")
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
