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

# The only declaration of colours: a family has related hues, and baselines are grey.
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
    "talking heads": "#0c4800",
    "DCMHA": "#84cc54",
    "gated attention": "#8484fc",
    "Differential": "#a80078",
    "Parallax": "#fc8490",
    "Elliptical": "#6c243c",
    "softmax MGK": "#0c546c",
    "MGK with Soft-E": "#00b4c0",
    "sMGK with Soft-E": "#c0a8fc",
    "MGK with learned variance": "#309cfc",
    "multi-query MGK": "#0060cc",
    "linear with ReLU": "#00840c",
    "FAVOR": "#6c843c",
    "DPFP": "#c0c078",
    "LFiSH": "#f03c84",
    "Hard LFiSH": "#902400",
    "GLFiSH": "#a8606c",
    "Hard GLFiSH": "#e4a8c0",
}
# Colours of other variants, the first one selected by a digest of the name, and of other series.
OTHERS = (
    *("#a86c0c", "#846090", "#00d884", "#f05448", "#e484fc", "#485430", "#a848b4", "#f0b430"),
    *("#789c00", "#c06048", "#6c0084", "#6c6000", "#fc60c0", "#78b46c", "#b43c6c", "#b4c0e4"),
)
_SPELLINGS = {
    **{"hardmgk": "MGK with hard E-step", "mgkharde": "MGK with hard E-step"},
    **{"hardsmgk": "sMGK with hard E-step", "smgkharde": "sMGK with hard E-step"},
    **{"multiquery": "multi-query", "gated": "gated attention", "dcmh": "DCMHA"},
    **{"mgksofte": "MGK with Soft-E", "smgksofte": "sMGK with Soft-E"},
    **{"mgklearnedvariance": "MGK with learned variance", "mgkmultiquery": "multi-query MGK"},
    **{"linearrelu": "linear with ReLU"},
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
        # After 17 series the lines are dashed, then dotted.
        "axes.prop_cycle": cycler(linestyle=["-", "--", ":"])
        * cycler(color=[COLOURS["softmax"], *OTHERS]),
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
        name: a name such as `sMGK, 4 heads`, a preset with options such as `smgk dropout=0`, or the
            name of a preset or point such as `smgk4`.
    """
    return palette_of([name])[name]


def readable(label: str) -> str:
    """Return the label of a row with the variant's name as in the README.

    `Softmax, 8 heads` is `softmax, 8 heads`, `GFiSH, 4 of 8 heads` is `GFiSH, 8 heads from 4 score
    maps`, and a file's name such as `hard_fish_4` is `Hard FiSH (hard_fish_4)`. Options of a
    preset, as in `smgk dropout=0, 4 heads`, are kept.
    """
    name = _name_of(label)
    rest = label[len(name) :]
    known = {_spelling(one): one for one in COLOURS} | _SPELLINGS
    found = known.get(_spelling(name))
    if found is None:
        return label
    rest = re.sub(r"(\d+)(?: of |/)(\d+) heads", r"\2 heads from \1 score maps", rest)
    return f"{found}{rest}" + (f" ({label})" if re.search(r"_\d+$", name) else "")


def shades(name: str, count: int) -> list[str]:
    """Return `count` shades of a variant's colour, from light to dark."""
    return _shades(colour_of(name), count)


def _shades(colour: str, count: int) -> list[str]:
    import seaborn

    return list(seaborn.light_palette(colour, count + 2).as_hex()[2:])


def palette_of(names: Iterable[str]) -> dict[str, str]:
    """Return a colour for each name of a chart.

    Variants have their declared colour, which is the same in all figures. Other names have one of
    16 other colours; if several names of a chart have the same one, the later ones get unused ones.
    Names of one variant with different settings get shades of its colour.
    """
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        groups.setdefault(_variant(name), []).append(name)
    found: dict[str, str] = {}
    taken: set[str] = set()
    for variant, group in groups.items():
        colour = _by_spelling().get(variant)
        if colour is None:
            first = zlib.crc32(variant.encode()) % len(OTHERS)
            order = (*OTHERS[first:], *OTHERS[:first])
            colour = next((one for one in order if one not in taken), order[0])
            taken.add(colour)
        several = _shades(colour, len(group))[::-1] if len(group) > 1 else [colour]
        found |= dict(zip(group, several, strict=True))
    return {name: found[name] for group in groups.values() for name in group}


@cache
def _by_spelling() -> dict[str, str]:
    direct = {_spelling(name): colour for name, colour in COLOURS.items()}
    return {**direct, **{key: COLOURS[name] for key, name in _SPELLINGS.items()}}


def _name_of(label: str) -> str:
    """Return the variant's name in a label, without heads, options and remarks."""
    return re.split(r",| \(| \S+=", label)[0]


def _variant(label: str) -> str:
    """Return the spelling that identifies the variant of a label."""
    key = _spelling(_name_of(label))
    bare = key.rstrip("0123456789")
    return bare if key not in _by_spelling() and bare in _by_spelling() else key


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
            return titled(self.draw(), self.claim)


def titled(figure: Figure, claim: str) -> Figure:
    """Write a claim above a figure, in as many lines as its width requires; return the figure."""
    title = textwrap.fill(claim, max(30, int(figure.get_figwidth() * 10)))
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    return figure


def save_figure(figure: Figure, path: Path, note: str, title: str = "") -> list[Path]:
    """Write a figure as PNG, and as SVG if that has at most 300 kB, and close it.

    Panels that are narrower or lower than 200 pixels are enlarged first; panels with images have no
    grid.

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
        for axis in figure.axes:
            if axis.images:
                axis.grid(visible=False)
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
