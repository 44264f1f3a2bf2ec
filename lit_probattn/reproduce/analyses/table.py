"""The file of an analysis table: runs, study, numbers.

A file of configs/reproduce of `kind: analysis` names its study, the models of its rows (rows of
other tables, or attention files), and where the study's tables contain each printed number. The
printed numbers are in published.csv.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lit_probattn.base.errors import ConfigError, nearest
from lit_probattn.compare.tables import Metric, Part, Table, printed_numbers, record
from lit_probattn.experiments.expectations import Bound, digits_of
from lit_probattn.reproduce.analyses.computed import WAYS, Computed
from lit_probattn.reproduce.analyses.models import models_of
from lit_probattn.reproduce.studies import RunStudy, Value


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
    bound: Bound | None


@dataclass(frozen=True)
class Analysis:
    """An analysis table.

    Args:
        table: its runs; `published` of a row are its printed numbers.
        study: study of each run.
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
    study: RunStudy
    shortened: RunStudy
    numbers: Mapping[str, Number]
    neutral: float | None
    notes: Sequence[str]
    digits: Mapping[str, int]
    computed: Sequence[tuple[Computed, str]]
    folder: Path
    wheres: Mapping[str, Mapping[str, Any]]

    def value(self, row: str, name: str) -> Value:
        """Return where the study's tables contain a number of a row."""
        found = self.numbers[name].value
        return replace(found, where={**found.where, **self.wheres.get(row, {})})

    @classmethod
    def read(cls, part: Part) -> Analysis:
        """Parse the content of a file.

        Raises:
            ConfigError: a key is missing or unknown.
        """
        name, table = part.name, models_of(part)
        numbers = {key: _number(name, key, entry) for key, entry in part["values"].items()}
        texts, task = printed_numbers(name, part.folder), part["task"]
        flags = part.get("flags", {})
        less = {k: v for k, v in {**flags, **part.get("shortened", {})}.items() if v is not None}
        try:
            study, shortened = (RunStudy(part["study"], chosen) for chosen in (flags, less))
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
        return cls(
            table,
            study,
            shortened,
            numbers,
            part.get("neutral"),
            tuple(part.get("notes", ())),
            {key: _digits(texts, task, one["printed"]) for key, one in part["values"].items()},
            [_computed(name, entry, texts) for entry in part.get("computed", ())],
            part.folder,
            {key: entry["where"] for key, entry in part["rows"].items() if "where" in entry},
        )


def _digits(texts: Mapping[tuple[str, ...], str], task: str, printed: Sequence[str]) -> int:
    """Return the largest number of decimals of a metric and split."""
    found = [text for key, text in texts.items() if (key[0], *key[3:]) == (task, *printed)]
    return max(map(digits_of, found), default=2)


def _computed(
    name: str, entry: Mapping[str, Any], texts: Mapping[tuple[str, ...], str]
) -> tuple[Computed, str]:
    found = record(Computed, f"{name}: a computed number", entry)
    if found.by not in WAYS:
        raise ConfigError(f"{name}: unknown by: {found.by!r}{nearest(found.by, WAYS)}")
    found = replace(found, printed=tuple(found.printed))
    if found.printed not in texts:
        raise ConfigError(f"{name}: published.csv: missing {', '.join(found.printed)}")
    return found, texts[found.printed]


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
        scale=float(entry.get("scale", 1.0)),
    )
    fields = {k: v for k, v in entry.items() if k in Value.__dataclass_fields__}
    return Number(metric, Value(**fields), entry.get("bound"))
