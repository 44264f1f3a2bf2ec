"""Which figures a report has: chosen by the axes of the grid that vary."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from profiling.report.figures import error_figure, heat_maps, ratio_lines, value_lines
from profiling.report.ratios import PLACE, tidy

_DRAWN = (
    *("macs", "num_parameters", "num_parameters_non_embedding"),
    *("peak_memory_bytes", "time_median_s", "energy_j"),
)
_SHORT = {
    "macs": "macs",
    "num_parameters": "parameters",
    "num_parameters_non_embedding": "parameters_non_embedding",
    "peak_memory_bytes": "memory",
    "time_median_s": "time",
    "energy_j": "energy",
}


def draw_figures(
    frame: pd.DataFrame, ratios: pd.DataFrame, folder: Path, note: str
) -> list[tuple[str, str]]:
    """Draw what fits the grid; return file names and captions."""
    for old in folder.glob("*.png"):
        old.unlink()
    varying = [c for c in ("embed_dim", "seq_len", "grid_heads") if frame[c].nunique() > 1]
    drawn: list[tuple[str, str]] = []
    if "embed_dim" in varying or "seq_len" in varying:
        drawn += _ratio_figures(ratios, varying, folder, note)
    axis = _value_axis(varying)
    if axis is not None:
        drawn += _value_figure(frame, axis, folder, note)
    drawn += _error(frame, folder, note)
    return drawn


def _value_axis(varying: list[str]) -> str | None:
    for axis in ("grid_heads", "seq_len", "embed_dim"):
        if axis in varying:
            return axis
    return None


def _ratio_figures(
    ratios: pd.DataFrame, varying: list[str], folder: Path, note: str
) -> list[tuple[str, str]]:
    drawn = []
    table = ratios[ratios["metric"].isin(_DRAWN) & ratios["ratio_measured"].notna()]
    keys = ["metric", "scope", "mode", "backend", "dtype", "batch_size"]
    seen: list[pd.DataFrame] = []
    for (metric, scope, mode, backend, _, _), part in table.groupby(keys, sort=False):
        if "parameters" in str(metric) and mode != table["mode"].iloc[0]:
            continue
        values = part[["variant", *PLACE, "ratio_measured"]].round(9).reset_index(drop=True)
        if metric == "macs" and any(values.equals(old) for old in seen):
            continue  # forward and backward together have the ratios of the forward
        seen.append(values)
        name = f"{_SHORT[str(metric)]}_{scope}_{mode}_{backend}"
        text = f"Ratio of {_SHORT[str(metric)].replace('_', ' ')}, {scope}, {mode}, {backend}"
        by_length = "parameters" not in str(metric) and "seq_len" in varying
        if by_length and "embed_dim" in varying:
            heat_maps(part, folder / f"heat_{name}.png", note)
            drawn.append((f"heat_{name}.png", f"{text}, over D and N"))
        x = "seq_len" if by_length else "embed_dim"
        if x not in varying:
            continue
        hue = "embed_dim" if x == "seq_len" else "baseline"
        if hue == "baseline":
            part = part.drop_duplicates(["variant", "embed_dim"])
        ratio_lines(part, x, hue, folder / f"lines_{name}.png", note)
        drawn.append((f"lines_{name}.png", f"{text}, over {'N' if by_length else 'D'}"))
    return drawn


def _value_figure(frame: pd.DataFrame, axis: str, folder: Path, note: str) -> list[tuple[str, str]]:
    long = tidy(frame)
    scopes = long["scope"].unique()
    scope = "model" if "model" in scopes else scopes[0]
    long = long[long["metric"].isin(_DRAWN) & (long["scope"] == scope)]
    first_mode = long["mode"].iloc[0] if len(long) else "eval"
    long = long[~long["metric"].str.contains("parameters") | (long["mode"] == first_mode)]
    long = long[(long["metric"] != "num_parameters_non_embedding") | (axis == "grid_heads")]
    if long["embed_dim"].nunique() > 1 and axis != "embed_dim":
        long = long[long["embed_dim"] == long["embed_dim"].max()]
    if axis == "seq_len":
        long = long[~long["metric"].str.contains("parameters")]
    labels = [c for c in ("backend", "dtype", "batch_size") if long[c].nunique() > 1]
    panels = [", ".join(map(str, v)) for v in long[labels].values] if labels else ""
    long = long.assign(panel=panels)
    long.loc[long["metric"].str.contains("parameters"), "panel"] = ""
    long = long.drop_duplicates(["metric", "mode", "panel", "variant", "source", axis])
    if long.empty:
        return []
    value_lines(long, axis, folder / "values.png", note)
    width = f", D = {long['embed_dim'].iloc[0]}" if axis != "embed_dim" else ""
    return [("values.png", f"Absolute values{width}; curves: expected, dots: measured")]


def _error(frame: pd.DataFrame, folder: Path, note: str) -> list[tuple[str, str]]:
    from profiling.report.page import relative_errors

    errors = relative_errors(frame)
    errors = errors[errors["metric"].isin(_DRAWN)]
    if errors.empty:
        return []
    error_figure(errors, folder / "relative_error.png", note)
    return [("relative_error.png", "Relative error of closed forms and predictions")]
