"""The runs of every figure, and the class that draws it, which is imported on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lit_probattn.compare.flags import Place
from lit_probattn.compare.tables import Table
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
        module: module of `lit_probattn.reproduce.figures`.
        name: class in that module.
        table: reads the runs of the figure's file.
    """

    module: str
    name: str
    table: Callable[[str, Mapping[str, Any], Path, Place, bool], Table]


# Figures with a separate class, and a file of the same name in configs/reproduce.
FIGURES = {
    "low_rank_figure1": Entry("low_rank", "AgainstParameters", points_of_grid),
    "low_rank_figure2": Entry("low_rank_bert", "FineTuned", fine_tuned_models),
    "low_rank_figure3a": Entry("low_rank", "AgainstHeads", points_of_grid),
    "low_rank_figure3b": Entry("low_rank", "AgainstHeadSize", points_of_grid),
    "low_rank_figure4": Entry("low_rank", "AgainstParameters", points_of_grid),
}


def entry_of(name: str, part: Mapping[str, Any]) -> Entry:
    """Return the entry of a figure of `kind: figure`."""
    kind = "StudyFigure" if "studies" in part else "RunFigure"
    return FIGURES.get(name) or Entry("runs", kind, rows_of_tables)


def figure_class(name: str, part: Mapping[str, Any]) -> type[FigureReport]:
    """Return the class of a figure of `kind: figure`."""
    entry = entry_of(name, part)
    module = import_module(f"lit_probattn.reproduce.figures.{entry.module}")
    found: type[FigureReport] = getattr(module, entry.name)
    return found
