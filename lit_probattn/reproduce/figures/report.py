"""What every figure shares: its file, its cells, and the report with pictures and sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
from matplotlib.figure import Figure

from lit_probattn.base.errors import ConfigError
from lit_probattn.compare.cells import Cell
from lit_probattn.compare.report import Report
from lit_probattn.compare.tables import Table
from lit_probattn.experiments.expectations import Finding
from lit_probattn.experiments.page import as_csv, findings_table, how_many_agree
from lit_probattn.records.tables import markdown_lines

Judge = Callable[[], Finding]
_REDUCED = (
    "**Reduced models, other data: a verdict says whether the tendency shows at this size, not "
    "whether the paper's runs come out.**"
)


@dataclass
class FigureReport(Report):
    """Report of a figure: the table of its cells, its pictures, and its sentences judged.

    A figure is a file of configs/reproduce of `kind: figure` with `title`, `says` (the paper's
    sentences by key, in our words) and what its cells are, and a subclass. That says how cells come
    of the file (`table_of`), which columns they have beside the results (`columns`; a study of a
    trained cell goes there), how the pictures are drawn, and how each sentence is judged.

    Args:
        table, cells, command: as in Report.
        part: the content of the file.
        reduced: whether the cells are those of the reduced version.
    """

    part: Mapping[str, Any] = field(default_factory=dict)
    reduced: bool = False
    # Whether --shortened takes other cells; otherwise it shortens the protocol.
    has_reduced_cells: ClassVar[bool] = False
    # Why sentences are compared.
    compared: ClassVar[str] = (
        "The figure prints no values, so what its paper says of it is compared."
    )

    def pictures(self) -> dict[str, Figure]:
        """Return the figure, in the paper's axes, by name."""
        raise NotImplementedError(f"{type(self).__name__} must implement pictures")

    def judges(self) -> Mapping[str, Judge]:
        """Return what judges each sentence, by its key."""
        raise NotImplementedError(f"{type(self).__name__} must implement judges")

    @classmethod
    def for_part(
        cls, part: Mapping[str, Any], reduced: bool, **more: Any
    ) -> Callable[[Table, Sequence[Cell], str], Report]:
        """Return what makes the report of a table, cells and a command.

        `more` are arguments of a subclass.
        """
        return partial(cls, part=part, reduced=reduced, **more)

    @cached_property
    def judged(self) -> list[Finding]:
        """The paper's sentences, judged; a figure prints no numbers."""
        judges, found = self.judges(), []
        for key, sentence in self.part["says"].items():
            if key not in judges:
                raise ConfigError(
                    f"{self.table.name}: nothing judges the sentence {key!r}; known are "
                    f"{', '.join(judges)}"
                )
            told = sentence if isinstance(sentence, str) else sentence["says"]
            found.append(replace(judges[key](), says=told))
        return found

    @property
    def findings(self) -> pd.DataFrame:
        """One row per sentence: what the paper says, what was measured, the verdict."""
        return findings_table(self.judged)

    def finding(self) -> str:
        """Return how many sentences agree."""
        return how_many_agree(self.judged)

    def figures(self) -> dict[str, Callable[[], Figure]]:
        """Return the pictures."""
        return {name: partial(_given, figure) for name, figure in self.pictures().items()}

    def further_tables(self) -> dict[str, str]:
        """Return the sentences with their verdicts."""
        return {"verdicts": as_csv(self.findings)}

    def text(self) -> list[str]:
        """Return the sentences with their verdicts."""
        return [
            "## What the paper says",
            *([_REDUCED] if self.reduced else []),
            "\n".join(markdown_lines(self.findings)),
            self.compared,
        ]

    def write(self, folder: Path) -> str:
        """Write the report; return its tables."""
        table = super().write(folder)
        return "\n".join([table, "", *markdown_lines(self.findings)])


def _given(figure: Figure) -> Figure:
    return figure
