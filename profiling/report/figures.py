"""Figures of a report, selected by the axes that vary: heat maps, lines, relative errors.

Empty figures are omitted: a single point, or errors that are all zero.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import matplotlib
import pandas as pd
import seaborn
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from lit_probattn.analysis.drawing import (
    CHEAPER,
    plain_log,
    ratio_axis,
    ratio_bar,
    ratio_colours,
    tiles,
)
from profiling.report.names import variant_name
from profiling.report.ratios import METRICS, PLACE, found_by, relative_errors, tidy

matplotlib.use("Agg")

_AXES = {
    "embed_dim": "embedding dimension D",
    "seq_len": "sequence length N",
    "grid_heads": "heads of the baseline",
}
# Metrics with a figure: file name and label.
_DRAWN = {
    "macs": ("macs", "operations (multiply-adds)"),
    "num_parameters": ("parameters", "parameters"),
    "num_parameters_non_embedding": ("parameters_non_embedding", "parameters without embeddings"),
    "peak_memory_bytes": ("memory", "peak memory above resident"),
    "memory_bytes": ("memory_total", "total peak memory"),
    "time_median_s": ("time", "time"),
    "energy_j": ("energy", "energy"),
}
_SCOPES = {"attention": "attention layers", "layers": "blocks", "model": "whole model"}
_MODES = {"eval": "forward pass", "train": "training step"}
_BESIDE: Any = {"fontsize": 7, "frameon": False, "loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
# Errors below this count as zero: the tolerance of a sweep.
_EQUAL = 1e-6


@dataclass(frozen=True)
class Picture:
    """A figure of a report: its name, its caption and the function that draws it."""

    name: str
    caption: str
    draw: Callable[[], Figure]


def plain_names(frame: pd.DataFrame) -> dict[str, str]:
    """Return the variants' names as in the README, such as `softmax, 8 heads`."""
    names = {}
    for variant, part in frame.groupby("variant", sort=False):
        options = json.loads(part["attention_args"].iloc[0])
        heads = part["num_heads"].dropna()
        names[str(variant)] = variant_name(part["attention_class"].iloc[0], options, heads)
    return names


def _title(metric: str, scope: str, mode: str) -> str:
    """Return the title of a quantity; the number of parameters does not depend on the mode."""
    words = [_DRAWN[metric][1]]
    words += [] if metric == "num_parameters_non_embedding" else [_SCOPES[scope]]
    words += [] if metric.startswith("num_parameters") else [_MODES[mode]]
    return ", ".join(words)


def _headline(figure: Figure, text: str) -> None:
    """Set the title of a figure, in several lines if it is narrow."""
    figure.suptitle(textwrap.fill(text, int(figure.get_figwidth() * 10)), fontsize=11)


def _panel_title(variant: str, names: dict[str, str]) -> str:
    return names[variant]


def _ratio_to(part: pd.DataFrame, names: dict[str, str]) -> str:
    return f"ratio to {names[str(part['baseline'].iloc[0])]}"


