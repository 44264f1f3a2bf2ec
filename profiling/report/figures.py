"""Figures of a sweep: the paper's ratios, and operations compared with time.

The first figure has a panel for each quantity in the paper's sentences: a heat map per variant over
width and length, or lines over the axis that varies. The second shows the ratios of multiply-adds
and of time at the same points, if time was measured. The tables contain all values.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
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
    dot,
    label_rows,
    marker_legend,
    ratio_axis,
    ratio_bar,
    ratio_colours,
    tiles,
)
from lit_probattn.records.figures import ReportFigure, colour_of, palette_of, shades
from lit_probattn.records.tables import span
from profiling.report.claims import ratios_of
from profiling.report.names import AXES, LETTERS, SCOPES, told_apart, variant_name
from profiling.report.ratios import METRICS, found_by
from profiling.sweep.config import Claim, SweepConfig

matplotlib.use("Agg")

# Drawn metrics, in the order of the panels.
_DRAWN = (
    *("macs", "num_parameters", "num_parameters_non_embedding", "memory_bytes"),
    *("peak_memory_bytes", "time_median_s", "graph_median_s", "energy_j"),
)
_TIME = "time_median_s"
_MODES = {"eval": "forward pass", "train": "training step"}
_MOST_NAMED = 2  # variants in a claim
_MOST_PANELS = 6  # of operations and time
_TITLE_WIDTH = 55  # characters over a panel
_KEYS = ["variant", "baseline", "embed_dim", "seq_len", "grid_heads", "batch_size"]


@dataclass(frozen=True)
class Quantity:
    """The content of a panel: a column of the rows for a scope and a mode."""

    metric: str
    scope: str
    mode: str

    @property
    def is_size(self) -> bool:
        """Whether it is a number of parameters, which is independent of mode and length."""
        return self.metric.startswith("num_parameters")

    @property
    def words(self) -> str:
        """Title of its panel, in lines that fit over it."""
        words = [f"{METRICS[self.metric][0]} of the {SCOPES[self.scope]}"]
        words += [] if self.is_size else [_MODES[self.mode]]
        line = ", ".join(words)
        return line if len(line) <= _TITLE_WIDTH else ",\n".join(words)


def plain_names(frame: pd.DataFrame) -> dict[str, str]:
    """Return the variants' names as in the README, such as `softmax, 8 heads`, all different."""
    names = {}
    for variant, part in frame.groupby("variant", sort=False):
        options = json.loads(part["attention_args"].iloc[0])
        heads = part["num_heads"].dropna()
        names[str(variant)] = variant_name(part["attention_class"].iloc[0], options, heads)
    return told_apart(names)


def figures_of(
    config: SweepConfig, frame: pd.DataFrame, ratios: pd.DataFrame, *, ratios_drawn: bool = True
) -> dict[str, ReportFigure]:
    """Return the figures of a sweep, at most two.

    Args:
        config: the sweep, whose sentences define the content of the paper's figure.
        frame: its rows.
        ratios: their ratios.
        ratios_drawn: draw the paper's figure; False if another figure replaces it.
    """
    names = plain_names(frame)
    varying = [c for c in AXES if frame[c].nunique() > 1]
    found: dict[str, ReportFigure] = {}
    if ratios_drawn and varying:
        parts = _quantities(config, ratios, varying)
        if parts:
            found["figure"] = ratio_figure(parts, names, sorted(frame["batch_size"].unique()))
    together = _operations_and_time(config, frame)
    if len(together):
        found["operations_and_time"] = together_figure(together, names)
    return found


# ---- the paper's ratios ----------------------------------------------------------------------


