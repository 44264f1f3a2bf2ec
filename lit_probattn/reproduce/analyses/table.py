"""What the file of an analysis table says: cells, study, numbers.

A file of configs/reproduce of `kind: analysis` names its study, the models of its rows (rows of
other tables, or attention files of its own), and where each printed number stands in the study's
tables. Printed numbers themselves are those of published.csv.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lit_probattn.base.errors import ConfigError, nearest
from lit_probattn.compare.tables import FOLDER, Metric, Table, read_published
from lit_probattn.experiments.expectations import Bound
from lit_probattn.reproduce.analyses.computed import Computed
from lit_probattn.reproduce.analyses.models import PrintedNumbers, models_of
from lit_probattn.reproduce.studies import CellStudy, Value


@dataclass(frozen=True)
class Number:
    """A printed number of every row.

    Args:
        metric: name, unit, and its metric and split in published.csv.
        value: where it stands in the tables of the study.
        bound: whether the paper prints a bound of it; None for the number itself.
    """

    metric: Metric
    value: Value
    bound: Bound | None


@dataclass(frozen=True)
class Analysis:
    """An analysis table.

    Args:
        table: its cells; a row's `published` are its printed numbers.
        study: the study of every cell.
        shortened: the study under the shortened protocol.
        numbers: what is compared, by name.
        neutral: what numbers of a table without a baseline lie above or below.
        notes: what the paper does not say of the study, and what we take.
        digits: digits after the point, by number, as printed.
        computed: printed numbers that no study gives, with the text that is printed.
        wheres: lines of the study's tables that a row reads, beside those of its numbers, by row.
        folder: folder of the tables.
    """

    table: Table
    study: CellStudy
    shortened: CellStudy
    numbers: Mapping[str, Number]
    neutral: float | None
    notes: Sequence[str]
    digits: Mapping[str, int]
    computed: Sequence[tuple[Computed, str]]
    folder: Path
    wheres: Mapping[str, Mapping[str, Any]]

    def value(self, row: str, name: str) -> Value:
        """Return where a number of a row stands in the tables of the study."""
        found = self.numbers[name].value
        return replace(found, where={**found.where, **self.wheres.get(row, {})})

    @classmethod
    def read(cls, name: str, part: Mapping[str, Any], folder: Path = FOLDER) -> Analysis:
        """Return the analysis of a file's content.

        Args:
            name: the table.
            part: the content.
            folder: folder of the tables whose rows it names, of tasks and printed numbers.

        Raises:
            ConfigError: something is missing or unknown.
        """
        table = models_of(name, part, folder)
        numbers = {key: _number(name, key, entry) for key, entry in part["values"].items()}
        printed = PrintedNumbers(name, part["task"], folder)
        flags = part.get("flags", {})
        less = {k: v for k, v in {**flags, **part.get("shortened", {})}.items() if v is not None}
        try:
            study, shortened = (CellStudy(part["study"], chosen) for chosen in (flags, less))
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
        return cls(
            table,
            study,
            shortened,
            numbers,
            part.get("neutral"),
            tuple(part.get("notes", ())),
            {key: printed.digits(*entry["printed"]) for key, entry in part["values"].items()},
            [_computed(name, entry, folder) for entry in part.get("computed", ())],
            folder,
            {key: entry["where"] for key, entry in part["rows"].items() if "where" in entry},
        )


def _computed(name: str, entry: Mapping[str, Any], folder: Path) -> tuple[Computed, str]:
    found = Computed.read(name, entry)
    keys = ("task", "method", "heads", "metric", "split")
    for row in read_published(folder):
        if row["table"] == name and tuple(row[key] for key in keys) == found.printed:
            return found, row["value"]
    raise ConfigError(f"{name}: published.csv does not print {', '.join(found.printed)}")


def _number(table: str, name: str, entry: Mapping[str, Any]) -> Number:
    where = f"{table}: value {name}"
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
