"""What a study leaves: a table, pictures, and a text that says how they were made."""

from __future__ import annotations

import io
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from lit_probattn.training.run_record import git_state, hardware, replace_text
from lit_probattn.training.trained import AnalysisError, Trained

MAX_BYTES = 300_000


class Results:
    """Writes `<study>.csv`, `<study>.png` and `<study>.md` in one folder, each whole.

    Args:
        out: the folder; made if it is not there.
        study: name of the study, and of its files.
        command: the command line.

    Raises:
        AnalysisError: the folder cannot be made.
    """

    def __init__(self, out: Path, study: str, command: str) -> None:
        self.out, self.study, self.command = out, study, command
        self.pictures: list[Path] = []
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise AnalysisError(f"--out {out} cannot be made: {error.strerror}") from error

    def path(self, ending: str, part: str = "") -> Path:
        """Path of one of the files."""
        return self.out / f"{self.study}{'_' + part if part else ''}.{ending}"

    def table(self, frame: pd.DataFrame, part: str = "", digits: int = 6) -> None:
        """Write a CSV file."""
        text = frame.to_csv(index=False, float_format=f"%.{digits}g")
        replace_text(self.path("csv", part), text)

    def figure(self, figure: Figure, part: str = "") -> None:
        """Write a PNG file of at most 300 kB."""
        path = self.path("png", part)
        path.write_bytes(png_bytes(figure))
        plt.close(figure)
        self.pictures.append(path)

    def text(self, title: str, facts: Sequence[str], body: str) -> None:
        """Write the Markdown file: title, command, facts, body, pictures."""
        pictures = [f"![{path.stem}]({path.name})" for path in self.pictures]
        lines = [f"# {title}", "", f"Command: `{self.command}`.", *facts, machine(), "", body, ""]
        replace_text(self.path("md"), "\n".join([*lines, *pictures]).rstrip() + "\n")
        print(f"{body}\n\nresults: {self.path('md')}")


def png_bytes(figure: Figure) -> bytes:
    """Draw a figure as PNG; with fewer colours, then smaller, until it has at most 300 kB."""
    for dpi, colours in ((120, 0), (120, 256), (90, 128), (70, 64), (50, 64)):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=dpi)
        if colours:
            buffer.seek(0)
            reduced = Image.open(buffer).convert("RGB").quantize(colours)
            buffer = io.BytesIO()
            reduced.save(buffer, format="PNG", optimize=True)
        if buffer.tell() <= MAX_BYTES:
            return buffer.getvalue()
    raise AnalysisError("the picture is larger than 300 kB: show fewer layers, heads or samples")


def describe(trained: Trained) -> list[str]:
    """Sentences about model, checkpoint and data."""
    attention = trained.config["model"]["init_args"].get("attention", {})
    options = ", ".join(f"{k}={v}" for k, v in (attention.get("init_args") or {}).items() if v)
    variant = str(attention.get("class_path", "")).rpartition(".")[2]
    data = trained.config["data"]["class_path"].rpartition(".")[2]
    folder = trained.checkpoint.resolve().parent.parent
    run = f"{folder.parent.name}/{folder.name}"
    return [
        f"Model: {trained.config['model']['class_path'].rpartition('.')[2]} with {variant} "
        f"({options}); checkpoint {run}/{trained.checkpoint.name}, step {trained.step}. "
        f"Data: {data}."
    ]


def machine() -> str:
    """One sentence about hardware, versions and revision."""
    found = hardware()
    gpus = ", ".join(gpu["name"] for gpu in found["gpus"])
    versions = f"Python {platform.python_version()}, " + ", ".join(
        f"{name} {version(name)}" for name in ("torch", "numpy", "matplotlib")
    )
    git = git_state()
    revision = "unknown" if git is None else git["revision"][:7] + ("+" if git["dirty"] else "")
    place = gpus or f"{found['processor'] or found['machine']}, {found['num_cores']} cores"
    return f"Machine: {place}; {versions}; revision {revision}."


def markdown_table(frame: pd.DataFrame, digits: int = 4) -> str:
    """A table as Markdown."""

    def show(value: Any) -> str:
        if isinstance(value, float):
            return "–" if value != value else f"{value:.{digits}g}"
        return str(value)

    rows = [[show(v) for v in row] for row in frame.itertuples(index=False)]
    head = [str(name) for name in frame.columns]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def panels(
    rows: int, columns: int, width: float, height: float, **options: Any
) -> tuple[Figure, list[list[Axes]]]:
    """Return a figure of rows x columns panels of the given size in inches."""
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(width * columns, height * rows),
        squeeze=False,
        layout="constrained",
        **options,
    )
    return figure, [list(row) for row in axes]
