"""Output of a study: a table, figures, and a text with their provenance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from lit_probattn.base.errors import ConfigError
from lit_probattn.base.files import (
    begin_output,
    end_output,
    refuse_to_replace,
    replace_text,
)
from lit_probattn.base.provenance import machine
from lit_probattn.models.per_layer import attention_entries
from lit_probattn.records.figures import save_figure, titled
from lit_probattn.records.markdown import code_span, escaped, one_line
from lit_probattn.training.trained import Trained

matplotlib.use("Agg")


class Results:
    """Writes `<study>.csv`, `.png`, `.svg` and `.md` to one folder, created if needed.

    Raises:
        ConfigError: the folder cannot be created, or contains an unrelated file of such a name.
    """

    def __init__(self, out: Path, study: str, command: str) -> None:
        self.out, self.study, self.command = out, study, command
        self.figures: dict[Path, str] = {}
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot create --out {out}: {error.strerror}") from error
        files = (
            path
            for ending in ("csv", "png", "svg", "md")
            for path in out.glob(f"{study}*.{ending}")
        )
        refuse_to_replace(files, self.path("md"))
        begin_output(self.path("md"))

    def path(self, ending: str, part: str = "") -> Path:
        """Return the path of one of the files."""
        return self.out / f"{self.study}{'_' + part if part else ''}.{ending}"

    def table(self, frame: pd.DataFrame, part: str = "", digits: int = 6) -> None:
        """Write a CSV file."""
        replace_text(self.path("csv", part), frame.to_csv(index=False, float_format=f"%.{digits}g"))

    def figure(self, figure: Figure, claim: str, part: str = "") -> None:
        """Write a PNG and an SVG file of at most 300 kB with command and machine as metadata.

        Args:
            figure: the figure.
            claim: its title, a finding with numbers computed from the rows.
            part: suffix of the files' names.
        """
        note = f"{self.command} | {machine()}"
        drawn = titled(figure, claim)
        self.figures[save_figure(drawn, self.path("png", part), note, claim)[0]] = claim

    def text(self, title: str, facts: Sequence[str], body: str, appendix: str = "") -> None:
        """Write the Markdown file: title, command, facts, body, figures, appendix.

        The body is also printed.
        """
        figures = [f"![{escaped(claim)}]({path.name})" for path, claim in self.figures.items()]
        lines = [
            f"# {one_line(title)}",
            "",
            f"Command: {code_span(self.command)}.",
            *map(one_line, facts),
            machine(),
            "",
            body,
            "",
        ]
        whole = "\n".join([*lines, *figures, "", appendix]).rstrip()
        replace_text(self.path("md"), whole + "\n")
        end_output(self.path("md"))
        print(f"{body}\n\nresults: {self.path('md')}")


def span(values: Iterable[float], form: str = ".3g") -> str:
    """Return the range of numbers, such as `0.5 to 0.8`, or the number if all print alike."""
    found = [value for value in values if value == value]
    if not found:
        return "undefined"
    low, high = format(min(found), form), format(max(found), form)
    return low if low == high else f"{low} to {high}"


def _variant(entry: Mapping[str, Any]) -> str:
    options = ", ".join(f"{k}={v}" for k, v in (entry.get("init_args") or {}).items() if v)
    return f"{str(entry.get('class_path', '')).rpartition('.')[2]} ({escaped(options)})"


def describe(trained: Trained) -> list[str]:
    """Return a sentence on model, checkpoint and data."""
    attention = trained.config["model"]["init_args"].get("attention", {})
    variants = "; ".join(_variant(entry) for entry in attention_entries(attention))
    data = trained.config["data"]["class_path"].rpartition(".")[2]
    folder = trained.checkpoint.resolve().parent.parent
    run = escaped(f"{folder.parent.name}/{folder.name}/{trained.checkpoint.name}")
    return [
        f"Model: {trained.config['model']['class_path'].rpartition('.')[2]} with {variants}; "
        f"checkpoint {run}, step {trained.step}. "
        f"Data: {data}."
    ]
