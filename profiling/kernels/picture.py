"""The figure of a speed report: time ratios of the sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_probattn.records.tables import panels
from profiling.kernels.config import KernelsConfig

_MOST_PANELS = 12


def time_picture(config: KernelsConfig, rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw time ratios with 20 % and 80 % quantiles, one panel per point.

    Args:
        config: the file, with the comparisons of the figure by row and colour.
        rows: rows of `measured_rows`; at least one has a comparison, others are ignored.
    """
    picture = config.picture
    names = {name for row in picture.values() for name in row.values()}
    found = {(r["place"], r["comparison"]): r for r in rows if r.get("comparison") in names}
    places = list(dict.fromkeys(place for place, _ in found))[:_MOST_PANELS]
    columns = min(2, len(places))
    lines = -(-len(places) // columns)
    figure, axes = panels(lines, columns, 4.6, 0.9 + 0.3 * len(picture), sharex=True, sharey=True)
    flat = [axis for line in axes for axis in line]
    for axis, place in zip(flat, places, strict=False):
        _panel(axis, picture, {name: row for (at, name), row in found.items() if at == place})
        axis.set_title(fill(place, 60), fontsize=8)
    flat[0].set_xlim(0.0, 1.05 * max(row["time_ratio_p80"] for row in found.values()))  # shared
    for axis in flat[len(places) :]:
        axis.set_visible(False)
    sides = dict.fromkeys(c.against for c in config.comparisons if c.name in names)
    figure.supxlabel(f"time / time of {' or '.join(sides)}", fontsize=9)
    handles, labels = flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    return figure


def _panel(
    axis: Axes, picture: Mapping[str, Mapping[str, str]], found: Mapping[str, Mapping[str, Any]]
) -> None:
    colours = list(dict.fromkeys(label for row in picture.values() for label in row))
    for number, label in enumerate(colours):
        offset = 0.25 * (number - (len(colours) - 1) / 2)
        shown = [
            (line + offset, found[row[label]])
            for line, row in enumerate(picture.values())
            if label in row and row[label] in found
        ]
        middle = [row["time_ratio"] for _, row in shown]
        below = [row["time_ratio"] - row["time_ratio_p20"] for _, row in shown]
        above = [row["time_ratio_p80"] - row["time_ratio"] for _, row in shown]
        style: dict[str, Any] = {"fmt": "o", "ms": 4, "capsize": 2, "color": f"C{number}"}
        axis.errorbar(middle, [y for y, _ in shown], xerr=[below, above], label=label, **style)
    axis.axvline(1.0, color="0.6", lw=0.8, ls=":")
    axis.set_yticks(range(len(picture)), list(picture), fontsize=8)
    axis.set_ylim(len(picture) - 0.5, -0.5)
    axis.grid(axis="x", alpha=0.3)