def _quantities(
    config: SweepConfig, ratios: pd.DataFrame, varying: Sequence[str]
) -> dict[Quantity, pd.DataFrame]:
    """Return the ratios of each quantity in the paper's sentences; without sentences, of all.

    A training step with the same ratios of counts as the forward pass is not drawn; of several
    batch sizes, the smallest one is, of several backends and dtypes the first one of the grid.
    """
    ratios = _in_grid_order(ratios, config)
    known = ratios[ratios["metric"].isin(_DRAWN) & ratios["ratio_measured"].notna()]
    claims = [claim for sentence in config.sentences for claim in sentence.holds]
    wanted: list[tuple[str, str, str | None]] = [
        (c.metric, c.scope, c.mode) for c in claims if c.metric in _DRAWN
    ]
    if not wanted:
        scopes = known["scope"].unique()
        scope = "model" if "model" in scopes else next(iter(scopes), "model")
        wanted = [(metric, scope, None) for metric in _DRAWN]
    found: dict[Quantity, pd.DataFrame] = {}
    for metric, scope, only in sorted(dict.fromkeys(wanted), key=lambda one: _DRAWN.index(one[0])):
        table = known[(known["metric"] == metric) & (known["scope"] == scope)]
        for mode in [only] if only else sorted(table["mode"].unique()):
            part = table[table["mode"] == mode]
            if part.empty:
                continue
            for name in ("backend", "dtype"):
                part = part[part[name] == part.groupby("variant")[name].transform("first")]
            part = part[part["batch_size"] == part["batch_size"].min()].sort_index()
            quantity = Quantity(metric, scope, mode)
            axis = _axis(quantity, varying)
            keys = ["variant", "embed_dim", "grid_heads"]
            part = part.drop_duplicates(keys if quantity.is_size else _KEYS)
            same = [q for q, old in found.items() if _alike(q, old, quantity, part)]
            if axis is None or part[axis].nunique() < 2 or same:
                continue
            found[quantity] = part
    return found


def _in_grid_order(table: pd.DataFrame, config: SweepConfig) -> pd.DataFrame:
    """Return the rows with those of the first backend of the grid, and of its first dtype, first.

    Backends that a variant sets itself are last.
    """
    grids: dict[str, list[str]] = {
        "backend": config.grid.backend,
        "dtype": [*config.grid.dtype],
    }

    def key(column: pd.Series) -> pd.Series:
        names = grids[str(column.name)]
        return column.map(lambda name: names.index(name) if name in names else len(names))

    return table.sort_values([*grids], key=key, kind="stable")


def _alike(first: Quantity, one: pd.DataFrame, second: Quantity, other: pd.DataFrame) -> bool:
    """Return whether two quantities look identical in a figure."""
    if (first.metric, first.scope) != (second.metric, second.scope):
        return False
    columns = ["variant", "embed_dim", "seq_len", "grid_heads", "ratio_measured"]
    tables = (table[columns].round(9).reset_index(drop=True) for table in (one, other))
    return first.is_size or next(tables).equals(next(tables))


def _axis(quantity: Quantity, varying: Sequence[str]) -> str | None:
    """Return the horizontal axis of a quantity; None if it does not vary along any axis."""
    order = (
        ("embed_dim", "grid_heads") if quantity.is_size else ("seq_len", "embed_dim", "grid_heads")
    )
    return next((axis for axis in order if axis in varying), None)


def _is_grid(quantity: Quantity, part: pd.DataFrame) -> bool:
    return not quantity.is_size and min(part[c].nunique() for c in ("embed_dim", "seq_len")) > 1


