"""Trends of printed scores over the rows of a table, checked with reproduced scores.

Scores of another protocol are not comparable with printed ones, but their order between rows is.
For each seed with all rows, the slope of its scores y over the printed scores p,

    slope = Σ (p_r − p̄)(y_r − ȳ) / Σ (p_r − p̄)²

is the reproduced change per printed point: 1 is the paper's effect, below 0 the opposite. The
verdict is whether its mean over seeds is above 0. Rank correlations are Spearman's; with few rows
they are coarse, so they are only shown.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from lit_probattn.analysis.drawing import score_limits
from lit_probattn.compare.tables import Metric, Table, TaskEntry, Trend
from lit_probattn.experiments.expectations import Finding, mean_of, missing
from lit_probattn.records.figures import PUBLISHED, ReportFigure, panels
from lit_probattn.records.tables import markdown_lines

LEAST_ROWS = 3
_HEADING = """\
## Trends

Do the rows reproduce the printed trend? Slope: reproduced change per printed point, mean over \
seeds with a 95 % interval (not corrected for multiple comparisons); a positive slope has the \
paper's direction, 1 its size. Rank correlations (Spearman, means over seeds): of printed and \
reproduced scores with the property in which the rows differ, and of reproduced with printed \
scores. Intervals and verdicts apply to this protocol, its seeds and its test samples, which all \
rows share."""


