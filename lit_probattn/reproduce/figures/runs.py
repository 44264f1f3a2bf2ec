"""Figures from runs of published tables: learning curves, and studies of trained models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from lit_probattn.analysis.drawing import tiles
from lit_probattn.base.errors import ConfigError, nearest
from lit_probattn.compare.protocol import setting
from lit_probattn.compare.runs import Run
from lit_probattn.compare.tables import record
from lit_probattn.experiments.expectations import Finding, Sample, combined
from lit_probattn.reproduce.figures.claims import Claim
from lit_probattn.reproduce.figures.curves import Curves, curve_of
from lit_probattn.reproduce.figures.panels import Panel, show
from lit_probattn.reproduce.figures.report import FigureReport, Judge
from lit_probattn.reproduce.studies import RunStudy, Value, run_studies

SETTING = "run.test_during_training"
_TEST_NOTE = (
    "As in the paper, curves show the test split, which was evaluated at every validation but "
    "selected no checkpoint. The best value of such a curve is not a result of the variant."
)


class RunFigure(FigureReport):
    """A figure of configs/reproduce/run_figures.bundle.yaml."""

    # ---- results --------------------------------------------------------------------------------

    @cached_property
    def drawn_of_test(self) -> Mapping[str, str]:
        """Return the test metrics that replace logged metrics, if all runs logged them."""
        named: Mapping[str, str] = self.part.get("test_curves", {})
        logged = all(setting(run.config, SETTING) is not None for run in self.runs)
        return named if logged else {}

    @cached_property
    def studies(self) -> dict[str, RunStudy]:
        """The studies by name, with their flags for the reduced protocol if the runs have it."""
        is_short = any(run.options.shortened for run in self.runs)
        short = self.part.get("studies_shortened", {}) if is_short else {}
        named = self.part.get("studies", {})
        return {name: RunStudy(name, short.get(name, flags)) for name, flags in named.items()}

    @cached_property
    def values(self) -> dict[str, tuple[RunStudy, Value]]:
        """Values of studies by name."""
        found = {}
        for name, entry in self.part.get("values", {}).items():
            where = f"{self.table.name}: value {name}"
            number = {key: value for key, value in entry.items() if key != "study"}
            found[name] = (self.studies[entry["study"]], record(Value, where, number))
        return found

    def runs_of(self, row: str) -> list[tuple[Run, dict[str, Any]]]:
        """Return the finished runs of a row with their results."""
        return [(run, result) for run, result in self.results if run.row.name == row]

    def over_seeds(self, row: str, name: str) -> Sample | None:
        """Return a value of a row over seeds; None if it is missing.

        Raises:
            ConfigError: the value is unknown.
        """
        metrics = {metric for task in self.table.tasks.values() for metric in task.metrics}
        if name not in self.values and name not in metrics:
            known = [*self.values, *metrics]
            raise ConfigError(f"{self.table.name}: unknown value {name!r}{nearest(name, known)}")
        return self.sample(row, name if name in self.values else f"value {name}")

    def curves(self, row: str, metric: str) -> Curves:
        """Return a logged metric of a row, by seed."""
        found = {run.seed: curve_of(run, result, metric) for run, result in self.runs_of(row)}
        return {seed: curve for seed, curve in found.items() if curve is not None}

    def tables(self, row: str, study: str, file: str) -> pd.DataFrame:
        """Return a table of a study of a row, concatenated over seeds."""
        done = [run for run, _ in self.runs_of(row) if self.studies[study].is_done(run)]
        parts = [self.studies[study].table(run, file).assign(seed=run.seed) for run in done]
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()

    def columns(self, run: Run, result: dict[str, Any]) -> dict[str, Any]:
        """Return the values of a run's studies."""
        return {
            name: value.of(study, run) if study.is_done(run) else None
            for name, (study, value) in self.values.items()
        }

    # ---- sentences -----------------------------------------------------------------------------

    def judges(self) -> Mapping[str, Judge]:
        """Return the function that judges the claims of each sentence."""
        rows = list(self.table.rows)
        claims = {
            key: [
                Claim.read(claim, f"{self.table.name}, {key}", rows) for claim in sentence["holds"]
            ]
            for key, sentence in self.part["says"].items()
        }
        return {key: self._judge(parts) for key, parts in claims.items()}

    def _judge(self, claims: Sequence[Claim]) -> Judge:
        def judge() -> Finding:
            label = {name: row.label for name, row in self.table.rows.items()}.__getitem__
            named = [claim.of_curve(self.drawn_of_test) for claim in claims]
            return combined([claim.judge(self.over_seeds, self.curves, label) for claim in named])

        return judge

    def text(self) -> list[str]:
        """Return the sentences with their verdicts, and notes on the figure."""
        note = _TEST_NOTE if self.drawn_of_test else self.part.get("note")
        return [*super().text(), *([note] if note else [])]

    # ---- figures -------------------------------------------------------------------------------

    def drawn(self) -> dict[str, Callable[[], Figure]]:
        """Return functions that draw the panels and, as a separate figure, those of studies."""
        where = f"{self.table.name}: panel"
        panels = [record(Panel, where, entry) for entry in self.part["panels"]]
        drawn = [panel for panel in panels if panel.draw != "figures"]
        found: dict[str, Callable[[], Figure]] = {}
        if drawn:
            found["figure"] = partial(self._draw_panels, drawn)
        for number, panel in enumerate(p for p in panels if p.draw == "figures"):
            name = f"studies{number + 1}" if drawn or number else "figure"
            found[name] = partial(self._draw_studies, panel)
        return found

    def _label_of(self, row: str) -> str:
        return self.table.rows[row].label

    def _draw_panels(self, drawn: Sequence[Panel]) -> Figure:
        figure, axes = tiles(len(drawn), 3 if len(drawn) != 4 else 2, 4.2, 3.4)
        for panel, axis in zip(drawn, axes, strict=True):
            rows = list(panel.rows or self.table.rows)
            if panel.draw == "curves":
                panel = replace(panel, metric=self.drawn_of_test.get(panel.metric, panel.metric))
                curves = {row: self.curves(row, panel.metric) for row in rows}
                panel.draw_curves(axis, curves, self._label_of)
            else:
                panel.draw_study(axis, rows, self.tables, self._label_of)
        return figure

    def _draw_studies(self, panel: Panel) -> Figure:
        rows = list(panel.rows or self.table.rows)
        figure, axes = tiles(len(rows), 3, 5.0, 4.4)
        for row, axis in zip(rows, axes, strict=True):
            seed, path = self._study_figure(row, panel)
            show(axis, path, self._label_of(row) + (f", seed {seed}" if path else ""))
        return figure

    def _study_figure(self, row: str, panel: Panel) -> tuple[int, Path | None]:
        """Return the seed and the figure of the first seed that is studied."""
        study = self.studies[panel.study]
        for run, _ in self.runs_of(row):
            named = [path for path in study.figures(run) if path.name == panel.file]
            if study.is_done(run) and named:
                return run.seed, named[0]
        return 0, None

    # ---- studies -------------------------------------------------------------------------------

    def complete(self, runs: Sequence[Run], jobs: int, devices: Sequence[str]) -> dict[str, str]:
        """Run the studies of the trained runs."""
        studies = [job for study in self.studies.values() for job in study.jobs(runs)]
        return run_studies(studies, jobs, devices)


class StudyFigure(RunFigure):
    """A figure with studies, which run when all runs are trained."""

    after_every_run = False