def ratio_figure(
    parts: Mapping[Quantity, pd.DataFrame],
    names: Mapping[str, str],
    batch_sizes: Sequence[int] = (),
) -> ReportFigure:
    """Return the figure of the ratios of several quantities.

    Args:
        parts: ratios by quantity.
        names: names of the variants.
        batch_sizes: batch sizes of the sweep, of which the smallest one is drawn.
    """
    found = {found_by(q.metric, "measured") for q in parts}
    first, table = next(iter(parts.items()))
    points = sum(len(part) for part in parts.values())
    bases = list(dict.fromkeys(names[b] for b in table["baseline"]))
    caption = (
        f"Ratios to {' or '.join(bases)} at the same width, length and batch size; {CHEAPER}. "
        f"{points} ratios, {' or '.join(sorted(found))}"
    )
    has_error = any(q.metric == _TIME for q in parts)
    one = next(iter(parts.values()))
    caption += f" with {_settings(one)}; "
    caption += (
        "medians without error bars; rows.csv contains the quantiles of times."
        if has_error
        else (
            "counts and predictions have no error."
            if found == {"counted"}
            else "counts and peak memory do not vary between repetitions."
        )
    )
    if len(batch_sizes) > 1:
        least, *others = batch_sizes
        caption += f" Batch size {least}; the tables also have {', '.join(map(str, others))}."
    return ReportFigure(claim_of(first, table, names), caption, partial(_draw_ratios, parts, names))


def claim_of(quantity: Quantity, part: pd.DataFrame, names: Mapping[str, str]) -> str:
    """Return the range of each variant's ratio as a sentence; the extremes of many variants."""
    ranges = part.groupby("variant", sort=False)["ratio_measured"].agg(["min", "max"])
    base = " or ".join(dict.fromkeys(names[b] for b in part["baseline"]))
    where = [SCOPES[quantity.scope], *([] if quantity.is_size else [_MODES[quantity.mode]])]
    what = f"the {METRICS[quantity.metric][0]} of {base} ({', '.join(where)})"
    told = [f"{names[str(v)]}: {span((low, high), '.2f')}" for v, low, high in ranges.itertuples()]
    if len(told) <= _MOST_NAMED:
        return f"{'; '.join(told)} of {what}"
    least = names[str(ranges["min"].idxmin())]
    whole = span((ranges["min"].min(), ranges["max"].max()), ".2f")
    return f"{len(told)} variants need {whole} of {what}, {least} the least"


def _draw_ratios(parts: Mapping[Quantity, pd.DataFrame], names: Mapping[str, str]) -> Figure:
    """Draw heat maps over width and length, one per variant and heads, or lines over one axis."""
    drawn: list[Callable[[Axes], Any]] = []
    palette = palette_of(names[v] for part in parts.values() for v in part["variant"])
    for quantity, part in parts.items():
        if _is_grid(quantity, part):
            for _, one in part.groupby(["variant", "grid_heads"], sort=False, dropna=False):
                heads = ""
                if part["grid_heads"].nunique() > 1:
                    heads = f", {LETTERS['grid_heads']} = {int(one['grid_heads'].iloc[0])}"
                drawn.append(partial(heat_map, quantity, one, names, heads))
        else:
            drawn.append(partial(ratio_lines, quantity, part, names, palette))
    figure, axes = tiles(
        len(drawn), 2 if len(drawn) in (2, 4) else 3, 6.4 if len(drawn) == 1 else 4.7, 3.4
    )
    images = []
    for axis, draw in zip(axes, drawn, strict=True):
        image = draw(axis)
        images += [(image, axis)] if image is not None else []
    if images:
        ratio_bar(figure, images[0][0], [axis for _, axis in images])
    if len(images) < len(drawn):
        handles = [Line2D([], [], marker="o", color=c, label=name) for name, c in palette.items()]
        ncols = max(1, int(figure.get_figwidth() / 3.6))
        figure.legend(handles=handles, loc="outside lower center", ncols=ncols)
    return figure


def heat_map(
    quantity: Quantity, part: pd.DataFrame, names: Mapping[str, str], heads: str, axis: Axes
) -> object:
    """Draw the ratio of a variant over width and length; return the image.

    `heads` follows the name of the variant in the title.
    """
    grid = part.pivot_table(index="embed_dim", columns="seq_len", values="ratio_measured")
    style: dict[str, Any] = {"fmt": ".2f", "annot_kws": {"fontsize": 8}, "linewidths": 0.5}
    seaborn.heatmap(grid, ax=axis, annot=True, cbar=False, **style, **ratio_colours())
    axis.invert_yaxis()
    axis.tick_params(rotation=0)
    axis.set(xlabel=AXES["seq_len"], ylabel="model width D")
    axis.set_title(f"{names[str(part['variant'].iloc[0])]}{heads}\n{quantity.words}")
    return axis.collections[0]


