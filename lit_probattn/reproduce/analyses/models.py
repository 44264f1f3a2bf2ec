"""The models of an analysis table and their printed numbers; PyTorch is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_probattn.base.errors import ConfigError, nearest
from lit_probattn.compare.tables import (
    Part,
    Row,
    Table,
    check_keys,
    printed_numbers,
    read_table,
    read_tasks,
)

_REQUIRED = ("title", "kind", "study", "task", "seeds", "published_runs", "values", "rows")
_OPTIONAL = ("flags", "shortened", "baseline", "neutral", "notes", "computed")
_OF_VALUE = ("printed", "unit", "file", "column")
_MORE_OF_VALUE = ("where", "at_least", "at_most", "reduce", "bound", "scale")


def models_of(part: Part) -> Table:
    """Return the models that are studied; a row's `published` are its printed numbers.

    Raises:
        ConfigError: something is missing or unknown.
    """
    name, folder = part.name, part.folder
    check_keys(name, part, _REQUIRED, _OPTIONAL)
    for key, entry in part["values"].items():
        check_keys(f"{name}: value {key}", entry, _OF_VALUE, _MORE_OF_VALUE)
    tasks = read_tasks(folder)
    if part["task"] not in tasks:
        hint = nearest(part["task"], tasks)
        raise ConfigError(f"{name}: unknown task {part['task']!r}{hint}")
    task = tasks[part["task"]]
    printed = printed_numbers(name, folder)
    rows = {
        key: _row(f"{name}: row {key}", key, entry, task.name, part["values"], printed, folder)
        for key, entry in part["rows"].items()
    }
    baseline = part.get("baseline", "")
    if baseline and baseline not in rows:
        raise ConfigError(f"{name}: unknown baseline {baseline!r}{nearest(baseline, rows)}")
    return Table(
        name=name,
        title=part["title"],
        seeds=part["seeds"],
        published_runs=part["published_runs"],
        baseline=baseline,
        tasks={task.name: task},
        rows=rows,
    )


def _row(
    where: str,
    name: str,
    entry: Mapping[str, Any],
    task: str,
    numbers: Mapping[str, Any],
    printed: Mapping[tuple[str, ...], str],
    folder: Path,
) -> Row:
    if "runs" not in entry and "attention" not in entry:
        raise ConfigError(f"{where}: missing model; set runs or attention")
    own = ("where",) if "runs" in entry else ("set", "overrides", "where")
    check_keys(where, entry, ("printed", "runs" if "runs" in entry else "attention"), own)
    method, heads = entry["printed"]
    places = {key: (task, method, heads, *entry["printed"]) for key, entry in numbers.items()}
    found = {key: float(printed[place]) for key, place in places.items() if place in printed}
    if not found:
        raise ConfigError(f"{where}: published.csv: missing {method}, {heads}")
    published = {task: found}
    if "runs" not in entry:
        model = {k: v for k, v in entry.items() if k not in ("printed", "where")}
        return Row(name, method, heads, **model, published=published)
    table_name, _, row_name = entry["runs"].partition(" ")
    table = read_table(table_name, folder)
    for kind, wanted, known in (("row", row_name, table.rows), ("task", task, table.tasks)):
        if wanted not in known:
            hint = nearest(wanted, known)
            raise ConfigError(f"{where}: {table_name} has no {kind} {wanted!r}{hint}")
    row = table.rows[row_name]
    return replace(row, name=name, method=method, heads=heads, published=published)
