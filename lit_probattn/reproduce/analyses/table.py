"""The file of an analysis table: runs, study, numbers.

A file of configs/reproduce of `kind: analysis` names its study, the models of its rows (rows of
other tables, or attention files), and where the study's tables contain each printed number. The
printed numbers are in published.csv.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lit_probattn.base.errors import ConfigError, nearest, prefixed
from lit_probattn.compare.tables import Metric, Part, printed_numbers, record
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


class Analysis:
    """An analysis table.

    Args:
        part: its file.

    Attributes:
        table: its runs; `published` of a row are its printed numbers.
        study: study of each run.
        shortened: the study with the reduced protocol.
        numbers: compared numbers, by name.
        neutral: reference of the order in a table without a baseline.
        digits: printed number of decimals, by number.
        computed: printed numbers that do not come from a study, with the printed text.

    Raises:
        ConfigError: a key is missing or unknown.
    """

    def __init__(self, part: Part) -> None:
        name, self.part, self.table = part.name, part, models_of(part)
        self.numbers = {key: _number(name, key, entry) for key, entry in part["values"].items()}
        self.neutral: float | None = part.get("neutral")
        texts, task = printed_numbers(name, part.folder), part["task"]
        flags = part.get("flags", {})
        less = {k: v for k, v in {**flags, **part.get("shortened", {})}.items() if v is not None}
        with prefixed(name, ConfigError):
            self.study, self.shortened = (RunStudy(part["study"], one) for one in (flags, less))
        printed = {key: entry["printed"] for key, entry in part["values"].items()}
        self.digits = {key: _digits(texts, task, place) for key, place in printed.items()}
        self.computed = [_computed(name, entry, texts) for entry in part.get("computed", ())]

    def value(self, row: str, name: str) -> Value:
        """Return where the study's tables contain a number of a row."""
        found = self.numbers[name].value
        return replace(found, where={**found.where, **self.part["rows"][row].get("where", {})})


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
