"""The figure of a table's report: scores over seeds, a panel per task and metric."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_probattn.analysis.drawing import label_rows, score_limits, tiles
from lit_probattn.compare.tables import decimals_of
from lit_probattn.experiments.expectations import NO_INTERVAL
from lit_probattn.records.figures import PUBLISHED, ReportFigure, palette_of, readable
from lit_probattn.records.tables import span

_MOST_PANELS = 4  # in one row
_MOST_NAMED = 2  # rows in a claim
_LABEL_WIDTH = 36  # characters of a line


def scores_figure(
    summary: pd.DataFrame,
    rows: pd.DataFrame,
    baseline_of: Callable[[str], str],
    *,
    compared: bool,
) -> ReportFigure:
    """Return the figure of the scores, a panel per task and metric with rows from top to bottom.

    Args:
        summary: the report's summary.
        rows: one row per finished run.
        baseline_of: returns, for a task, the row whose spread over seeds sets the smallest range
            of the axis.
        compared: whether published numbers have the same protocol.
    """
    summary = summary.assign(method=summary["method"].map(readable))
    seeds = sorted({int(n) for n in summary["num_seeds"]})
    several = max(seeds) > 1
    error = (
        "mean ± standard deviation over seeds (n − 1)"
        if several
        else "one seed, without error estimate"
    )
    bases = dict.fromkeys(
        part["method"].iloc[0]
        for task in summary["task"].unique()
        if len(part := summary[(summary["task"] == task) & (summary["row"] == baseline_of(task))])
    )
    caption = (
        f"Small dots: one seed each, n = {' or '.join(map(str, seeds))} per row; large dots: "
        f"{error}. Baseline: {' or '.join(bases) or 'none'}."
    )
    if summary["published"].notna().any():
        protocol = "the same protocol" if compared else "a different, longer protocol"
        caption += (
            f" Diamonds: published values, with {protocol}; values far outside the range are "
            "given below the axis."
        )
    draw_panels = partial(draw, summary, rows, baseline_of, compared=compared)
    return ReportFigure(claim_of(summary), caption, draw_panels)


def claim_of(summary: pd.DataFrame) -> str:
    """Return a sentence on rows that differ from their baseline beyond the spread over seeds."""
    first = summary.iloc[0]
    about = f"{first['task']}, {first['metric']}, {first['unit']}"
    beside_base = summary[~summary["difference_from_baseline"].isin(["", "baseline"])]
    beside_base = beside_base[~beside_base["difference_from_baseline"].str.endswith(NO_INTERVAL)]
    if summary["num_seeds"].max() < 2 or beside_base.empty:
        part = summary[(summary["task"] == first["task"]) & (summary["metric"] == first["metric"])]
        digits = decimals_of(first["unit"]) - 1
        seeds = span(part["num_seeds"], "d")
        return (
            f"{about}: {span(part['mean'], f'.{digits}f')}, {seeds} "
            f"seed{'' if seeds == '1' else 's'} per row"
        )
    marked = beside_base[beside_base["difference_from_baseline"].str.endswith("*")]
    base = summary[summary["difference_from_baseline"] == "baseline"]["method"].unique()
    against = " and ".join(map(str, base))
    if marked.empty:
        return (
            f"None of {beside_base['row'].nunique()} variants differs from {against} beyond the "
            f"spread over seeds ({summary['task'].nunique()} tasks)"
            if summary["task"].nunique() > 1
            else f"None of {beside_base['row'].nunique()} variants differs from {against} beyond "
            f"the spread over seeds ({about})"
        )
    told = [
        f"{e['method']} ({e['task']}, {e['metric']}: {e['difference_from_baseline'].split()[0]})"
        for e in marked.head(_MOST_NAMED).to_dict("records")
    ]
    more = f" and {len(marked) - len(told)} more" if len(marked) > len(told) else ""
    return f"Different from {against} beyond the spread over seeds: {'; '.join(told)}{more}"


def draw(
    summary: pd.DataFrame,
    rows: pd.DataFrame,
    baseline_of: Callable[[str], str],
    *,
    compared: bool,
) -> Figure:
    """Draw one panel per task and metric, with the rows of the table from top to bottom.

    An axis is at least as wide as `score_limits` asks for. Published numbers of another protocol
    that are too far away to distinguish the measured ones are named below the axis.
    """
    found = [
        (key, part)
        for key, part in summary.groupby(["task", "metric"], sort=False)
        if f"value {key[1]}" in rows and key[0] in set(rows["task"])
    ]
    tallest = max(len(part) for _, part in found)
    height = 1.9 + 0.36 * tallest
    columns = len(found) if len(found) <= _MOST_PANELS else _MOST_PANELS - 1
    figure, axes = tiles(len(found), columns, 4.2 + 2.0 / columns, height)
    methods = [list(part["method"]) for _, part in found]
    colours = palette_of(summary["method"])
    for axis, ((task, metric), part) in zip(axes, found, strict=True):
        places = {name: -index for index, name in enumerate(part["row"])}
        mine = rows[rows["task"] == task]
        shown = _draw_scores(axis, part, mine, str(metric), places, colours)
        own = part["std"].astype(float)[part["row"] == baseline_of(str(task))]
        least_spread = None if own.empty else own.iloc[0]
        about = _score_words(str(task), str(metric), str(part["unit"].iloc[0]))
        known = part[part["published"].notna()]
        if not compared and _far(known["published"], *score_limits(shown, least_spread)):
            least, most = known["published"].min(), known["published"].max()
            about += f"\npublished: {least:g} to {most:g}, off this axis"
        elif len(known):
            axis.scatter(
                known["published"],
                [places[name] - 0.22 for name in known["row"]],
                marker="D",
                facecolors="none",
                edgecolors=PUBLISHED,
            )
            shown = [*shown, *known["published"]]
        axis.set_xlim(score_limits(shown, least_spread))
        label_rows(axis, [textwrap.fill(method, _LABEL_WIDTH) for method in part["method"]])
        axis.set_xlabel(about)
    for index, axis in enumerate(axes):
        if index % columns and methods[index] == methods[index - 1]:
            axis.tick_params(labelleft=False)
    return figure


def _draw_scores(
    axis: Axes,
    part: pd.DataFrame,
    rows: pd.DataFrame,
    metric: str,
    places: Mapping[str, int],
    colours: Mapping[str, str],
) -> list[float]:
    """Draw the seeds, means and deviations of the rows; return all drawn values."""
    shown: list[float] = []
    for entry in part.to_dict("records"):
        colour, place = colours[entry["method"]], places[entry["row"]]
        values = rows.loc[rows["row"] == entry["row"], f"value {metric}"]
        axis.scatter(values, [place] * len(values), s=16, color=colour, alpha=0.55, zorder=3)
        spread = 0.0 if pd.isna(entry["std"]) else float(entry["std"])
        error = None if pd.isna(entry["std"]) else [spread]
        style: dict[str, Any] = {"fmt": "o", "markersize": 6, "capsize": 3, "color": colour}
        axis.errorbar([entry["mean"]], [place + 0.22], xerr=error, **style)
        shown += [*values, entry["mean"] - spread, entry["mean"] + spread]
    return shown


def _score_words(task: str, metric: str, unit: str) -> str:
    """Return the name of an axis, such as `test perplexity on wikitext_small`."""
    split = metric in ("test", "valid")
    what = f"{metric} {'score' if unit == '%' else unit}" if split else metric
    return f"{what} on {task}" + (f", {unit}" if unit == "%" or not split else "")


def _far(published: pd.Series, low: float, high: float) -> bool:
    """Return whether `low` to `high` covers less than a fifth of an axis with published numbers."""
    if published.empty:
        return False
    return high - low < 0.2 * (max(high, published.max()) - min(low, published.min()))
