"""Report of an analysis table: printed and reproduced numbers, and figures of the studies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from lit_probattn.compare.report import Report
from lit_probattn.compare.runs import Run
from lit_probattn.compare.tables import Metric, Row, TaskEntry
from lit_probattn.experiments.expectations import (
    Printed,
    Reference,
    Sample,
    against_printed,
    computed,
    difference,
    digits_of,
)
from lit_probattn.records.tables import markdown_lines
from lit_probattn.reproduce.analyses.computed import Computed
from lit_probattn.reproduce.analyses.table import Analysis
from lit_probattn.reproduce.studies import RunStudy, run_studies

_LEGEND = (
    "Mean ± standard deviation over seeds (n − 1). The published number is treated as the mean "
    "of {runs} with our spread, since the paper does not give the number of runs. The order is "
    "relative to {reference}."
)
_SHORTER = " With a shortened protocol only the order is compared."


def _shown(value: float, digits: int) -> str:
    """Return a number with one more decimal than printed; small ones with two digits."""
    small = 0 < abs(value) < 10.0**-digits
    return f"{value:.2g}" if small else f"{value:.{digits + 1}f}"


@dataclass
class AnalysisReport(Report):
    """Report of an analysis table: printed and reproduced numbers, and figures of the study.

    Args:
        table, runs, command: see Report.
        analysis: study and numbers of the table.
    """

    analysis: Analysis

    # ---- studies -------------------------------------------------------------------------------

    @property
    def study(self) -> RunStudy:
        """The study of these runs."""
        short = any(run.options.shortens for run in self.runs)
        return self.analysis.shortened if short else self.analysis.study

    def complete(self, runs: Sequence[Run], jobs: int, devices: Sequence[str]) -> dict[str, str]:
        """Study the trained runs."""
        return run_studies(self.study.jobs(runs), jobs, devices)

    def plan(self, runs: Sequence[Run], commands: bool) -> list[str]:
        """Return the number of runs to study, and the commands."""
        left = sum(not self.study.is_done(run) for run in runs)
        lines = [f"then the study {self.study.name} of {left} of {len(runs)} runs"]
        return lines + ([self.study.command(run) for run in runs] if commands else [])

    @cached_property
    def results(self) -> list[tuple[Run, dict[str, Any]]]:
        """Studied runs with their results, whose values include the numbers of the study."""
        found = []
        for run in self.runs:
            result = run.result()
            if result is not None and self.study.is_done(run):
                numbers = {
                    name: number.metric.scale
                    * self.analysis.value(run.row.name, name).of(self.study, run)
                    for name, number in self.analysis.numbers.items()
                }
                found.append((run, {**result, "values": {**result["values"], **numbers}}))
        return found

    @property
    def has_numbers(self) -> bool:
        """Whether there are studied runs or printed numbers that need no runs."""
        return bool(self.results or self.analysis.computed)

    # ---- printed and reproduced numbers --------------------------------------------------------

    def metrics(self, task: TaskEntry) -> Sequence[Metric]:
        """Return the numbers of the study."""
        return [number.metric for number in self.analysis.numbers.values()]

    @cached_property
    def summary(self) -> pd.DataFrame:
        """One row per printed number, in printed order; reproduced values may be missing."""
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
                entries.append({**found, **self._verdict(row, name, value)})
        computed = [self._computed_entry(*pair) for pair in self.analysis.computed]
        return pd.DataFrame([*entries, *computed])

    def _computed_entry(self, number: Computed, text: str) -> dict[str, Any]:
        task, method, heads, metric, _ = number.printed
        ours, published, digits = (
            number.value(self.analysis.part.folder),
            float(text),
            digits_of(text),
        )
        away = f"{ours - published:+.{digits + 1}f}: computed, without spread"
        return {
            **{"task": task, "row": number.of, "metric": metric, "unit": number.unit},
            **{"method": Row("", method, heads, "").label, "num_seeds": 0, "mean": ours},
            **{"published": published, "digits": digits, "bound": number.bound, "note": away},
            "deviation": ours - published,
            "verdict": computed(ours, Printed.read(text), number.bound),
        }

    def _reference(self, row: Row, name: str, ours: Sample) -> Reference | None:
        """Return the reference of a number's order: the baseline or the neutral value."""
        base, neutral = self.table.baseline, self.analysis.neutral
        if neutral is not None:
            return Reference(ours.constant(neutral), neutral)
        if not base or base == row.name:
            return None
        sample = self.sample(base, f"value {name}")
        ((_, published),) = self.table.rows[base].published.items()
        return Reference(sample, published[name]) if sample and name in published else None

    def _verdict(self, row: Row, name: str, published: float) -> dict[str, Any]:
        ours = self.sample(row.name, f"value {name}")
        if ours is None:
            return {"verdict": "inconclusive", "note": "no model has been studied"}
        digits, comparable = self.analysis.digits[name], not self.shortened
        reference = self._reference(row, name, ours)
        found = against_printed(
            ours,
            Printed.rounded(published, digits),
            self.table.published_runs,
            reference,
            bound=self.analysis.numbers[name].bound,
            comparable=comparable,
            digits=digits + 1,
        )
        away = found.estimate
        half_width = (away.high - away.low) / 2 if away is not None and away.is_known else None
        beside = "" if reference is None else difference(ours, reference.ours).text(digits + 1)
        return {
            "note": found.measured,
            "deviation": None if away is None else away.value,
            "deviation_half_width": half_width,
            "difference_from_baseline": beside,
            "verdict": found.verdict,
        }

    @property
    def lines(self) -> list[str]:
        """The summary as Markdown, one line per printed number."""
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
                "published": f"{bound} {printed}" if isinstance(bound, str) else printed,
                "ours": ours,
                "seeds": entry["num_seeds"],
                "ours − published": entry["note"],
            }
            if self.table.baseline or self.analysis.neutral is not None:
                line[beside] = entry["difference_from_baseline"]
            shown.append({**line, "verdict": entry["verdict"]})
        return markdown_lines(pd.DataFrame(shown).replace("", None))

    def legend(self) -> str:
        """Return how deviations are judged."""
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
        """Return the command of the study, and its figures for the first seed of each row."""
        words = " ".join(self.study.words)
        how = f"Study: {self.study.name} {f'with {words}' if words else 'with its defaults'}."
        if self.study != self.analysis.study:
            whole = " ".join(self.analysis.study.words)
            how += (
                " **The study is shortened too; the published table uses "
                f"{whole or 'the defaults'}.**"
            )
        parts = [how, *self.analysis.part.get("notes", ()), "## Figures of the studies"]
        for run, paths in self._study_figures:
            images = " ".join(f"![{p.stem}](figures/{run.row.name}_{p.name})" for p in paths)
            parts += [f"{run.label}:", images]
        return parts

    @cached_property
    def _study_figures(self) -> list[tuple[Run, list[Path]]]:
        firsts = {run.row.name: run for run, _ in reversed(self.results)}
        chosen = [firsts[name] for name in self.table.rows if name in firsts]
        return [(run, self.study.figures(run)) for run in chosen]

    def copies(self) -> dict[str, Path]:
        """Return the figures of the studies."""
        return {
            f"{run.row.name}_{path.stem}": path
            for run, paths in self._study_figures
            for path in paths
        }
