"""Base of all figures: file, runs, and the report with figures and judged sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
from matplotlib.figure import Figure

from lit_probattn.base.errors import ConfigError
from lit_probattn.compare.report import Report
from lit_probattn.experiments.expectations import Finding
from lit_probattn.experiments.page import as_csv, findings_table, first_of, how_many_agree
from lit_probattn.records.figures import ReportFigure
from lit_probattn.records.tables import markdown_lines

Judge = Callable[[], Finding]
_REDUCED = (
    "**Reduced models on other data: verdicts apply to this size, not to the results of the "
    "paper.**"
)


@dataclass
class FigureReport(Report):
    """Report of a figure: table of its runs, figures, and judged sentences.

    A figure is a file of configs/reproduce of `kind: figure` with `title`, `says` (paraphrased
    sentences of the paper by key) and its runs, and a subclass. The subclass builds the runs from
    the file (`table_of`), adds columns to the results (`columns`, for example from a study of a
    trained run), draws the figure (`draw`), and judges each sentence.

    Args:
        table, runs, command: see Report.
        part: content of the file.
        reduced: whether the runs belong to the reduced version.
    """

    part: Mapping[str, Any] = field(default_factory=dict)
    reduced: bool = False
    draws_scores: ClassVar[bool] = False
    # Whether --shortened selects other runs; otherwise it reduces the protocol.
    has_reduced_runs: ClassVar[bool] = False
    # The reason why sentences are compared.
    compared: ClassVar[str] = (
        "The figure prints no values, so the paper's claims about it are compared."
    )

    def drawn(self) -> dict[str, Callable[[], Figure]]:
        """Return functions that draw the figure with the paper's axes, by name."""
        return {"figure": self.draw}

    def draw(self) -> Figure:
        """Draw the figure, if it is the only one."""
        raise NotImplementedError(f"{type(self).__name__} must implement draw")

    def caption(self) -> str:
        """Return the content, the number of seeds and the meaning of error bars."""
        counts = sorted({int(n) for n in self.rows.groupby(["task", "row"])["seed"].nunique()})
        known = (
            "± standard deviation over seeds (n − 1)"
            if max(counts) > 1
            else ("without error estimate")
        )
        return f"Means over seeds, n = {' or '.join(map(str, counts))} per point; {known}."

    def judges(self) -> Mapping[str, Judge]:
        """Return the function that judges each sentence, by key."""
        raise NotImplementedError(f"{type(self).__name__} must implement judges")

    @cached_property
    def judged(self) -> list[Finding]:
        """Findings on the paper's sentences; a figure has no printed numbers."""
        judges, found = self.judges(), []
        for key, sentence in self.part["says"].items():
            if key not in judges:
                raise ConfigError(
                    f"{self.table.name}: no function judges the claim {key!r}; judged claims: "
                    f"{', '.join(judges)}"
                )
            told = sentence if isinstance(sentence, str) else sentence["says"]
            found.append(replace(judges[key](), says=told))
        return found

    @property
    def findings(self) -> pd.DataFrame:
        """One row per sentence: claim of the paper, result, verdict."""
        return findings_table(self.judged)

    def finding(self) -> str:
        """Return the number of sentences that agree."""
        return how_many_agree(self.judged)

    def figures(self) -> dict[str, ReportFigure]:
        """Return the figure; its claim is the paper's first sentence, as measured."""
        claim, caption = first_of(self.judged), self.caption()
        return {name: ReportFigure(claim, caption, draw) for name, draw in self.drawn().items()}

    def further_tables(self) -> dict[str, str]:
        """Return the sentences with their verdicts."""
        return {"verdicts": as_csv(self.findings)}

    def text(self) -> list[str]:
        """Return the sentences with their verdicts."""
        return [
            "## Claims of the paper",
            *([_REDUCED] if self.reduced else []),
            "\n".join(markdown_lines(self.findings)),
            self.compared,
        ]

    def write(self, folder: Path) -> str:
        """Write the report and return its tables."""
        table = super().write(folder)
        return "\n".join([table, "", *markdown_lines(self.findings)])
