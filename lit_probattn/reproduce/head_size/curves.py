"""Curves of perplexity over model sizes, with the spread over seeds."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes

from lit_probattn.analysis.drawing import label, powers_of_two, score_limits
from lit_probattn.reproduce.head_size.grid import RULES

# Columns that identify a point of a grid, without the seed.
POINT = ["rule", "num_heads", "head_dim", "embed_dim", "mlp_dim"]

Series = Mapping[str, pd.DataFrame]


def series_by_rule(table: pd.DataFrame) -> Series:
    """Return the runs of each rule by its label; rules over widths are also split by heads."""
    found: dict[str, pd.DataFrame] = {}
    for rule, part in table.groupby("rule", sort=False):
        words = RULES[str(rule)]
        found |= (
            series_by(part, "num_heads", f"{words}, {{}} heads")
            if rule == "width"
            else {words: part}
        )
    return found


def series_by(table: pd.DataFrame, column: str, words: str) -> Series:
    """Return the runs of each value of a column, labelled by `words` with the value."""
    return {words.format(value): part for value, part in table.groupby(column)}


def draw_curves(
    axis: Axes,
    series: Series,
    column: str,
    limits: tuple[float, float],
    first: int = 0,
    score: str = "perplexity",
) -> None:
    """Draw the mean curve of each series, with deviations if there are several seeds.

    Args:
        axis: the panel.
        series: runs by label.
        column: column of the horizontal axis.
        limits: limits of the vertical axis.
        first: index of the first colour.
        score: column of the vertical axis.
    """
    for number, (name, runs) in enumerate(series.items(), first):
        points = runs.groupby(column)[score]
        means, spread = points.mean(), points.std()
        axis.errorbar(
            *(means.index, means, spread if spread.notna().any() else None),
            marker="o",
            ms=4,
            lw=1.3,
            capsize=2,
            color=f"C{number}",
            label=name,
        )
    powers_of_two(axis)
    words = "test perplexity" if score == "perplexity" else score
    label(axis, y=words, legend=8)
    axis.set_ylim(limits)


def limits_of(table: pd.DataFrame, score: str = "perplexity") -> tuple[float, float]:
    """Return common limits of a score for all panels, wider than the spread over seeds."""
    groups = table.groupby([column for column in POINT if column in table])[score]
    spread = groups.std()
    ends = [groups.mean() + sign * spread.fillna(0.0) for sign in (-1, 1)]
    return score_limits([*ends[0], *ends[1]], spread.max())


def in_millions(axis: Axes) -> None:
    """Set the horizontal axis to linear, in millions."""
    axis.set_xscale("linear")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:.2f}M")
