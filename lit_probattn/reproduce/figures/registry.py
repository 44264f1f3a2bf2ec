"""The runs of every figure, and the class that draws it, which is imported on demand."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING, NamedTuple

from lit_probattn.compare.flags import Place
from lit_probattn.compare.tables import Part, Table
from lit_probattn.reproduce.figures.tables import (
    fine_tuned_models,
    points_of_grid,
    rows_of_tables,
)

if TYPE_CHECKING:
    from lit_probattn.reproduce.figures.report import FigureReport


class Entry(NamedTuple):
    """A kind of figure.

    Attributes:
        figure: module of `lit_probattn.reproduce.figures`, and its class.
        table: reads the runs of the figure's file.
    """

    figure: str
    table: Callable[[Part, Place, bool], Table]


# Figures with a separate class, and a file of the same name in configs/reproduce.
FIGURES = {
    "low_rank_figure1": Entry("low_rank:AgainstParameters", points_of_grid),
    "low_rank_figure2": Entry("low_rank_bert:FineTuned", fine_tuned_models),
    "low_rank_figure3a": Entry("low_rank:AgainstHeads", points_of_grid),
    "low_rank_figure3b": Entry("low_rank:AgainstHeadSize", points_of_grid),
    "low_rank_figure4": Entry("low_rank:AgainstParameters", points_of_grid),
}


def entry_of(part: Part) -> Entry:
    """Return the entry of a figure of `kind: figure`."""
    kind = "StudyFigure" if "studies" in part else "RunFigure"
    return FIGURES.get(part.name) or Entry(f"runs:{kind}", rows_of_tables)


def figure_class(part: Part) -> type[FigureReport]:
    """Return the class of a figure of `kind: figure`."""
    found: type[FigureReport]
    found = resolve_name(f"lit_probattn.reproduce.figures.{entry_of(part).figure}")
    return found