def ratio_lines(
    quantity: Quantity,
    part: pd.DataFrame,
    names: Mapping[str, str],
    palette: Mapping[str, str],
    axis: Axes,
) -> None:
    """Draw expected and found ratios over the axis that varies, one line per variant.

    Dots of different sizes keep overlapping lines visible.
    """
    varying = [c for c in AXES if part[c].nunique() > 1]
    x = _axis(quantity, varying) or "seq_len"
    variants = list(dict.fromkeys(part["variant"]))
    for place, variant in enumerate(variants):
        one = part[part["variant"] == variant]
        others = [c for c in varying if c != x and one[c].nunique() > 1]
        lines = [part for _, part in one.groupby(others[0])] if others else [one]
        colours = (
            shades(names[variant], len(lines)) if len(lines) > 1 else [palette[names[variant]]]
        )
        for colour, line in zip(colours, lines, strict=True):
            line = line.drop_duplicates(x).sort_values(x).set_index(x)
            expected = line["ratio_analytic"].fillna(line["ratio_predicted"]).dropna()
            axis.plot(expected, color=colour, lw=1.2)
            size = 4 + 1.3 * (len(variants) - 1 - place)
            joined = {"ls": "--", "lw": 0.8} if expected.empty else {"ls": "none"}
            axis.plot(line["ratio_measured"], marker="o", ms=size, color=colour, **joined)
    axis.set_xscale("log", base=2)
    values = sorted(part[x].unique())
    axis.set_xticks(values, [str(v) for v in values], rotation=45 if len(values) > 6 else 0)
    axis.xaxis.set_minor_locator(NullLocator())
    found = part[["ratio_measured", "ratio_analytic", "ratio_predicted"]].to_numpy().ravel()
    ratio_axis(axis, found)
    axis.set(xlabel=AXES[x], ylabel=f"ratio ({CHEAPER})")
    ways = [f"dots {found_by(quantity.metric, 'measured')}"]
    for source in ("analytic", "predicted"):
        if part[f"ratio_{source}"].notna().any():
            ways.append(f"curves {found_by(quantity.metric, source)}")
    axis.set_title(f"{quantity.words}\n{', '.join(ways)}")


# ---- operations and time ----------------------------------------------------------------------


def _operations_and_time(config: SweepConfig, frame: pd.DataFrame) -> pd.DataFrame:
    """Return ratios of multiply-adds and of time at the points with both."""
    if _TIME not in frame or not frame[_TIME].notna().any():
        return pd.DataFrame()
    tables = []
    for metric in ("macs", _TIME):
        modes = []
        for mode in frame["mode"].unique():
            claim = Claim(metric=metric, mode=mode, scope="model", below=1.0)
            for scope in ("model", "layers", "attention"):
                table = ratios_of(claim.model_copy(update={"scope": scope}), config, frame)
                table = table[table["source"] == "measured"] if len(table) else table
                table = _in_grid_order(table, config)
                if len(table):
                    modes.append(table)
                    break
        tables.append(pd.concat(modes, ignore_index=True) if modes else pd.DataFrame())
    counts, times = tables
    if counts.empty or times.empty:
        return pd.DataFrame()
    place = ["variant", "embed_dim", "seq_len", "grid_heads", "batch_size", "mode", "scope"]
    keys = [*place, "backend", "dtype"]  # of several, the first one of the grid with a time
    counts = counts.drop_duplicates(keys)[[*keys, "value"]].rename(columns={"value": "macs"})
    both = times.drop_duplicates(keys).merge(counts, on=keys).drop_duplicates(place)
    both["baseline"] = [config.baseline_of(name) for name in both["variant"]]
    return both


