"""Which class makes which figure; configs/reproduce has a file of the same name for each."""

from __future__ import annotations

from lit_probattn.reproduce.figures.low_rank import (
    AgainstHeads,
    AgainstHeadSize,
    AgainstParameters,
)
from lit_probattn.reproduce.figures.report import FigureReport

FIGURES: dict[str, type[FigureReport]] = {
    "low_rank_figure1": AgainstParameters,
    "low_rank_figure3a": AgainstHeads,
    "low_rank_figure3b": AgainstHeadSize,
    "low_rank_figure4": AgainstParameters,
}
