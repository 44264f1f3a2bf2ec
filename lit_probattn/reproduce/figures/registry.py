"""The classes of figures, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lit_probattn.reproduce.figures.cells import CellFigure, StudyFigure
from lit_probattn.reproduce.figures.low_rank import (
    AgainstHeads,
    AgainstHeadSize,
    AgainstParameters,
)
from lit_probattn.reproduce.figures.low_rank_bert import FineTuned
from lit_probattn.reproduce.figures.report import FigureReport

# Figures with a separate class and a file of their name in configs/reproduce.
FIGURES: dict[str, type[FigureReport]] = {
    "low_rank_figure1": AgainstParameters,
    "low_rank_figure2": FineTuned,
    "low_rank_figure3a": AgainstHeads,
    "low_rank_figure3b": AgainstHeadSize,
    "low_rank_figure4": AgainstParameters,
}


def figure_class(name: str, part: Mapping[str, Any]) -> type[FigureReport]:
    """Return the class of a figure of `kind: figure`."""
    return FIGURES.get(name) or (StudyFigure if "studies" in part else CellFigure)