def together_figure(both: pd.DataFrame, names: Mapping[str, str]) -> ReportFigure:
    """Return the figure of operations and time."""
    bases = " or ".join(dict.fromkeys(names[b] for b in both["baseline"]))
    told = []
    for variant, part in both.groupby("variant", sort=False):
        told.append(
            f"{names[str(variant)]}: {span(part['macs'], '.2f')} of the multiply-adds, "
            f"{span(part['value'], '.2f')} of the time"
        )
    claim = "; ".join(told[:_MOST_NAMED])
    claim += f"; {len(told) - _MOST_NAMED} more variants" if len(told) > _MOST_NAMED else ""
    device = ", ".join(sorted(both["device_name"].unique()))
    caption = (
        f"Ratios to {bases} at the same width, length and batch size; {CHEAPER}. Diamonds: "
        f"multiply-adds, counted; dots: median time on {device}, with {_settings(both)}. "
        "Error bars: 20 % (80 %) "
        "quantile of repeated measurements divided by the 80 % (20 %) quantile of the baseline. "
        f"{len(both)} points."
    )
    places = _places(both)
    if len(places) > _MOST_PANELS:
        caption += f" {_MOST_PANELS} of {len(places)} settings are drawn."
    return ReportFigure(claim, caption, partial(_draw_together, both, names))


def _settings(table: pd.DataFrame) -> str:
    """Return the backends and the dtypes of a table."""
    backends, dtypes = (", ".join(sorted(table[name].unique())) for name in ("backend", "dtype"))
    return f"backend {backends} in {dtypes}"


def _places(both: pd.DataFrame) -> dict[tuple[Any, ...], pd.DataFrame]:
    """Return the rows of each mode and setting."""
    return {key: part for key, part in both.groupby(_place_columns(both), sort=False)}


def _place_columns(both: pd.DataFrame) -> list[str]:
    sizes = ("embed_dim", "seq_len", "batch_size")
    return ["mode", *(c for c in sizes if both[c].nunique() > 1)]


def _draw_together(both: pd.DataFrame, names: Mapping[str, str]) -> Figure:
    """Draw one panel per mode and setting, or six of them, with one row per variant."""
    columns, places = _place_columns(both), list(_places(both).items())
    if len(places) > _MOST_PANELS:  # from the first to the last
        steps = [i * (len(places) - 1) / (_MOST_PANELS - 1) for i in range(_MOST_PANELS)]
        places = [places[round(step)] for step in steps]
    variants = list(dict.fromkeys(both["variant"]))
    height = 1.3 + 0.42 * len(variants)
    figure, axes = tiles(len(places), 3, 4.6, height, sharey=True, sharex=True)
    heights = {variant: -place for place, variant in enumerate(variants)}
    for axis, (place, part) in zip(axes, places, strict=True):
        for row in part.to_dict("records"):
            colour, y = colour_of(names[row["variant"]]), heights[row["variant"]]
            axis.plot([row["macs"], row["value"]], [y, y], color="0.85", lw=1, zorder=1)
            dot(axis, row["macs"], y, None, colour=colour, marker="D", is_hollow=True)
            dot(axis, row["value"], y, (row["low"], row["high"]), colour=colour)
        axis.axvline(1.0, color="0.5", lw=0.8, ls=":")
        label_rows(axis, [textwrap.fill(names[variant], 24) for variant in variants])
        axis.set_xlabel(f"ratio to the baseline ({CHEAPER})")
        told = [_MODES[str(place[0])]]
        letters = {**LETTERS, "batch_size": "batch"}
        told += [f"{letters[c]} = {v}" for c, v in zip(columns[1:], place[1:], strict=True)]
        axis.set_title(", ".join(told))
    axes[0].set_xlim(left=0.0)  # shared, so after all panels
    marker_legend(figure, {"multiply-adds": "D", "time": "o"}, ["multiply-adds"])
    return figure
