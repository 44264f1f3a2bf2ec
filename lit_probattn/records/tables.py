"""Tables as Markdown, and figures of limited size."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from lit_probattn.base.errors import ConfigError
from lit_probattn.records.markdown import escaped, one_line

MAX_BYTES = 300_000


def save_png(figure: Figure, path: Path, note: str) -> Path:
    """Write a figure of at most 300 kB and close it.

    The note with the provenance of the figure is the file's text `Description`.

    Raises:
        ConfigError: the file would be larger.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_png_bytes(figure, note))
    plt.close(figure)
    return path


def _png_bytes(figure: Figure, note: str) -> bytes:
    """Draw a figure with fewer colours, then smaller, until it has at most 300 kB."""
    text = PngInfo()
    text.add_itxt("Description", note)
    for dpi, colours in ((120, 0), (120, 256), (90, 128), (70, 64), (50, 64)):
        drawn = _drawn(figure, dpi)
        buffer = io.BytesIO()
        kept = drawn.quantize(colours) if colours else drawn
        kept.save(buffer, format="PNG", optimize=bool(colours), pnginfo=text)
        if buffer.tell() <= MAX_BYTES:
            return buffer.getvalue()
    raise ConfigError("the figure is larger than 300 kB: show fewer layers, heads or samples")


def _drawn(figure: Figure, dpi: int) -> Image.Image:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, pil_kwargs={"compress_level": 0})  # read at once
    return Image.open(buffer).convert("RGB")


def counted(number: int, thing: str) -> str:
    """Return a number with a noun, in the singular for 1."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def markdown_lines(frame: pd.DataFrame, digits: int = 4) -> list[str]:
    """Return a table without its index as lines of Markdown; missing values are dashes.

    The content of cells is escaped (see `escaped`).
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


def with_deviation(
    rows: pd.DataFrame, keys: list[str], column: str, value: str, digits: int
) -> pd.DataFrame:
    """Return mean ± standard deviation of `value` with a row per `keys` and a column per `column`.

    A mean of one value has no deviation.
    """
    groups = rows.groupby([*keys, column], sort=False)[value]
    show = f"{{:.{digits}f}}".format
    std = groups.std(ddof=1).map(lambda x: "" if pd.isna(x) else f" ± {show(x)}")
    wide = (groups.mean().map(show) + std).unstack(column)
    return wide.reindex(sorted(wide), axis=1).reset_index()


def unequal_sides(
    sides: Mapping[str, Mapping[str, object]], baselines: Mapping[str, str | None], touches: str
) -> list[str]:
    """Return the settings in which variants differ from their baselines, a line each.

    Args:
        sides: settings by variant; None means unknown.
        baselines: the baseline of each variant; variants without one in `sides` are skipped.
        touches: effect of such a difference on the comparison.
    """
    found: dict[tuple[str, str, object, object], list[str]] = {}
    for name, baseline in baselines.items():
        if baseline is None or name not in sides or baseline not in sides:
            continue
        for key, value in sides[name].items():
            other = sides[baseline][key]
            if value != other and None not in (value, other):
                found.setdefault((baseline, key, value, other), []).append(name)
    return [
        one_line(
            f"**Unequal sides: {', '.join(names)} with {key} {value}, baseline {baseline} with "
            f"{other}: {touches}.**"
        )
        for (baseline, key, value, other), names in found.items()
    ]


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
