"""The file of an analysis table: cells, study, numbers.

A file of configs/reproduce of `kind: analysis` names its study, the models of its rows (rows of
other tables, or attention files), and where the study's tables contain each printed number. The
printed numbers are in published.csv.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lit_probattn.base.errors import ConfigError, nearest
from lit_probattn.compare.tables import (
    FOLDER,
    Metric,
    Row,
    Table,
    read_published,
    read_table,
    read_tasks,
)
from lit_probattn.experiments.expectations import Bound, digits_of
from lit_probattn.reproduce.analyses.computed import Computed
from lit_probattn.reproduce.studies import CellStudy, Value

_REQUIRED = ("title", "kind", "study", "task", "seeds", "published_runs", "values", "rows")
_OPTIONAL = ("flags", "shortened", "baseline", "neutral", "notes", "computed")


@dataclass(frozen=True)
class Number:
    """A number that is printed for each row.

    Args:
        metric: name, unit, and its metric and split in published.csv.
        value: where the tables of the study contain it.
        bound: kind of bound, if the paper prints a bound; None for the number itself.
    """

    metric: Metric
    value: Value
    bound: Bound | None = None


@dataclass(frozen=True)
class Analysis:
    """An analysis table.

    Args:
        table: its cells; `published` of a row are its printed numbers.
        study: study of each cell.
        shortened: the study with the reduced protocol.
        numbers: compared numbers, by name.
        neutral: reference of the order in a table without a baseline.
        notes: assumptions about the study that the paper does not specify.
        digits: printed number of decimals, by number.
        computed: printed numbers that do not come from a study, with the printed text.
        wheres: additional conditions on the study's tables, by row.
        folder: folder of the tables.
    """

    table: Table
    study: CellStudy
    shortened: CellStudy
    numbers: Mapping[str, Number]
    neutral: float | None = None
    notes: Sequence[str] = ()
    digits: Mapping[str, int] = field(default_factory=dict)
    computed: Sequence[tuple[Computed, str]] = ()
    folder: Path = FOLDER
    wheres: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def value(self, row: str, name: str) -> Value:
        """Return where the study's tables contain a number of a row."""
        found = self.numbers[name].value
        return replace(found, where={**found.where, **self.wheres.get(row, {})})

    @classmethod
    def read(cls, name: str, part: Mapping[str, Any], folder: Path = FOLDER) -> Analysis:
        """Parse the content of a file.

        Args:
            name: name of the table.
            part: content of the file.
            folder: folder of the referenced tables, of tasks and of printed numbers.

        Raises:
            ConfigError: a key is missing or unknown.
        """
        _check(name, part, _REQUIRED, _OPTIONAL)
        tasks = read_tasks(folder)
        if part["task"] not in tasks:
            hint = nearest(part["task"], tasks)
            raise ConfigError(f"{name}: unknown task {part['task']!r}{hint}")
        task = tasks[part["task"]]
        numbers = {key: _number(name, key, entry) for key, entry in part["values"].items()}
        printed = _Printed(name, task.name, folder)
        rows = {
            key: _row(f"{name}: row {key}", key, entry, task.name, numbers, printed, folder)
            for key, entry in part["rows"].items()
        }
        baseline = part.get("baseline", "")
        if baseline and baseline not in rows:
            raise ConfigError(f"{name}: unknown baseline {baseline!r}{nearest(baseline, rows)}")
        flags = part.get("flags", {})
        less = {k: v for k, v in {**flags, **part.get("shortened", {})}.items() if v is not None}
        try:
            study, shortened = (CellStudy(part["study"], chosen) for chosen in (flags, less))
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
        table = Table(
            name=name,
            title=part["title"],
            seeds=part["seeds"],
            published_runs=part["published_runs"],
            baseline=baseline,
            tasks={task.name: task},
            rows=rows,
        )
        return cls(
            table,
            study,
            shortened,
            numbers,
            part.get("neutral"),
            tuple(part.get("notes", ())),
            {key: printed.digits(number) for key, number in numbers.items()},
            [_computed(name, entry, folder) for entry in part.get("computed", ())],
            folder,
            {key: entry["where"] for key, entry in part["rows"].items() if "where" in entry},
        )


