"""Figures of reports: one style, one colour per variant, a claim as title, PNG and SVG files.

A figure shows one claim, whose numbers are computed from the rows. Its caption describes the
content, the denominator, the number of values and the error bars; caption and metadata of the files
contain the provenance of the rows.
"""

from __future__ import annotations

import io
import re
import textwrap
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from lit_probattn.base.errors import ConfigError

MAX_BYTES = 300_000
DPI = 120
LEAST_PANEL = 200  # pixels
PNG, SVG = ".png", ".svg"

# The only declaration of colours: a family has shades of one hue, and baselines are grey.
COLOURS = {
    "softmax": "#2b2b2b",
    "multi-query": "#6f6f6f",
    "linear": "#9a9a9a",
    "polynomial": "#a89400",
    "AST": "#5b3a8c",
    "Gaussian": "#0b7a75",
    "MGK": "#0173b2",
    "sMGK": "#56b4e9",
    "MGK with hard E-step": "#16366b",
    "sMGK with hard E-step": "#7c93c8",
    "MLK": "#029e73",
    "sMLK": "#7fd1b3",
    "FiSH": "#d55e00",
    "Hard FiSH": "#f0a05a",
    "GFiSH": "#b3123c",
    "Hard GFiSH": "#cc78bc",
    "MiSH": "#7a4a1e",
    "Hard MiSH": "#ca9161",
}
# Colours of variants that are not in the table, selected by a digest of the name.
_OTHERS = ("#7b8b00", "#3c6e47", "#8a2be2", "#c23b80", "#4f6d7a", "#b5651d")
_SPELLINGS = {
    **{"hardmgk": "MGK with hard E-step", "mgkharde": "MGK with hard E-step"},
    **{"hardsmgk": "sMGK with hard E-step", "smgkharde": "sMGK with hard E-step"},
    **{"multiquery": "multi-query"},
}
# Marks without a variant: the published value, and one of several series.
PUBLISHED = "#c8102e"


@cache
def style() -> Any:
    """Return matplotlib's settings for all figures: a seaborn theme with a light grid."""
    import seaborn
    from cycler import cycler

    return {
        # Series without a variant: grey, and colours that no variant of the table uses.
        "axes.prop_cycle": cycler(color=[COLOURS["softmax"], *_OTHERS]),
        **seaborn.axes_style("whitegrid"),
        **seaborn.plotting_context("notebook", font_scale=0.85),
        **{"axes.spines.top": False, "axes.spines.right": False},
        **{"axes.edgecolor": "0.4", "grid.color": "0.91", "axes.axisbelow": True},
        **{"legend.frameon": False, "lines.linewidth": 1.4, "axes.titlesize": 9.5},
        **{"axes.labelsize": 9, "xtick.labelsize": 8.5, "ytick.labelsize": 8.5},
        **{"legend.fontsize": 8.5, "legend.title_fontsize": 8.5},
        **{"svg.fonttype": "path", "svg.hashsalt": "lit_probattn", "savefig.facecolor": "white"},
    }


def colour_of(name: str) -> str:
    """Return the colour of a variant.

    Args:
        name: a name such as `sMGK, 4 heads`, or the name of a preset or point such as `smgk4`.
    """
    key = _spelling(re.split(r",| \(", name)[0])
    found = _by_spelling().get(key) or _by_spelling().get(key.rstrip("0123456789"))
    return found or _OTHERS[zlib.crc32(key.encode()) % len(_OTHERS)]


def readable(label: str) -> str:
    """Return the label of a row with the variant's name as in the README.

    `Softmax, 8 heads` is `softmax, 8 heads`, `GFiSH, 4 of 8 heads` is `GFiSH, 8 heads from 4 score
    maps`, and a file's name such as `hard_fish_4` is `Hard FiSH (hard_fish_4)`.
    """
    name, comma, rest = label.partition(",")
    known = {_spelling(one): one for one in COLOURS} | _SPELLINGS
    found = known.get(_spelling(name))
    if found is None:
        return label
    rest = re.sub(r"(\d+)(?: of |/)(\d+) heads", r"\2 heads from \1 score maps", rest)
    return f"{found}{comma}{rest}" + (f" ({label})" if "_" in name else "")


def shades(name: str, count: int) -> list[str]:
    """Return `count` shades of a variant's colour, from light to dark."""
    import seaborn

    palette = seaborn.light_palette(colour_of(name), count + 2).as_hex()
    return list(palette[2:])


