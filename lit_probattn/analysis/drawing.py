"""What the figures of studies share: panels by layer, grids, logarithmic axes, labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_probattn.records.tables import panels

BLUE = "#3b6ea5"


def tiles(
    count: int, most: int, width: float, height: float, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure of `count` panels, at most `most` beside each other."""
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
    """Yield the panels of a figure with a row per layer, headed and labelled; remove the others.

    `exists` says whether a layer, by its number, has something at a place of its row; `heading`
    heads the column at a place.
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
    """Name the axes of a panel, and draw its grid and legend (of that font size)."""
    axis.set(xlabel=x, ylabel=y)
    if title:
        axis.set_title(title, fontsize=9)
    if grid:
        axis.grid(color="0.9", lw=0.6)
    if legend:
        axis.legend(fontsize=legend, frameon=False)


def powers_of_two(axis: Axes) -> None:
    """Make the horizontal axis logarithmic, with plain numbers at the powers of two."""
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def plain_log(axis: Axes) -> None:
    """Make the vertical axis logarithmic, with plain numbers."""
    axis.set_yscale("log")
    for formatter in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        formatter(lambda value, _: f"{value:g}")