class _Printed:
    """The printed numbers of a table, by method, heads, metric and split."""

    def __init__(self, name: str, task: str, folder: Path) -> None:
        keys = ("method", "heads", "metric", "split")
        rows = [r for r in read_published(folder) if (r["table"], r["task"]) == (name, task)]
        self.texts = {tuple(row[key] for key in keys): row["value"] for row in rows}

    def of(self, method: str, heads: str, number: Number) -> float | None:
        """Return the printed number of a row, or None."""
        text = self.texts.get((method, heads, *number.metric.printed))
        return None if text is None else float(text)

    def digits(self, number: Number) -> int:
        """Return the largest number of decimals with which the number is printed."""
        texts = [t for key, t in self.texts.items() if key[2:] == tuple(number.metric.printed)]
        return max(map(digits_of, texts), default=2)


def _check(
    where: str, entry: Mapping[str, Any], required: Sequence[str], optional: Sequence[str]
) -> None:
    """Reject an entry with a missing or unknown key."""
    for key in required:
        if key not in entry:
            raise ConfigError(f"{where} does not set {key}")
    for key in entry:
        if key not in (*required, *optional):
            raise ConfigError(f"{where}: unknown key {key!r}{nearest(key, (*required, *optional))}")


def _computed(name: str, entry: Mapping[str, Any], folder: Path) -> tuple[Computed, str]:
    found = Computed.read(name, entry)
    keys = ("task", "method", "heads", "metric", "split")
    for row in read_published(folder):
        if row["table"] == name and tuple(row[key] for key in keys) == found.printed:
            return found, row["value"]
    raise ConfigError(f"{name}: published.csv: missing {', '.join(found.printed)}")


def _number(table: str, name: str, entry: Mapping[str, Any]) -> Number:
    where = f"{table}: value {name}"
    chosen = ("where", "at_least", "at_most", "reduce", "bound", "scale")
    _check(where, entry, ("printed", "unit", "file", "column"), chosen)
    reduce, known = entry.get("reduce", "only"), ("only", "mean", "max", "min")
    if reduce not in known:
        raise ConfigError(f"{where}: unknown reduce: {reduce!r}{nearest(reduce, known)}")
    metric = Metric(
        name=name,
        command="study",
        key=entry["column"],
        printed=tuple(entry["printed"]),
        unit=entry["unit"],
        better="lower",
        scale=float(entry.get("scale", 1.0)),
    )
    fields = {k: v for k, v in entry.items() if k in Value.__dataclass_fields__}
    return Number(metric, Value(**fields), entry.get("bound"))


def _row(
    where: str,
    name: str,
    entry: Mapping[str, Any],
    task: str,
    numbers: Mapping[str, Number],
    printed: _Printed,
    folder: Path,
) -> Row:
    if "cells" not in entry and "attention" not in entry:
        raise ConfigError(f"{where}: missing model; set cells or attention")
    own = ("where",) if "cells" in entry else ("set", "overrides", "where")
    _check(where, entry, ("printed", "cells" if "cells" in entry else "attention"), own)
    method, heads = entry["printed"]
    values = {key: printed.of(method, heads, number) for key, number in numbers.items()}
    found = {key: value for key, value in values.items() if value is not None}
    if not found:
        raise ConfigError(f"{where}: published.csv: missing {method}, {heads}")
    published = {task: found}
    if "cells" not in entry:
        model = {k: v for k, v in entry.items() if k not in ("printed", "where")}
        return Row(name, method, heads, **model, published=published)
    table_name, _, row_name = entry["cells"].partition(" ")
    table = read_table(table_name, folder)
    for kind, wanted, known in (("row", row_name, table.rows), ("task", task, table.tasks)):
        if wanted not in known:
            hint = nearest(wanted, known)
            raise ConfigError(f"{where}: {table_name} has no {kind} {wanted!r}{hint}")
    row = table.rows[row_name]
    return replace(row, name=name, method=method, heads=heads, published=published)
