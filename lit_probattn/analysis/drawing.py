"""Shared style of all figures: scales of ratios and scores, panels, logarithmic axes, labels.

All figures use one colour scale for ratios: white is 1, blue is cheaper, red is more expensive, and
it saturates at a factor of 2. The axis of ratios starts at zero, or is logarithmic if ratios exceed
that factor, and includes 1. The range of an axis of scores is at least ten standard deviations of
the baseline, so that noise does not look like an effect.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from lit_probattn.records.figures import panels

BLUE = "#3b6ea5"
RATIO_LIMIT = 2.0
CHEAPER = "below 1 = cheaper"
_RATIO_TICKS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.11, 1.25, 1.43, 1.67, 2.0)
# Smallest range of an axis of scores: in deviations of the baseline, or as a share of the values if
# the deviation is unknown.
_DEVIATIONS, _SHARE = 10.0, 0.1


def ratio_colours() -> dict[str, Any]:
    """Return colour map and scale of ratios, for functions such as `imshow`."""
    return {"cmap": "RdBu_r", "norm": LogNorm(1 / RATIO_LIMIT, RATIO_LIMIT)}


def ratio_bar(figure: Figure, image: Any, axes: Sequence[Axes]) -> None:
    """Draw the colour bar of ratios next to the axes, with open ends."""
    bar = figure.colorbar(image, ax=axes, extend="both", shrink=0.9, pad=0.02)
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.set_ticks(_RATIO_TICKS, labels=[f"{tick:g}" for tick in _RATIO_TICKS])
    bar.ax.tick_params(labelsize=7)
    bar.set_label("← cheaper        ratio        more expensive →", fontsize=8)


def ratio_axis(axis: Axes, values: Iterable[float]) -> None:
    """Scale the vertical axis of ratios from zero, or logarithmically above a factor of 2."""
    shown = [value for value in values if np.isfinite(value) and value > 0.0] or [1.0]
    low, high = min(*shown, 1.0), max(*shown, 1.0)
    if high > RATIO_LIMIT:
        plain_log(axis)
        axis.set_ylim(low / 1.15, high * 1.15)
    else:
        axis.set_ylim(0.0, 1.1 * high)
    axis.axhline(1.0, color="0.6", lw=0.8, ls=":")


def score_limits(values: Iterable[float], deviation: float | None) -> tuple[float, float]:
    """Return limits of an axis of scores that include all values.

    Their distance is at least ten standard deviations of the baseline, or a tenth of the values if
    `deviation` is None.
    """
    shown = [value for value in values if np.isfinite(value)]
    low, high = min(shown), max(shown)
    middle = (low + high) / 2
    known = deviation is not None and np.isfinite(deviation) and deviation > 0.0
    least = _DEVIATIONS * deviation if known and deviation else _SHARE * abs(middle)
    half = max(0.55 * (high - low), least / 2) or 1.0
    return middle - half, middle + half


def tiles(
    count: int, most: int, width: float, height: float, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure of `count` panels, at most `most` per row."""
    columns = min(most, count)
    figure, axes = panels(-(-count // columns), columns, width, height, **options)
    flat = [axis for row in axes for axis in row]
    for unused in flat[count:]:
        unused.remove()
    return figure, flat[:count]


def each_head(
    axes: list[list[Axes]],
    layers: Iterable[int],
    exists: Callable[[int, int], bool],
    heading: Callable[[int], str] = lambda place: f"head {place + 1}",
    size: int = 9,
) -> Iterator[tuple[Axes, int, int]]:
    """Yield the labelled panels of a figure with a row per layer, and remove the others.

    `exists` returns whether a layer, by its number, has a panel in a column; `heading` returns the
    title of a column.
    """
    for row, layer in zip(axes, layers, strict=True):
        for place, axis in enumerate(row):
            if not exists(layer, place):
                axis.remove()
                continue
            if row is axes[0]:
                axis.set_title(heading(place), fontsize=size)
            if place == 0:
                axis.set_ylabel(f"layer {layer}", fontsize=size)
            yield axis, layer, place


def label(
    axis: Axes, x: str = "", y: str = "", title: str = "", *, grid: bool = True, legend: int = 0
) -> None:
    """Label the axes of a panel, and draw its grid and its legend (with this font size)."""
    axis.set(xlabel=x, ylabel=y)
    if title:
        axis.set_title(title, fontsize=9)
    if grid:
        axis.grid(visible=True)
    if legend:
        axis.legend(fontsize=legend)


def label_rows(axis: Axes, labels: Sequence[str]) -> None:
    """Label the rows of a panel, which are at 0, -1, -2, …"""
    axis.set_yticks([-row for row in range(len(labels))], labels)
    axis.set_ylim(-len(labels) + 0.4, 0.6)


def dot(
    axis: Axes,
    value: float,
    row: float,
    ends: tuple[float, float] | None,
    *,
    colour: str,
    marker: str = "o",
    is_hollow: bool = False,
) -> None:
    """Draw a value in a row, with an error bar between `ends`."""
    error = None if ends is None else [[value - ends[0]], [ends[1] - value]]
    style: dict[str, Any] = {"fmt": marker, "ms": 6, "capsize": 3, "color": colour}
    fill = "white" if is_hollow else colour
    axis.errorbar([value], [row], xerr=error, markerfacecolor=fill, **style)


def marker_legend(figure: Figure, markers: Mapping[str, str], hollow: Collection[str] = ()) -> None:
    """Draw the legend of markers by label below a figure; `hollow` lists labels of hollow ones."""
    style: dict[str, Any] = {"ls": "none", "color": "0.3"}
    handles = [
        Line2D([], [], marker=marker, mfc="white" if name in hollow else "0.3", label=name, **style)
        for name, marker in markers.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(3, len(handles)))


def spread_curve(axis: Axes, rows: pd.DataFrame, x: str, y: str, *, colour: str, name: str) -> None:
    """Draw mean and standard deviation of column `y` at each value of column `x`."""
    groups = rows.groupby(x)[y]
    mean, std = groups.mean(), groups.std(ddof=1).fillna(0.0)
    axis.plot(mean.index, mean, color=colour, marker="o", ms=3, label=name)
    axis.fill_between(mean.index, mean - std, mean + std, color=colour, alpha=0.2, lw=0)


def powers_of_two(axis: Axes) -> None:
    """Set the horizontal axis to logarithmic, with plain numbers at the powers of two."""
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def plain_log(axis: Axes) -> None:
    """Make the vertical axis logarithmic, with plain labels (1, 2, 5, … over a decade or more)."""

    def minor(value: float, _: object) -> str:
        low, high = axis.get_ylim()
        digit = f"{value:e}"[0]
        return f"{value:g}" if high < 8 * low or digit in "25" else ""

    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_formatter(minor)
