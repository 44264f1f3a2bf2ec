"""Figures of costs: sweeps of `python -m profiling`, the figure, and the paper's sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_probattn.analysis.drawing import label, plain_log, powers_of_two, ratio_axis, tiles
from lit_probattn.base.errors import ConfigError
from lit_probattn.base.provenance import as_command
from lit_probattn.compare.tables import Part, record
from lit_probattn.experiments.expectations import Finding
from lit_probattn.experiments.page import (
    Page,
    as_csv,
    findings_table,
    first_of,
    how_many_agree,
    image,
    together,
)
from lit_probattn.records.figures import ReportFigure, palette_of, shades
from lit_probattn.records.tables import markdown_lines
from profiling.report.claims import judge, ratios_of, values_of
from profiling.report.figures import plain_names
from profiling.report.names import AXES, LETTERS
from profiling.report.page import frame_of, made_of
from profiling.report.ratios import METRICS
from profiling.sweep.config import Claim, SweepConfig, load_sweep
from profiling.sweep.run import describe_plan, run_sweep


@dataclass(frozen=True)
class Panel:
    """One panel.

    Args:
        title: title of the panel.
        metric: a column of the rows.
        x: the horizontal axis.
        mode: `eval` or `train`; None means the only one.
        lines: another axis, with one line per value.
        variants: variants to draw; all by default.
        ratio: draw ratios to the baseline instead of values.
        sweep: the sweep, if there are several.
        scope: scope of the rows.
    """

    title: str
    metric: str
    x: str
    mode: Any = None
    lines: Any = None
    variants: Sequence[str] | None = None
    ratio: bool = True
    sweep: str | None = None
    scope: Any = "model"

    def draw(self, axis: Axes, config: SweepConfig, frame: pd.DataFrame) -> None:
        """Draw the lines with values."""
        chosen = None if self.variants is None else list(self.variants)
        claim = Claim(
            metric=self.metric, mode=self.mode, variants=chosen, scope=self.scope, below=1.0
        )
        table = ratios_of(claim, config, frame) if self.ratio else values_of(claim, frame)
        if chosen is not None:
            table = table[table["variant"].isin(chosen)]
        unit = METRICS[self.metric]
        names = plain_names(frame)
        colours = palette_of(names.values())
        found = [(one, part) for one, part in self._lines(table, names) if len(part)]
        variants = [part["variant"].iloc[0] for _, part in found]
        for number, (name, part) in enumerate(found):
            variant = names[variants[number]]
            same = [n for n, one in enumerate(variants) if one == variants[number]]
            several = shades(variant, len(same)) if len(same) > 1 else [colours[variant]]
            colour = several[same.index(number)]
            line = part.drop_duplicates(self.x).sort_values(self.x)
            values = line[["value", "low", "high"]] / (1.0 if self.ratio else unit[1])
            axis.plot(line[self.x], values["value"], "o-", ms=4, lw=1.3, color=colour)
            axis.lines[-1].set_label(name)
            low, high = values["low"], values["high"]
            axis.fill_between(line[self.x], low, high, color=colour, alpha=0.2, lw=0)
        powers_of_two(axis)
        if self.ratio:
            ratio_axis(axis, table["value"])
        elif table["value"].max() > 20 * table["value"].min() > 0:
            plain_log(axis)
        else:
            axis.set_ylim(bottom=0)
        y = "ratio to the baseline (below 1 = cheaper)" if self.ratio else unit[2]
        label(axis, AXES[self.x], y, self.title, legend=8 if len(table) else 0)

    def _lines(
        self, table: pd.DataFrame, names: Mapping[str, str]
    ) -> list[tuple[str, pd.DataFrame]]:
        keys = ["variant", *([self.lines] if self.lines else [])]
        found = []
        for (variant, *values), part in table.groupby(keys, sort=False):
            place = f"{LETTERS[self.lines]} = {values[0]}" if self.lines else ""
            label = names[str(variant)]
            name = f"{label}, {place}" if place and table["variant"].nunique() > 1 else place
            found.append((name or label, part))
        return found


@dataclass(frozen=True)
class SweepFigure:
    """A figure of `kind: sweep_figure` in configs/reproduce/sweep_figures.bundle.yaml.

    Args:
        part: its entry.
        runs: folder of the runs; results are in its subfolders `profiling/SWEEP`.
        command: command in the report.
    """

    part: Part
    runs: Path
    command: str

    @cached_property
    def sweeps(self) -> dict[str, SweepConfig]:
        """The sweeps by file name."""
        return {name: load_sweep(name) for name in self.part["sweeps"]}

    def folder(self, name: str) -> Path:
        """Return the folder of a sweep's rows."""
        return self.runs / "profiling" / Path(name).stem

    def plan(self) -> str:
        """Return the plan of the measurements."""
        parts = []
        for name, config in self.sweeps.items():
            parts.append(f"{name}:\n{describe_plan(config, Path.cwd(), 0, 1)}")
        return "\n".join(parts)

    def run(self, stream: Callable[[str], None] | None = None) -> None:
        """Measure the missing points."""
        for name, config in self.sweeps.items():
            with as_command(self.command):
                run_sweep(config, self.folder(name), Path.cwd(), stream=stream)

    @cached_property
    def frames(self) -> dict[str, pd.DataFrame]:
        """The rows of all sweeps.

        Raises:
            ConfigError: see `frame_of`.
        """
        return {name: frame_of(config, self.folder(name)) for name, config in self.sweeps.items()}

    @cached_property
    def judged(self) -> list[Finding]:
        """Findings on the paper's sentences about this figure.

        Raises:
            ConfigError: there are no sentences.
        """
        found = [
            judge(sentence, config, self.frames[name])
            for name, config in self.sweeps.items()
            for sentence in config.sentences
            if (sentence.figure or Path(name).stem) == self.part.name
        ]
        if not found:
            raise ConfigError(
                f"{self.part.name}: {', '.join(self.sweeps)}: missing claim with `holds` for this "
                "figure in report.paper"
            )
        return found

    def drawn(self) -> Figure:
        """Draw the panels in the paper's axes."""
        entries = [record(Panel, f"{self.part.name}: panel", e) for e in self.part["panels"]]
        figure, axes = tiles(len(entries), 3 if len(entries) != 4 else 2, 4.2, 3.4)
        for panel, axis in zip(entries, axes, strict=True):
            name = panel.sweep or next(iter(self.sweeps))
            panel.draw(axis, self.sweeps[name], self.frames[name])
        return figure

    def figure(self) -> ReportFigure:
        """Return the figure with its claim: the paper's first sentence, as measured."""
        bases = dict.fromkeys(
            plain_names(self.frames[name])[base]
            for name, config in self.sweeps.items()
            for variant in config.variants
            if (base := config.baseline_of(variant)) is not None
        )
        caption = (
            f"Ratios to {' or '.join(bases) or 'no baseline'} at the same sizes; below 1 is "
            "cheaper. Counts have no error; bands of times are 20 % and 80 % quantiles of "
            f"repeated measurements. {sum(map(len, self.frames.values()))} rows."
        )
        return ReportFigure(first_of(self.judged), caption, self.drawn)

    @property
    def lines(self) -> list[str]:
        """The sentences with their verdicts as Markdown."""
        return markdown_lines(findings_table(self.judged))

    def page(self) -> Page:
        """Return the report."""
        notes = [part for part in (self.part.get("note"),) if part]
        notes += [f"- {text}" for c in self.sweeps.values() if c.report for text in c.report.notes]
        return Page(
            kind="sweep figure",
            title=self.part["title"],
            made=together([made_of(frame) for frame in self.frames.values()], self.command),
            finding=how_many_agree(self.judged),
            body=[
                *("## Claims of the paper", "", *self.lines, ""),
                *(*notes, *([""] if notes else []), image("figure")),
            ],
            findings=self.judged,
            tables={"verdicts": as_csv(findings_table(self.judged))},
            figures={"figure": self.figure()},
        )

    def write(self, folder: Path) -> str:
        """Write the report and return its table."""
        self.page().write(folder)
        return "\n".join(self.lines)