def palette_of(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each name; variants that differ only in settings get shades of one."""
    same: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        same.setdefault(colour_of(name), []).append(name)
    found: dict[str, str] = {}
    for colour, group in same.items():
        several = shades(group[0], len(group))[::-1] if len(group) > 1 else [colour]
        found |= dict(zip(group, several, strict=True))
    return {name: found[name] for group in same.values() for name in group}


@cache
def _by_spelling() -> dict[str, str]:
    direct = {_spelling(name): colour for name, colour in COLOURS.items()}
    return {**direct, **{key: COLOURS[name] for key, name in _SPELLINGS.items()}}


def _spelling(name: str) -> str:
    """Return the letters and digits of a name, without a suffix such as `_4`."""
    return re.sub(r"[^a-z0-9]", "", re.sub(r"_\d+$", "", name.strip()).lower())


def panels(
    rows: int, columns: int, width: float, height: float, **options: Any
) -> tuple[Figure, list[list[Axes]]]:
    """Return a figure of rows x columns panels of the given size in inches."""
    with rc_context(style()):
        figure, axes = plt.subplots(
            rows,
            columns,
            figsize=(width * columns, height * rows),
            squeeze=False,
            layout="constrained",
            **options,
        )
    return figure, [list(row) for row in axes]


@dataclass(frozen=True)
class ReportFigure:
    """A figure of a report.

    Args:
        claim: the title, a claim with numbers computed from the rows.
        caption: content, denominator, number of values, and meaning of error bars.
        draw: function that draws the panels.
    """

    claim: str
    caption: str
    draw: Callable[[], Figure]

    def drawn(self) -> Figure:
        """Return the figure with its title."""
        with rc_context(style()):
            figure = self.draw()
            width = max(30, int(figure.get_figwidth() * 10))
            title = textwrap.fill(self.claim, width)
            figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        return figure


def save_figure(figure: Figure, path: Path, note: str, title: str = "") -> list[Path]:
    """Write a figure as PNG, and as SVG if that has at most 300 kB, and close it.

    Panels that are narrower or lower than 200 pixels are enlarged first.

    Args:
        figure: the figure.
        path: path of the PNG file; the SVG file is in the same folder.
        note: provenance of the figure, the metadata `Description` of the files.
        title: the metadata `Title` of the files.

    Raises:
        ConfigError: the file would be larger than 300 kB.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(style()):
        _enlarge(figure)
        vector = _svg_bytes(figure, note, title)
        path.write_bytes(_png_bytes(figure, note, title))
    plt.close(figure)
    beside = path.with_suffix(SVG)
    if len(vector) > MAX_BYTES:
        beside.unlink(missing_ok=True)
        return [path]
    beside.write_bytes(vector)
    return [path, beside]


def panel_pixels(figure: Figure) -> list[tuple[float, float]]:
    """Return width and height of the panels, without colour bars, in pixels of the PNG file."""
    figure.draw_without_rendering()
    boxes = [axis.get_window_extent() for axis in _panels_of(figure)]
    return [(box.width * DPI / figure.dpi, box.height * DPI / figure.dpi) for box in boxes]


def _panels_of(figure: Figure) -> list[Axes]:
    return [a for a in figure.axes if a.get_visible() and a.get_label() != "<colorbar>"]


def _enlarge(figure: Figure) -> None:
    """Enlarge a figure until its smallest panel has 200 x 200 pixels."""
    for _ in range(4):
        sizes = panel_pixels(figure)
        grids = [spec.get_gridspec() for a in figure.axes if (spec := a.get_subplotspec())]
        if not sizes or not grids:
            return
        least = [min(size) for size in zip(*sizes, strict=True)]
        lacking = [max(0.0, LEAST_PANEL + 1 - pixels) / DPI for pixels in least]
        if not any(lacking):
            return
        columns, rows = max(g.ncols for g in grids), max(g.nrows for g in grids)
        width, height = figure.get_size_inches()
        figure.set_size_inches(width + columns * lacking[0], height + rows * lacking[1])


def _svg_bytes(figure: Figure, note: str, title: str) -> bytes:
    buffer = io.BytesIO()
    metadata: dict[str, Any] = {"Description": note, "Date": None}
    metadata |= {"Title": title} if title else {}
    figure.savefig(buffer, format="svg", metadata=metadata)
    return buffer.getvalue()


def _png_bytes(figure: Figure, note: str, title: str) -> bytes:
    """Draw a figure with fewer colours, then smaller, until it has at most 300 kB."""
    text = PngInfo()
    if title:
        text.add_itxt("Title", title)
    text.add_itxt("Description", note)
    for dpi, colours in ((DPI, 0), (DPI, 256), (DPI, 64), (90, 128), (70, 64), (50, 64)):
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