@dataclass(frozen=True)
class Agreement:
    """A trend of one score, printed and reproduced.

    Args:
        rows: the rows with printed and reproduced scores, in the order of `x`.
        x: the property in which they differ.
        printed: printed scores of the rows.
        spread: printed deviations; NaN if missing.
        ours: reproduced scores of the seeds with all rows. Shape (seeds, rows).
    """

    trend: Trend
    task: TaskEntry
    metric: Metric
    rows: tuple[str, ...]
    x: tuple[float, ...]
    printed: tuple[float, ...]
    spread: tuple[float, ...]
    ours: np.ndarray

    @property
    def slopes(self) -> list[float]:
        """Reproduced change per printed point, by seed; empty if it is undefined."""
        if len(self.rows) < LEAST_ROWS or len(set(self.printed)) == 1:
            return []
        return [float(stats.linregress(self.printed, y).slope) for y in self.ours]

    @property
    def finding(self) -> Finding:
        """Verdict on the paper's direction, from the slopes of all seeds."""
        if len(self.rows) < LEAST_ROWS:
            return missing(f"only {len(self.rows)} of {len(self.trend.rows)} rows are available")
        if len(set(self.printed)) == 1:
            return missing("the printed scores are equal")
        if not len(self.ours):
            return missing("no seed has all rows")
        slope = mean_of(self.slopes)
        says = f"{self.metric.name} of {self.task.name} {self.trend.says} with {self.trend.over}"
        return Finding(f"{slope}", slope.side(1), says, slope)

    def entry(self) -> dict[str, object]:
        """Return a row of the table of trends."""
        found = self.finding
        return {
            "task": self.task.name,
            "metric": self.metric.name,
            "with": self.trend.over,
            "claimed": self.trend.says,
            "rows": len(self.rows),
            "seeds": len(self.ours),
            "printed": _shown(rank_correlation(self.x, self.printed)),
            "ours": _shown(self._mean_correlation(self.x)),
            "ours with printed": _shown(self._mean_correlation(self.printed)),
            "slope": found.measured,
            "verdict": found.verdict,
        }

    def _mean_correlation(self, other: Sequence[float]) -> float | None:
        found = [rank_correlation(other, y) for y in self.ours.tolist()]
        known = [value for value in found if value is not None]
        return statistics.fmean(known) if known else None


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation; None if a sequence is constant or has one element."""
    if min(len(set(first)), len(set(second))) < 2:
        return None
    return float(stats.spearmanr(first, second).statistic)


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:+.2f}"


def agreements(table: Table, rows: pd.DataFrame) -> list[Agreement]:
    """Return the trends of all printed scores of a table that have been measured.

    Args:
        rows: `task`, `row`, `seed` and `value NAME` of all finished runs.
    """
    found = []
    for trend in table.trends:
        for task in table.tasks.values():
            mine = rows[rows["task"] == task.name]
            if mine.empty or (trend.tasks and task.name not in trend.tasks):
                continue
            for metric in task.metrics.values():
                one = _agreement(table, trend, task, metric, mine)
                if one is not None:
                    found.append(one)
    return found


def _agreement(
    table: Table, trend: Trend, task: TaskEntry, metric: Metric, rows: pd.DataFrame
) -> Agreement | None:
    """Return the trend of one score; None if it is not printed, or only counted."""
    printed = {
        name: values[metric.name]
        for name in trend.rows
        if metric.name in (values := table.rows[name].published.get(task.name, {}))
    }
    if not printed or metric.command == "count":
        return None
    names = sorted(set(printed) & set(rows["row"]), key=lambda name: trend.rows[name])
    scores = rows.pivot_table(index="seed", columns="row", values=f"value {metric.name}")
    spread = (table.rows[name].spread.get(task.name, {}).get(metric.name) for name in names)
    return Agreement(
        trend,
        task,
        metric,
        tuple(names),
        tuple(float(trend.rows[name]) for name in names),
        tuple(printed[name] for name in names),
        tuple(math.nan if value is None else value for value in spread),
        scores[names].dropna().to_numpy(),
    )


def trend_lines(found: Sequence[Agreement]) -> list[str]:
    """Return the section of a report; empty without trends."""
    if not found:
        return []
    table = markdown_lines(pd.DataFrame([one.entry() for one in found]))
    return ["", _HEADING, "", *table]


# ---- figure -----------------------------------------------------------------------------------


def trends_figure(found: Sequence[Agreement]) -> ReportFigure:
    """Return the figure of the trends: printed above reproduced scores."""
    first = found[0].finding
    seeds = sorted({len(one.ours) for one in found})
    caption = (
        "Top: published scores, with the printed ± if all have one. Bottom: reproduced scores, "
        f"a thin line per seed (n = {' or '.join(map(str, seeds))}) and a thick line for the "
        "mean; slopes have 95 % intervals over seeds. The vertical scales differ."
    )
    claim = f"{first.says}: slope {first.measured}, {first.verdict}"
    return ReportFigure(claim, caption, partial(draw_trends, found))


def draw_trends(found: Sequence[Agreement]) -> Figure:
    """Draw printed above reproduced scores, a column per score, with separate scales."""
    figure, axes = panels(2, len(found), 3.4, 2.5, sharex="col")
    for column, one in enumerate(found):
        upper, lower = axes[0][column], axes[1][column]
        known = not any(map(math.isnan, one.spread))
        upper.errorbar(
            *(one.x, one.printed, one.spread if known else None),
            fmt="D-",
            color=PUBLISHED,
            markerfacecolor="none",
            capsize=3,
            label="published, with printed ±" if known else "published",
        )
        ends = [
            p + sign * (s if known else 0.0)
            for p, s in zip(one.printed, one.spread, strict=True)
            for sign in (-1, 1)
        ]
        upper.set_ylim(score_limits(ends, None if not known else max(one.spread) / 4))
        _draw_ours(lower, one)
        lower.set_xlabel(one.trend.over)
        lower.set_xscale("log", base=2)
        lower.set_xticks(one.x, [f"{value:g}" for value in one.x])
        lower.minorticks_off()
        unit = "" if one.metric.unit == one.metric.name else f", {one.metric.unit}"
        upper.set_title(
            f"{one.task.name}: {one.metric.name}{unit}\n{one.finding.verdict}", fontsize=9
        )
    axes[0][0].set_ylabel("published")
    axes[1][0].set_ylabel("reproduced")
    handles, labels = axes[1][0].get_legend_handles_labels()
    above = axes[0][0].get_legend_handles_labels()
    figure.legend(
        *([*above[0], *handles], [*above[1], *labels]),
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=8,
    )
    return figure


def _draw_ours(axis: Axes, one: Agreement) -> None:
    for number, scores in enumerate(one.ours):
        axis.plot(
            *(one.x, scores, "o-"),
            color="0.45",
            alpha=0.45,
            lw=0.8,
            ms=3,
            label="one seed" if number == 0 else None,
        )
    if len(one.ours):
        axis.plot(one.x, one.ours.mean(0), "o-", color="black", ms=4, label="mean over seeds")
        spread = one.ours.std(0, ddof=1).max() if len(one.ours) > 1 else None
        axis.set_ylim(score_limits(one.ours.ravel(), None if spread is None else float(spread)))
