"""Tables whose numbers come from studies of trained models: cells, studies, printed beside ours.

A file of configs/reproduce of `kind: analysis` names its study, the models of its rows (rows of
other tables, or attention files of its own), and where each printed number stands in the study's
tables. Printed numbers themselves are those of published.csv.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pandas as pd

from lit_probattn.compare.cells import Cell
from lit_probattn.compare.report import Report
from lit_probattn.compare.statistics import Sample, against_published
from lit_probattn.compare.tables import (
    FOLDER,
    Metric,
    Row,
    Table,
    TaskEntry,
    read_published,
    read_table,
    read_tasks,
)
from lit_probattn.configs import ConfigError, nearest
from lit_probattn.records.tables import markdown_lines
from lit_probattn.reproduce.computed import Computed
from lit_probattn.reproduce.figures.verdicts import (
    Bound,
    against_bound,
    against_computed,
    against_value,
    difference,
    sample_of,
)
from lit_probattn.reproduce.studies import CellStudy, Value

_LEGEND = (
    "Mean ± standard deviation over seeds (n − 1). Ours − published has a 95 % interval, for which "
    "the published number counts as the mean of {runs} with our spread; the paper does not say "
    "how many there were. Verdicts: *agrees* is within that interval; *same direction* is "
    "beyond it, or has none, but lies on the printed side of {reference}; *differs* is beyond it "
    "on another side; everything else *cannot be told*. Ours − baseline is paired by seed where "
    "both rows have the same seeds, else Welch's."
)
_REQUIRED = ("title", "kind", "study", "task", "seeds", "published_runs", "values", "rows")
_OPTIONAL = ("flags", "shortened", "baseline", "neutral", "notes", "computed")
_SHORTER = " Under a shortened protocol the numbers are not compared, only their order."


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
    bound: Bound | None = None


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
        less = part.get("shortened", {})
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
            CellStudy(part["study"], flags),
            CellStudy(part["study"], {k: v for k, v in {**flags, **less}.items() if v is not None}),
            numbers,
            part.get("neutral"),
            tuple(part.get("notes", ())),
            {key: printed.digits(number) for key, number in numbers.items()},
            [_computed(name, entry, folder) for entry in part.get("computed", ())],
            folder,
        )

    def report(self) -> Callable[[Table, Sequence[Cell], str], Report]:
        """Return what makes the report of a table, cells and a command."""
        return partial(AnalysisReport, analysis=self)


def _shown(value: float, digits: int) -> str:
    """Return a number with a digit more than is printed; small ones with two that count."""
    small = 0 < abs(value) < 10.0**-digits
    return f"{value:.2g}" if small else f"{value:.{digits + 1}f}"


def _digits(text: str) -> int:
    return len(text.partition(".")[2])


class _Printed:
    """The printed numbers of a table, by method, heads, metric and split."""

    def __init__(self, name: str, task: str, folder: Path) -> None:
        keys = ("method", "heads", "metric", "split")
        rows = [r for r in read_published(folder) if (r["table"], r["task"]) == (name, task)]
        self.texts = {tuple(row[key] for key in keys): row["value"] for row in rows}

    def of(self, method: str, heads: str, number: Number) -> float | None:
        """Return what a row prints, or None."""
        text = self.texts.get((method, heads, *number.metric.printed))
        return None if text is None else float(text)

    def digits(self, number: Number) -> int:
        """Return the most digits after the point that the number is printed with."""
        texts = [t for key, t in self.texts.items() if key[2:] == tuple(number.metric.printed)]
        return max(map(_digits, texts), default=2)


def _check(
    where: str, entry: Mapping[str, Any], required: Sequence[str], optional: Sequence[str]
) -> None:
    """Refuse an entry that lacks a key, or has one that means nothing."""
    for key in required:
        if key not in entry:
            raise ConfigError(f"{where} does not set {key}")
    for key in entry:
        if key not in (*required, *optional):
            raise ConfigError(f"{where} sets {key!r}{nearest(key, (*required, *optional))}")


def _computed(name: str, entry: Mapping[str, Any], folder: Path) -> tuple[Computed, str]:
    found = Computed.read(name, entry)
    keys = ("task", "method", "heads", "metric", "split")
    for row in read_published(folder):
        if row["table"] == name and tuple(row[key] for key in keys) == found.printed:
            return found, row["value"]
    raise ConfigError(f"{name}: published.csv does not print {', '.join(found.printed)}")


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
    model = ("cells",) if "cells" in entry else ("attention",)
    _check(where, entry, ("printed", *model), () if "cells" in entry else ("set", "overrides"))
    method, heads = entry["printed"]
    values = {key: printed.of(method, heads, number) for key, number in numbers.items()}
    found = {key: value for key, value in values.items() if value is not None}
    if not found:
        raise ConfigError(f"{where}: published.csv prints nothing of {method}, {heads}")
    published = {task: found}
    if "cells" not in entry:
        own = {k: v for k, v in entry.items() if k != "printed"}
        return Row(name, method, heads, **own, published=published)
    table_name, _, row_name = entry["cells"].partition(" ")
    table = read_table(table_name, folder)
    for kind, wanted, known in (("row", row_name, table.rows), ("task", task, table.tasks)):
        if wanted not in known:
            hint = nearest(wanted, known)
            raise ConfigError(f"{where}: {table_name} has no {kind} {wanted!r}{hint}")
    row = table.rows[row_name]
    return replace(row, name=name, method=method, published=published)


@dataclass
class AnalysisReport(Report):
    """Report of an analysis table: a line per printed number, with ours, and the study's pictures.

    Args:
        table, cells, command: as in Report.
        analysis: the table's study and numbers.
    """

    analysis: Analysis

    # ---- studies -------------------------------------------------------------------------------

    @property
    def study(self) -> CellStudy:
        """The study of these cells."""
        short = any(cell.options.shortens for cell in self.cells)
        return self.analysis.shortened if short else self.analysis.study

    def complete(self, cells: Sequence[Cell], jobs: int, devices: Sequence[str]) -> dict[str, str]:
        """Study the trained cells."""
        return self.study.make(cells, jobs=jobs, devices=devices)

    def plan(self, cells: Sequence[Cell], commands: bool) -> list[str]:
        """Say how many cells are to be studied, and the commands."""
        left = sum(not self.study.is_done(cell) for cell in cells)
        lines = [f"then the study {self.study.name} of {left} of {len(cells)} cells"]
        return lines + ([self.study.command(cell) for cell in cells] if commands else [])

    @cached_property
    def results(self) -> list[tuple[Cell, dict[str, Any]]]:
        """Studied cells with their results, the numbers of the study among the values."""
        found = []
        for cell in self.cells:
            result = cell.result()
            if result is not None and self.study.is_done(cell):
                numbers = {
                    name: number.metric.scale * number.value.of(self.study, cell)
                    for name, number in self.analysis.numbers.items()
                }
                found.append((cell, {**result, "values": {**result["values"], **numbers}}))
        return found

    # ---- printed beside ours -------------------------------------------------------------------

    def metrics(self, task: TaskEntry) -> Sequence[Metric]:
        """Return the numbers of the study."""
        return [number.metric for number in self.analysis.numbers.values()]

    @cached_property
    def summary(self) -> pd.DataFrame:
        """One row per printed number, in printed order; without a result nothing is ours."""
        measured = {(e["row"], e["metric"]): e for e in super().summary.to_dict("records")}
        entries = []
        for row in self.table.rows.values():
            ((task, published),) = row.published.items()
            for name, value in published.items():
                number = self.analysis.numbers[name]
                found = {
                    **{"task": task, "row": row.name, "method": row.label, "metric": name},
                    **{"unit": number.metric.unit, "num_seeds": 0, "mean": None, "std": None},
                    **{"published": value, "digits": self.analysis.digits[name]},
                    **{"bound": number.bound, "difference_from_baseline": ""},
                    **measured.get((row.name, name), {}),
                }
                entries.append({**found, **self._judged(row, name, value)})
        computed = [self._computed_entry(*pair) for pair in self.analysis.computed]
        return pd.DataFrame([*entries, *computed])

    def _computed_entry(self, number: Computed, text: str) -> dict[str, Any]:
        task, method, heads, metric, _ = number.printed
        ours, published, digits = number.value(self.analysis.folder), float(text), _digits(text)
        away = f"{ours - published:+.{digits + 1}f}: computed, nothing varies"
        return {
            **{"task": task, "row": number.of, "metric": metric, "unit": number.unit},
            **{"method": Row("", method, heads, "").label, "num_seeds": 0, "mean": ours},
            **{"published": published, "digits": digits, "bound": number.bound, "note": away},
            "deviation": ours - published,
            "verdict": against_computed(ours, published, digits, number.bound),
        }

    def _sample(self, row: str, name: str) -> Sample | None:
        mine = self.rows[self.rows["row"] == row] if len(self.rows) else self.rows
        return sample_of(mine, f"value {name}") if len(mine) else None

    def _reference(self, row: Row, name: str, ours: Sample) -> tuple[Sample, float] | None:
        """Return what a number lies above or below: the baseline's, or the neutral number."""
        base, neutral = self.table.baseline, self.analysis.neutral
        if neutral is not None:
            return Sample((neutral,) * ours.count, ours.seeds), neutral
        if not base or base == row.name:
            return None
        sample = self._sample(base, name)
        ((_, published),) = self.table.rows[base].published.items()
        return (sample, published[name]) if sample and name in published else None

    def _judged(self, row: Row, name: str, published: float) -> dict[str, Any]:
        ours = self._sample(row.name, name)
        if ours is None:
            return {"verdict": "cannot be told", "note": "no model is studied"}
        digits, comparable = self.analysis.digits[name] + 1, not self.shortened
        runs, bound = self.table.published_runs, self.analysis.numbers[name].bound
        interval = against_published(ours, published, runs) if comparable else None
        away = f"{ours.mean - published:+.{digits}f}"
        if interval is not None:
            note = interval.text(digits)
        elif comparable:
            note = f"{away}: {'one seed' if ours.count == 1 else 'no spread'}, no interval"
        else:
            note = "not compared: another protocol"
        reference = self._reference(row, name, ours)
        if bound is not None:
            verdict = against_bound(ours, published, bound, comparable=comparable)
        else:
            verdict = against_value(ours, published, runs, reference, comparable=comparable)
        beside = "" if reference is None else difference(ours, reference[0]).text(digits)
        judged: dict[str, Any] = {"note": note}
        judged["deviation"] = ours.mean - published if comparable else None
        judged["deviation_half_width"] = interval.half_width if interval else None
        return judged | {"difference_from_baseline": beside, "verdict": verdict}

    @property
    def lines(self) -> list[str]:
        """The summary as Markdown, a line per printed number."""
        beside = "ours − baseline" if self.table.baseline else "ours − equal"
        shown = []
        for entry in self.summary.to_dict("records"):
            digits, bound = entry["digits"], entry["bound"]
            ours = "–"
            if pd.notna(entry["mean"]):
                spread = f" ± {_shown(entry['std'], digits)}" if pd.notna(entry["std"]) else ""
                ours = f"{_shown(entry['mean'], digits)}{spread}"
            printed = f"{entry['published']:.{digits}f}"
            line = {
                "method": entry["method"],
                "number": f"{entry['metric']}, {entry['unit']}",
                "published": f"{bound} {printed}" if bound else printed,
                "ours": ours,
                "seeds": entry["num_seeds"],
                "ours − published": entry["note"],
            }
            if self.table.baseline or self.analysis.neutral is not None:
                line[beside] = entry["difference_from_baseline"]
            shown.append({**line, "verdict": entry["verdict"]})
        return markdown_lines(pd.DataFrame(shown).replace("", None))

    def legend(self) -> str:
        """Say how deviations are judged."""
        base, neutral = self.table.baseline, self.analysis.neutral
        reference = "nothing"
        if base:
            reference = self.table.rows[base].label
        elif neutral is not None:
            reference = f"{neutral:g}"
        runs = self.table.published_runs
        told = _LEGEND.format(runs=f"{runs} run{'s' if runs > 1 else ''}", reference=reference)
        return told + (_SHORTER if self.shortened else "")

    def text(self) -> list[str]:
        """Return how the study was made, and its pictures, of the first seed of each row."""
        words = " ".join(self.study.words)
        how = f"Study: {self.study.name} {f'with {words}' if words else 'with its defaults'}."
        if self.study != self.analysis.study:
            whole = " ".join(self.analysis.study.words)
            how += f" **Shortened too: the table's own takes {whole or 'the defaults'}.**"
        parts = [how, *self.analysis.notes, "## Pictures of the studies"]
        for cell, paths in self._pictures:
            images = " ".join(f"![{p.stem}](figures/{cell.row.name}_{p.name})" for p in paths)
            parts += [f"{cell.label}:", images]
        return parts

    @cached_property
    def _pictures(self) -> list[tuple[Cell, list[Path]]]:
        firsts = {cell.row.name: cell for cell, _ in reversed(self.results)}
        chosen = [firsts[name] for name in self.table.rows if name in firsts]
        return [(cell, self.study.pictures(cell)) for cell in chosen]

    def write(self, folder: Path) -> str:
        """Write what every report has, and the pictures of the studies."""
        table = super().write(folder)
        for cell, paths in self._pictures:
            for path in paths:
                shutil.copyfile(path, folder / "figures" / f"{cell.row.name}_{path.name}")
        return table