def _length_axis(axis: Axes, column: str, values: list[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(values, [str(v) for v in values], rotation=45 if len(values) > 6 else 0)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel(_AXES[column])


def _shades(values: list[object]) -> dict[object, tuple[float, ...]]:
    """Return colours from dark to light, in the order of the values."""
    return dict(zip(values, seaborn.color_palette("viridis", len(values)), strict=True))


def _curve_and_dots(
    axis: Axes, curve: pd.Series, dots: pd.Series, color: object, size: int, label: str = ""
) -> None:
    """Draw expected values as a curve and found values as dots, joined if there is no curve."""
    axis.plot(curve, color=color, lw=1.2)
    style = {"ls": "--", "lw": 0.8} if curve.empty else {"ls": "none"}
    axis.plot(dots, marker="o", ms=size, color=color, label=label, **style)


def heat_maps(table: pd.DataFrame, names: dict[str, str]) -> Figure:
    """Draw the ratio of one metric and scope over D and N, one panel per variant."""
    variants = list(dict.fromkeys(table["variant"]))
    figure, axes = tiles(len(variants), 2 if len(variants) == 4 else 3, 5.2, 3.4)
    colours = ratio_colours()
    for axis, variant in zip(axes, variants, strict=True):
        part = table[table["variant"] == variant]
        grid = part.pivot_table(index="embed_dim", columns="seq_len", values="ratio_measured")
        seaborn.heatmap(
            grid, ax=axis, annot=True, fmt=".3f", annot_kws={"fontsize": 8}, cbar=False, **colours
        )
        axis.invert_yaxis()
        axis.tick_params(rotation=0)
        axis.set(xlabel=_AXES["seq_len"], ylabel=_AXES["embed_dim"])
        axis.set_title(f"{_panel_title(variant, names)}\n{_ratio_to(part, names)}", fontsize=9)
    ratio_bar(figure, axes[0].collections[0], axes)
    first = table.iloc[0]
    metric = str(first["metric"])
    title = _title(metric, first["scope"], first["mode"])
    _headline(figure, f"{title}: ratio, {found_by(metric, 'measured')}")
    return figure


def ratio_lines(table: pd.DataFrame, names: dict[str, str], x: str, hue: str) -> Figure:
    """Draw ratios over `x`, one colour per `hue`: expected values as curves, found ones as dots."""
    variants = list(dict.fromkeys(table["variant"]))
    columns = 2 if len(variants) == 4 else 3
    figure, axes = tiles(len(variants), columns, 4.2, 3.4, sharey=True)
    shades = _shades(sorted(table[hue].dropna().unique()))
    metric = str(table["metric"].iloc[0])
    drawn = table[["ratio_measured", "ratio_analytic", "ratio_predicted"]].to_numpy().ravel()
    for axis, variant in zip(axes, variants, strict=True):
        part = table[table["variant"] == variant].sort_values(x)
        for shade, colour in shades.items():
            line = part[part[hue] == shade].set_index(x)
            curve = line["ratio_analytic"].fillna(line["ratio_predicted"]).dropna()
            label = f"D = {shade}" if hue == "embed_dim" else names[str(shade)]
            _curve_and_dots(axis, curve, line["ratio_measured"], colour, 4, label)
        ratio_axis(axis, drawn)
        _length_axis(axis, x, sorted(table[x].unique()))
        axis.set_ylabel(f"{_ratio_to(part, names)}\n({CHEAPER})", fontsize=8)
        axis.set_title(_panel_title(variant, names), fontsize=9)
        seaborn.despine(ax=axis)
    if len(shades) > 1:
        title = _AXES["embed_dim"] if hue == "embed_dim" else "baseline"
        axes[-1].legend(title=title, title_fontsize=7, **_BESIDE)
    kind = f"dots: {found_by(metric, 'measured')}"
    for source in ("predicted", "analytic"):
        if table[f"ratio_{source}"].notna().any():
            kind = f"curves: {found_by(metric, source)}, dots: {found_by(metric, 'measured')}"
    first = table.iloc[0]
    _headline(figure, f"{_title(metric, first['scope'], first['mode'])}: ratio ({kind})")
    return figure


def value_lines(long: pd.DataFrame, names: dict[str, str], x: str) -> Figure:
    """Draw absolute values over `x`, one line per variant and one panel per metric and setting."""
    keys = ["metric", "scope", "mode", "panel"]
    groups = list(long.groupby(keys, sort=False))
    figure, axes = tiles(len(groups), 2 if len(groups) == 4 else 3, 4.2, 3.4)
    variants = list(dict.fromkeys(long["variant"]))
    palette = {name: f"C{number % 10}" for number, name in enumerate(variants)}
    sizes = dict(zip(variants, range(3 + len(variants), 3, -1), strict=True))
    for axis, ((metric, scope, mode, panel), part) in zip(axes, groups, strict=True):
        _, divisor, unit = METRICS[metric]
        for variant in dict.fromkeys(part["variant"]):
            line = part[part["variant"] == variant].sort_values(x).set_index(x)
            value, is_found = line["value"] / divisor, line["source"] == "measured"
            _curve_and_dots(
                axis, value[~is_found], value[is_found], palette[variant], sizes[variant]
            )
        _length_axis(axis, x, sorted(long[x].unique()))
        ways = {source: found_by(metric, source) for source in sorted(part["source"].unique())}
        marks = ", ".join(
            f"{'dots' if source == 'measured' else 'curves'}: {way}" for source, way in ways.items()
        )
        title = textwrap.fill(f"{_title(metric, scope, mode)}", 34)
        axis.set_title("\n".join(filter(None, (title, panel, marks))), fontsize=8)
        axis.set_ylabel(f"{METRICS[metric][0]} ({unit})")
        seaborn.despine(ax=axis)
        if metric in ("time_median_s", "peak_memory_bytes", "memory_bytes"):
            plain_log(axis)
        else:
            axis.set_ylim(0, part["value"].max() / divisor * 1.08)
    handles = [
        Line2D(
            *([], []),
            marker="o",
            ms=sizes[v],
            color=palette[v],
            lw=1.2,
            label=_panel_title(v, names),
        )
        for v in variants
    ]
    figure.legend(handles=handles, fontsize=8, frameon=False, loc="outside right upper")
    return figure


def has_errors(errors: pd.DataFrame) -> bool:
    """Return whether there are several points with an error above the tolerance."""
    return len(errors) > 1 and bool(errors["error"].abs().max() > _EQUAL)


def error_figure(errors: pd.DataFrame) -> Figure:
    """Draw the relative error of closed forms or predictions over N."""
    figure, [axis] = tiles(1, 1, 6.4, 3.4)
    markers = dict(zip(dict.fromkeys(errors["metric"]), "osD^vPX", strict=False))
    for number, variant in enumerate(dict.fromkeys(errors["variant"])):
        for metric, marker in markers.items():
            part = errors[(errors["variant"] == variant) & (errors["metric"] == metric)]
            label = f"{variant}: {_DRAWN[metric][1]}"
            if len(part):
                style = {"color": f"C{number % 10}", "marker": marker, "ms": 4, "ls": "none"}
                axis.plot(part["seq_len"], part["error"], label=label, **style)
    _length_axis(axis, "seq_len", sorted(errors["seq_len"].unique()))
    limit = max(0.01, 1.1 * errors["error"].abs().max())
    axis.set_ylim(-limit, limit)
    axis.set_ylabel("expected / counted or measured − 1")
    axis.axhline(0.0, color="0.6", lw=0.8, ls=":")
    axis.legend(**_BESIDE)
    seaborn.despine(ax=axis)
    _headline(figure, "Relative error of closed forms and predictions")
    return figure


def pictures_of(frame: pd.DataFrame, ratios: pd.DataFrame) -> list[Picture]:
    """Return the figures that suit the grid."""
    names = plain_names(frame)
    varying = [c for c in ("grid_heads", "seq_len", "embed_dim") if frame[c].nunique() > 1]
    found: list[Picture] = []
    if "embed_dim" in varying or "seq_len" in varying:
        found += _ratio_figures(ratios, names, varying)
    if varying:
        found += _value_figure(frame, names, varying[0])
    errors = relative_errors(frame)
    errors = errors[errors["metric"].isin(_DRAWN)]
    if has_errors(errors):
        caption = "Relative error of closed forms and predictions"
        found.append(Picture("relative_error", caption, partial(error_figure, errors)))
    return found


def _ratio_figures(
    ratios: pd.DataFrame, names: dict[str, str], varying: list[str]
) -> list[Picture]:
    drawn = []
    table = ratios[ratios["metric"].isin(_DRAWN) & ratios["ratio_measured"].notna()]
    keys = ["metric", "scope", "mode", "backend", "dtype", "batch_size"]
    seen: list[pd.DataFrame] = []
    for (metric, scope, mode, backend, _, _), part in table.groupby(keys, sort=False):
        is_size = metric.startswith("num_parameters")
        if is_size and mode != table["mode"].iloc[0]:
            continue
        values = part[["variant", *PLACE, "ratio_measured"]].round(9).reset_index(drop=True)
        if metric == "macs" and any(values.equals(old) for old in seen):
            continue  # forward and backward together have the ratios of the forward pass
        seen.append(values)
        name = re.sub(r"[^\w-]", "_", f"{_DRAWN[metric][0]}_{scope}_{mode}_{backend}")
        text = f"{_title(metric, scope, mode)}: ratio, {found_by(metric, 'measured')}"
        text += "" if is_size else f" (backend {backend})"
        by_length = not is_size and "seq_len" in varying
        if by_length and "embed_dim" in varying and len(part) > 1:
            draw = partial(heat_maps, part, names)
            drawn.append(Picture(f"heat_{name}", f"{text}, over D and N", draw))
        x, hue = ("seq_len", "embed_dim") if by_length else ("embed_dim", "baseline")
        if x not in varying or part[x].nunique() < 2:
            continue
        if not by_length:
            part = part.drop_duplicates(["variant", "embed_dim"])
        draw = partial(ratio_lines, part, names, x, hue)
        drawn.append(Picture(f"lines_{name}", f"{text}, over the {_AXES[x]}", draw))
    return drawn


def _value_figure(frame: pd.DataFrame, names: dict[str, str], axis: str) -> list[Picture]:
    long = tidy(frame)
    scopes = long["scope"].unique()
    scope = "model" if "model" in scopes else scopes[0]
    long = long[long["metric"].isin(_DRAWN) & (long["scope"] == scope)]
    is_size = long["metric"].str.startswith("num_parameters")
    if axis == "seq_len":
        long = long[~is_size]
    else:
        long = long[~is_size | (long["mode"] == long["mode"].min())]
    if axis != "grid_heads":
        long = long[long["metric"] != "num_parameters_non_embedding"]
    if axis != "embed_dim":
        long = long[long["embed_dim"] == long["embed_dim"].max()]
    labels = [c for c in ("backend", "dtype", "batch_size") if long[c].nunique() > 1]
    panel = long[labels].astype(str).agg(", ".join, axis=1) if labels else ""
    long = long.assign(panel=panel)
    long.loc[long["metric"].str.startswith("num_parameters"), "panel"] = ""
    long = long.drop_duplicates(["metric", "mode", "panel", "variant", "source", axis])
    several = long.groupby(["metric", "scope", "mode", "panel"])[axis].transform("nunique") > 1
    long = long[several]
    if long.empty:
        return []
    width = f", D = {long['embed_dim'].iloc[0]}" if axis != "embed_dim" else ""
    draw = partial(value_lines, long, names, axis)
    return [Picture("values", f"Absolute values{width}", draw)]
