"""Figures of a report: which ones, by the axes that vary; heat maps, lines, relative errors."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from lit_probattn.records.tables import panels, save_png
from profiling.report.ratios import METRICS, PLACE, relative_errors, tidy

matplotlib.use("Agg")

_HEADING = {"embed_dim": "D", "seq_len": "N", "grid_heads": "heads of the baseline"}
# The metrics that are drawn, and what their files are called.
_DRAWN = {
    "macs": "macs",
    "num_parameters": "parameters",
    "num_parameters_non_embedding": "parameters_non_embedding",
    "peak_memory_bytes": "memory",
    "time_median_s": "time",
    "energy_j": "energy",
}
_BESIDE = {"fontsize": 7, "frameon": False, "loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}


def _panels(count: int, width: float = 4.2, share: bool = False) -> tuple[Figure, list[Axes]]:
    columns = 2 if count == 4 else min(3, count)
    figure, rows = panels(-(-count // columns), columns, width, 3.4, sharey=share)
    flat = [axis for row in rows for axis in row]
    for unused in flat[count:]:
        unused.remove()
    return figure, flat[:count]


def _title(metric: str, scope: str) -> str:
    name = METRICS[metric][0]
    return name if metric == "num_parameters_non_embedding" else f"{name}, {scope}"


def _length_axis(axis: Axes, column: str, values: list[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(values, [str(v) for v in values], rotation=45 if len(values) > 6 else 0)
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel(_HEADING[column])


def _curve_and_dots(
    axis: Axes, curve: pd.Series, dots: pd.Series, color: object, size: int, label: str = ""
) -> None:
    """Draw what is expected as a curve and what was measured as dots, joined if alone."""
    axis.plot(curve, color=color, lw=1.2)
    style = {"ls": "--", "lw": 0.8} if curve.empty else {"ls": "none"}
    axis.plot(dots, marker="o", ms=size, color=color, label=label, **style)


def heat_maps(table: pd.DataFrame, path: Path, note: str) -> Path:
    """Draw the measured ratio over D and N, one panel per variant, of one metric and scope."""
    variants = list(dict.fromkeys(table["variant"]))
    figure, axes = _panels(len(variants), 5.2)
    low, high = table["ratio_measured"].min(), table["ratio_measured"].max()
    for axis, variant in zip(axes, variants, strict=True):
        part = table[table["variant"] == variant]
        grid = part.pivot_table(index="embed_dim", columns="seq_len", values="ratio_measured")
        sns.heatmap(
            grid.sort_index(ascending=False),
            ax=axis,
            annot=True,
            fmt=".3f",
            annot_kws={"fontsize": 8},
            vmin=low,
            vmax=high,
            cmap="viridis",
            cbar=axis is axes[-1],
        )
        axis.set(xlabel="N", ylabel="D", title=f"{variant} / {part['baseline'].iloc[0]}")
    first = table.iloc[0]
    figure.suptitle(f"{_title(first['metric'], first['scope'])}: ratio, {first['mode']}")
    return save_png(figure, path, note)


def ratio_lines(table: pd.DataFrame, x: str, hue: str, path: Path, note: str) -> Path:
    """Draw ratios over `x`, a line per `hue`: analytic (or predicted) curves, measured dots."""
    variants = list(dict.fromkeys(table["variant"]))
    figure, axes = _panels(len(variants), share=True)
    shades = sorted(table[hue].dropna().unique())
    palette = dict(zip(shades, sns.color_palette("viridis", len(shades)), strict=True))
    for axis, variant in zip(axes, variants, strict=True):
        part = table[table["variant"] == variant].sort_values(x)
        for shade in shades:
            line = part[part[hue] == shade].set_index(x)
            curve = line["ratio_analytic"].fillna(line["ratio_predicted"]).dropna()
            label = f"{_HEADING[hue]} = {shade}" if hue in _HEADING else str(shade)
            _curve_and_dots(axis, curve, line["ratio_measured"], palette[shade], 4, label)
        axis.axhline(1.0, color="0.6", lw=0.8, ls=":")
        _length_axis(axis, x, sorted(table[x].unique()))
        axis.set(ylabel="ratio", title=f"{variant} / {part['baseline'].iloc[0]}")
    if len(shades) > 1:
        axes[-1].legend(**_BESIDE)
    first = table.iloc[0]
    kind = "curves: closed form, dots: measured"
    if table["ratio_analytic"].isna().all():
        kind = "dots: measured"
        if table["ratio_predicted"].notna().any():
            kind = "curves: predicted, dots: measured"
    figure.suptitle(f"{_title(first['metric'], first['scope'])}: ratio ({kind})")
    sns.despine(figure)
    return save_png(figure, path, note)


def value_lines(long: pd.DataFrame, x: str, path: Path, note: str) -> Path:
    """Draw absolute values over `x`, a line per variant and a panel per metric and setting."""
    keys = ["metric", "scope", "mode", "panel"]
    groups = list(long.groupby(keys, sort=False))
    figure, axes = _panels(len(groups))
    variants = list(dict.fromkeys(long["variant"]))
    palette = dict(zip(variants, sns.color_palette("deep", len(variants)), strict=True))
    sizes = dict(zip(variants, range(3 + len(variants), 3, -1), strict=True))
    for axis, ((metric, scope, mode, panel), part) in zip(axes, groups, strict=True):
        _, divisor, unit = METRICS[metric]
        for variant in dict.fromkeys(part["variant"]):
            line = part[part["variant"] == variant].sort_values(x).set_index(x)
            value, is_measured = line["value"] / divisor, line["source"] == "measured"
            curve, dots = value[~is_measured], value[is_measured]
            _curve_and_dots(axis, curve, dots, palette[variant], sizes[variant])
        _length_axis(axis, x, sorted(long[x].unique()))
        what = _title(metric, scope) + ("" if "parameters" in metric else f", {mode}")
        axis.set_title(f"{what}\n{panel}".strip(), fontsize=9)
        axis.set_ylabel(unit)
        if metric in ("time_median_s", "peak_memory_bytes"):
            axis.set_yscale("log")
        else:
            axis.set_ylim(0, part["value"].max() / divisor * 1.08)
    handles = [
        Line2D([], [], marker="o", ms=sizes[v], color=palette[v], lw=1.2, label=v) for v in variants
    ]
    figure.legend(handles=handles, fontsize=8, frameon=False, loc="outside right upper")
    sns.despine(figure)
    return save_png(figure, path, note)


def error_figure(errors: pd.DataFrame, path: Path, note: str) -> Path:
    """Draw the relative error of closed form or prediction against measurement, over N."""
    figure, [axis] = _panels(1, 6.4)
    sns.scatterplot(
        errors, x="seq_len", y="error", hue="variant", style="metric", ax=axis, s=22, linewidth=0
    )
    _length_axis(axis, "seq_len", sorted(errors["seq_len"].unique()))
    axis.set_ylabel("expected / measured − 1")
    if errors["error"].abs().max() == 0.0:
        axis.set_ylim(-1e-6, 1e-6)
        axis.text(0.5, 0.6, "0 at every point", transform=axis.transAxes, ha="center", color="0.4")
    axis.axhline(0.0, color="0.6", lw=0.8, ls=":")
    axis.legend(**_BESIDE)
    figure.suptitle("Relative error of closed forms and predictions")
    sns.despine(figure)
    return save_png(figure, path, note)


def draw_figures(
    frame: pd.DataFrame, ratios: pd.DataFrame, folder: Path, note: str
) -> list[tuple[str, str]]:
    """Draw what fits the grid; return file names and captions."""
    for old in folder.glob("*.png"):
        old.unlink()
    varying = [c for c in ("grid_heads", "seq_len", "embed_dim") if frame[c].nunique() > 1]
    drawn: list[tuple[str, str]] = []
    if "embed_dim" in varying or "seq_len" in varying:
        drawn += _ratio_figures(ratios, varying, folder, note)
    if varying:
        drawn += _value_figure(frame, varying[0], folder, note)
    errors = relative_errors(frame)
    errors = errors[errors["metric"].isin(_DRAWN)]
    if not errors.empty:
        error_figure(errors, folder / "relative_error.png", note)
        drawn.append(("relative_error.png", "Relative error of closed forms and predictions"))
    return drawn


def _ratio_figures(
    ratios: pd.DataFrame, varying: list[str], folder: Path, note: str
) -> list[tuple[str, str]]:
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
            continue  # forward and backward together have the ratios of the forward
        seen.append(values)
        name = f"{_DRAWN[metric]}_{scope}_{mode}_{backend}"
        text = f"Ratio of {_DRAWN[metric].replace('_', ' ')}, {scope}, {mode}, {backend}"
        by_length = not is_size and "seq_len" in varying
        if by_length and "embed_dim" in varying:
            heat_maps(part, folder / f"heat_{name}.png", note)
            drawn.append((f"heat_{name}.png", f"{text}, over D and N"))
        x, hue = ("seq_len", "embed_dim") if by_length else ("embed_dim", "baseline")
        if x not in varying:
            continue
        if not by_length:
            part = part.drop_duplicates(["variant", "embed_dim"])
        ratio_lines(part, x, hue, folder / f"lines_{name}.png", note)
        drawn.append((f"lines_{name}.png", f"{text}, over {_HEADING[x]}"))
    return drawn


def _value_figure(frame: pd.DataFrame, axis: str, folder: Path, note: str) -> list[tuple[str, str]]:
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
    if long.empty:
        return []
    value_lines(long, axis, folder / "values.png", note)
    width = f", D = {long['embed_dim'].iloc[0]}" if axis != "embed_dim" else ""
    return [("values.png", f"Absolute values{width}; curves: expected, dots: measured")]
