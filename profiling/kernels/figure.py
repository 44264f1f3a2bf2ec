"""The figure of a speed report: time ratios of the sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_probattn.analysis.drawing import CHEAPER, dot, label_rows, marker_legend, tiles
from lit_probattn.records.figures import ReportFigure, colour_of
from profiling.kernels.config import KernelsConfig
from profiling.report.names import variant_name

_MOST_PANELS = 4
_MARKS = "oDsv^"

Rows = Mapping[tuple[str, str], Mapping[str, Any]]  # by point and comparison


def time_figure(config: KernelsConfig, rows: Sequence[Mapping[str, Any]]) -> ReportFigure:
    """Return the figure of time ratios with their 20 % and 80 % quantiles, a panel per point.

    Args:
        config: the file, with the comparisons of the figure by row and mark.
        rows: rows of `measured_rows`; at least one has a comparison, others are ignored.
    """
    names = {name for row in config.figure.values() for name in row.values()}
    found = {(r["place"], r["comparison"]): r for r in rows if r.get("comparison") in names}
    places = list(dict.fromkeys(place for place, _ in found))
    shown = places[:_MOST_PANELS]  # grids are in order of importance
    marks = list(dict.fromkeys(mark for row in config.figure.values() for mark in row))
    words = dict.fromkeys(
        side_words(config, one.against) for one in config.comparisons if one.name in names
    )
    caption = (
        f"Median time relative to {' or '.join(words)}, at {len(shown)} of {len(places)} points; "
        f"{CHEAPER}. Marks: {', '.join(marks)}. Error bars: 20 % and 80 % quantiles of the ratio "
        "over rounds, in which all implementations alternate."
    )
    first = {row[marks[0]] for row in config.figure.values() if marks[0] in row}
    bases = dict.fromkeys(
        side_words(config, one.against) for one in config.comparisons if one.name in first
    )
    claim = _claim(config, found, shown, marks[0], " or ".join(bases))
    return ReportFigure(claim, caption, partial(_draw, config, found, shown, marks))


def side_words(config: KernelsConfig, name: str) -> str:
    """Return the label of a side, such as `PyTorch's softmax attention, 8 heads`."""
    side = config.sides[name]
    if side.torch_sdpa is not None:
        chosen = side.torch_sdpa.backend
        told = "PyTorch's softmax attention" + ("" if chosen == "any" else f" by {chosen}")
        return f"{told}, {side.torch_sdpa.num_heads} heads"
    if side.attention is None:
        return name
    class_path, options = side.attention.resolve(Path.cwd())
    heads = [options["num_heads"]] if "num_heads" in options else []
    told = variant_name(class_path.rpartition(".")[2], options, heads)
    dropout = f", dropout {options['dropout']:g}" if options.get("dropout") else ""
    return f"{told}{dropout}, backend {side.backend}"


def _claim(config: KernelsConfig, found: Rows, places: Sequence[str], mark: str, base: str) -> str:
    """Return the ranges of the fastest and the slowest row for the first mark."""
    ranges = {}
    for label, row in config.figure.items():
        keys = [(place, row[mark]) for place in places if mark in row]
        values = [found[key]["time_ratio"] for key in keys if key in found]
        if values:
            ranges[label] = (min(values), max(values))
    if not ranges:
        return f"Time relative to {base}"
    below = sum(high < 1.0 for _, high in ranges.values())
    least = min(ranges, key=lambda label: sum(ranges[label]))
    low, high = ranges[least]
    return (
        f"{least}: {low:.2f} to {high:.2f} of the time of {base}; {below} of {len(ranges)} rows "
        f"are faster at all {len(places)} points ({mark})"
    )


def _draw(
    config: KernelsConfig, found: Rows, places: Sequence[str], marks: Sequence[str]
) -> Figure:
    height = 1.0 + 0.32 * len(config.figure)
    figure, axes = tiles(len(places), 2, 4.8, height, sharex=True, sharey=True)
    for axis, place in zip(axes, places, strict=True):
        _panel(
            axis,
            config.figure,
            {name: row for (at, name), row in found.items() if at == place},
            marks,
        )
        axis.set_title(fill(place, 52), fontsize=9)
    # The axis is shared, and includes all points and error bars.
    ends = [row["time_ratio_p80"] for (place, _), row in found.items() if place in places]
    axes[0].set_xlim(0.0, 1.05 * max(1.0, *ends))
    for axis in axes[-2:]:
        axis.set_xlabel(f"time / time of the baseline ({CHEAPER})", fontsize=9)
    marker_legend(figure, dict(zip(marks, _MARKS, strict=False)), marks[1:])
    return figure


def _panel(
    axis: Axes,
    rows: Mapping[str, Mapping[str, str]],
    found: Mapping[str, Mapping[str, Any]],
    marks: Sequence[str],
) -> None:
    for place, (mark, shape) in enumerate(zip(marks, _MARKS, strict=False)):
        offset = 0.25 * ((len(marks) - 1) / 2 - place)
        for line, (label, row) in enumerate(rows.items()):
            one = found.get(row.get(mark, ""))
            if one is None:
                continue
            ends = one["time_ratio_p20"], one["time_ratio_p80"]
            style: dict[str, Any] = {"marker": shape, "is_hollow": place > 0}
            dot(axis, one["time_ratio"], offset - line, ends, colour=colour_of(label), **style)
    axis.axvline(1.0, color="0.5", lw=0.8, ls=":")
    label_rows(axis, list(rows))
