"""The rows of a report that is there already, from its own `rows.csv` and head.

A committed report keeps its numbers in `rows.csv`, without columns that hold one value: those that
say where a row was made stand in the head of `report.md`, the others follow from the sweep's file.
So a report can be made again, with what reports say today, where the results it was made from are
gone.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_probattn.base.errors import ConfigError
from profiling.measure.rows import ProfileRow, to_frame
from profiling.report.tables import variants_table
from profiling.sweep.config import SweepConfig
from profiling.sweep.plan import Point, make_plan
from profiling.sweep.points import point_rows

_KEYS = (
    *("quantity", "variant", "embed_dim", "seq_len", "grid_heads", "batch_size"),
    *("mode", "backend", "dtype"),
)
_HEAD = {
    "command": r"^- Command: (`+) ?(.*?) ?\1",
    "device_name": r"^- Hardware: ()(.*)$",
    "versions": r"^- Versions: ()(.*); revision",
    "git_revision": r"^- Versions: ()(?:.*); revision (.*)$",
}
_CHANGED = ", so the sweep's file is not the one it was made from: run the sweep again"


def is_report(folder: Path) -> bool:
    """Whether a folder holds a report of a sweep."""
    return all((folder / name).is_file() for name in ("report.md", "rows.csv"))


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
    text = (folder / "report.md").read_text(encoding="utf-8")
    made = _head(text, folder)
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
    variants = variants_table(to_frame(rows, list(config.variants)))
    if not set(variants) <= set(text.splitlines()):
        raise ConfigError(f"{folder}: report.md describes other variants{_CHANGED}")
    return rows


def _head(text: str, folder: Path) -> dict[str, str]:
    """Return what the head of a report says of all its rows."""
    found = {name: re.search(pattern, text, re.MULTILINE) for name, pattern in _HEAD.items()}
    missing = [name for name, match in found.items() if match is None]
    if missing:
        raise ConfigError(f"{folder}: report.md does not begin as that of a sweep ({missing[0]})")
    return {name: match[2] for name, match in found.items() if match is not None}


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
