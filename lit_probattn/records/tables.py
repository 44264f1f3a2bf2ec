"""Tables as Markdown, and pictures of a limited size."""

from __future__ import annotations

import io
import textwrap
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from lit_probattn.records.markdown import escaped

MAX_BYTES = 300_000


class PictureError(ValueError):
    """A figure that cannot be stored; the message is one line."""


def png_bytes(figure: Figure) -> bytes:
    """Draw a figure as PNG; with fewer colours, then smaller, until it has at most 300 kB.

    Raises:
        PictureError: it cannot be made small enough.
    """
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
    raise PictureError("the picture is larger than 300 kB: show fewer layers, heads or samples")


def save_png(figure: Figure, path: Path, note: str = "") -> Path:
    """Write a figure of at most 300 kB with the note below it, and close it.

    Raises:
        PictureError: it cannot be made small enough.
    """
    if note:
        width = int(figure.get_figwidth() * 19)
        text = "\n".join(textwrap.wrap(note, width, break_on_hyphens=False))
        figure.supxlabel(text, fontsize=6.5, color="0.35", x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png_bytes(figure))
    plt.close(figure)
    return path


def markdown_lines(frame: pd.DataFrame, digits: int = 4) -> list[str]:
    """Return a table, without its index, as lines of Markdown; what is missing is a dash.

    What cells hold stays text (see `escaped`).
    """

    def show(value: Any) -> str:
        if pd.api.types.is_scalar(value) and pd.isna(value):
            return "–"
        return f"{value:.{digits}g}" if isinstance(value, float) else escaped(value)

    rows = [[show(value) for value in row] for row in frame.itertuples(index=False)]
    lines = [[escaped(name) for name in frame.columns], ["---"] * len(frame.columns), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def markdown_table(frame: pd.DataFrame, digits: int = 4) -> str:
    """Return the same lines as one text."""
    return "\n".join(markdown_lines(frame, digits))


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
