"""Panels of a figure from runs: curves, histograms and lines of studies, images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.image import imread

from lit_probattn.analysis.drawing import label, plain_log, powers_of_two
from lit_probattn.records.figures import palette_of
from lit_probattn.reproduce.figures.curves import Curves, smoothed

# Returns a study's table over all seeds, with a column `seed`, by row, study and file.
Tables = Callable[[str, str, str], pd.DataFrame]


@dataclass(frozen=True)
class Panel:
    """One panel; `figures` creates one per row.

    Args:
        draw: content: logged `curves`, a `histogram` or `lines` of a study's table, its `figures`.
        title: title of the panel.
        rows: rows of the table; all by default.
        metric: metric of curves.
        study, file: the study and its table or figure.
        x: column of the horizontal axis, or of the counted values.
        y: column of the vertical axis.
        where: required values of columns; a list allows several.
        by: column with one line per value.
        log: logarithmic axes: `x`, `y` or `xy`.
        most: largest x.
    """

    draw: Literal["curves", "histogram", "lines", "figures"]
    title: str = ""
    rows: Sequence[str] | None = None
    metric: str = ""
    study: str = ""
    file: str = ""
    x: str = ""
    y: str = ""
    where: Mapping[str, Any] = field(default_factory=dict)
    by: str | None = None
    log: str = ""
    most: float | None = None

    def draw_curves(
        self, axis: Axes, curves: Mapping[str, Curves], label_of: Callable[[str], str]
    ) -> None:
        """Draw the mean curve of each row, with a band of one deviation over its seeds."""
        colours = palette_of(label_of(row) for row in curves)
        for row, seeds in curves.items():
            if not seeds:
                continue
            wide = pd.DataFrame({s: smoothed(c, self.metric) for s, c in seeds.items()}).dropna()
            name = f"{label_of(row)} ({len(seeds)} seed{'s' if len(seeds) > 1 else ''})"
            _band(axis, wide, colours[label_of(row)], name)
        self._finish(axis, "optimiser step", self.metric)

    def draw_study(
        self, axis: Axes, rows: Sequence[str], tables: Tables, label_of: Callable[[str], str]
    ) -> None:
        """Draw a histogram, or lines with a band of one deviation over seeds."""
        number = 0
        colours = palette_of(label_of(row) for row in rows)
        found = {row: tables(row, self.study, self.file) for row in rows}
        chosen = {row: self._chosen(table) for row, table in found.items() if len(table)}
        if self.draw == "histogram" and chosen:
            bins = np.histogram_bin_edges(pd.concat(chosen.values())[self.x], 25)
        for row, table in chosen.items():
            colour = colours[label_of(row)]
            if self.draw == "histogram":
                weights = np.full(len(table), 1 / table["seed"].nunique())
                axis.hist(
                    table[self.x],
                    bins=list(bins),
                    weights=weights,
                    histtype="step",
                    lw=1.4,
                    alpha=0.8,
                    color=colour,
                    label=label_of(row),
                )
                axis.axvline(table[self.x].mean(), color=colour, lw=1, ls="--")
                continue
            groups = table.groupby(self.by, sort=False) if self.by else [("", table)]
            for value, part in groups:
                wide = part.pivot_table(index=self.x, columns="seed", values=self.y).dropna()
                name = ", ".join(n for n in (label_of(row) if len(rows) > 1 else "", value) if n)
                colour = f"C{number}" if self.by else colour
                marker = "o" if len(wide) < 25 else ""
                _band(axis, wide, colour, name or label_of(row), marker)
                number += 1
        counts = "number of maps (dashed: mean)"
        self._finish(axis, self.x.replace("_", " "), self.y.replace("_", " ") or counts)

    def _chosen(self, table: pd.DataFrame) -> pd.DataFrame:
        for column, value in self.where.items():
            several = value if isinstance(value, list) else [value]
            # Columns with numbers and words are read as strings.
            table = table[table[column].astype(str).isin([str(one) for one in several])]
        if self.most is not None and len(table):
            table = table[table[self.x] <= self.most]
        return table

    def _finish(self, axis: Axes, x: str, y: str) -> None:
        if axis.has_data():
            if "x" in self.log:
                powers_of_two(axis)
            if "y" in self.log:
                plain_log(axis)
        label(axis, x, y, self.title, legend=7 if axis.get_legend_handles_labels()[0] else 0)


def show(axis: Axes, path: Path | None, title: str) -> None:
    """Show the image of a study, or a note that it is missing."""
    axis.set_axis_off()
    axis.set_title(title, fontsize=9)
    if path is None:
        axis.text(0.5, 0.5, "not studied yet", ha="center", fontsize=8)
    else:
        axis.imshow(imread(path), interpolation="antialiased")


def _band(axis: Axes, wide: pd.DataFrame, colour: str, name: str, marker: str = "") -> None:
    if wide.empty:
        return
    mean, spread = wide.mean(axis=1), wide.std(axis=1)
    axis.plot(mean.index, mean, marker=marker, ms=3, lw=1.3, color=colour, label=name)
    if wide.shape[1] > 1:
        axis.fill_between(mean.index, mean - spread, mean + spread, color=colour, alpha=0.2, lw=0)
