"""Output of a study: its tables, figures and text, as a report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from lit_probattn.base.config_files import output_folder
from lit_probattn.experiments.page import (
    TEXT,
    Made,
    Page,
    as_csv,
    image,
    refuse_foreign_files,
)
from lit_probattn.models.per_layer import attention_entries
from lit_probattn.records.figures import ReportFigure
from lit_probattn.records.markdown import escaped, one_line
from lit_probattn.training.trained import Trained

matplotlib.use("Agg")


class Results:
    """The tables and figures of a study, from which its report is written to `<out>/<study>`.

    Tables are `<study>.csv` and `<study>_<part>.csv`, figures have the same names.

    Attributes:
        about: sentence above the text.
        appendix: text below the figures; neither is printed on the terminal.

    Raises:
        ConfigError: the folder is invalid, or contains unrelated files.
    """

    def __init__(self, out: Path, study: str, command: str) -> None:
        self.folder, self.study, self.command = out / study, study, command
        self.tables: dict[str, str] = {}
        self.figures: dict[str, ReportFigure] = {}
        self.about = self.appendix = ""
        refuse_foreign_files(self.folder, *(path.stem for path in self.folder.glob("*.csv")))
        output_folder(self.folder)

    def _name(self, part: str) -> str:
        return f"{self.study}{'_' + part if part else ''}"

    def path(self, ending: str, part: str = "") -> Path:
        """Return the path of one of the files."""
        return self.folder / f"{self._name(part)}.{ending}"

    def table(self, frame: pd.DataFrame, part: str = "", digits: int = 6) -> None:
        """Add a table."""
        self.tables[self._name(part)] = as_csv(frame, digits)

    def figure(self, figure: Figure, claim: str, part: str = "") -> None:
        """Add a figure.

        Args:
            figure: the figure.
            claim: its title, a finding with numbers computed from the rows.
            part: suffix of the files' names.
        """
        self.figures[self._name(part)] = ReportFigure(claim, "", lambda: figure)

    def write(self, title: str, body: str) -> None:
        """Write the report with this text, which is also printed."""
        claims = [f"{figure.claim}." for figure in self.figures.values()]
        above = (one_line(self.about), "") if self.about else ()
        shown = (line for name in self.figures for line in ("", image(name)))
        Page(
            kind=self.study,
            title=title,
            made=Made.here(self.command),
            finding="".join(claims[:1]),
            body=[*above, body, *shown, "", self.appendix],
            tables=self.tables,
            figures=self.figures,
        ).write(self.folder)
        print(f"{body}\n\nresults: {self.folder / TEXT}")


def _variant(entry: Mapping[str, Any]) -> str:
    options = ", ".join(f"{k}={v}" for k, v in (entry.get("init_args") or {}).items() if v)
    return f"{str(entry.get('class_path', '')).rpartition('.')[2]} ({escaped(options)})"


def describe(trained: Trained) -> str:
    """Return a sentence on model, checkpoint and data."""
    attention = trained.config["model"]["init_args"].get("attention", {})
    variants = "; ".join(_variant(entry) for entry in attention_entries(attention))
    data = trained.config["data"]["class_path"].rpartition(".")[2]
    folder = trained.checkpoint.resolve().parent.parent
    run = escaped(f"{folder.parent.name}/{folder.name}/{trained.checkpoint.name}")
    model = trained.config["model"]["class_path"].rpartition(".")[2]
    about = f"Model: {model} with {variants}; checkpoint {run}, step {trained.step}. "
    return f"{about}Data: {data}."
