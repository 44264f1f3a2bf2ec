"""Summary of the efficiency claim over all reports: which ratios, for which sizes, by how much."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from lit_probattn.records.tables import markdown_lines
from profiling.report.names import SCOPES, name_of, told_apart

RATIOS = "ratios.csv"
_QUANTITIES = {"macs": "multiply-adds", "num_parameters": "parameters"}
_DROPOUT = "attention_dropout"
_IN_EQUAL_KERNELS = " / softmax"


def efficiency_lines(folder: Path, reports: Mapping[Path, Mapping[str, Any]]) -> list[str]:
    """Return the Markdown section on the efficiency claim; empty if no report has ratios.

    Args:
        folder: folder of the front page.
        reports: content of `report.json` by report folder.
    """
    found = {path: data for path, data in reports.items() if (path / RATIOS).is_file()}
    counts = _counted(folder, found)
    times = [row for path in found for row in _timed(folder, path, reports[path]["made"])]
    kernels: dict[str, tuple[float, float]] = {}
    for path in reports:
        for name, (low, high) in _kernels(path).items():
            least, most = kernels.get(name, (low, high))
            kernels[name] = min(low, least), max(high, most)
    if not counts and not times:
        return []
    lines = ["## The efficiency claim", ""]
    lines += ["All values are relative to the baseline; below 1 is cheaper.", ""]
    lines += _summary(counts, times, kernels)
    if counts:
        lines += ["", "Counted for one forward pass, range of the ratios over the grids:", ""]
        lines += markdown_lines(pd.DataFrame(counts))
    if times:
        lines += ["", "Measured time of a training step on a CPU, median [20 %, 80 %]:", ""]
        lines += markdown_lines(pd.DataFrame(times))
    return lines


def _counted(folder: Path, found: Mapping[Path, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per variant and baseline with the ranges over the grids of all sweeps."""
    parts = []
    for path, data in found.items():
        variants = data["about"].get("variants") if isinstance(data["about"], dict) else None
        if not variants:
            continue
        table = pd.read_csv(path / RATIOS)
        table = table[table["metric"].isin(_QUANTITIES) & (table["mode"] == "eval")]
        several = "grid_heads" in table and table["grid_heads"].nunique() > 1
        names = told_apart({one["variant"]: name_of(one, several) for one in variants})
        for column in ("variant", "baseline"):
            table[column] = table[column].map(names)
        parts.append(table.assign(report=path.relative_to(folder).as_posix()))
    if not parts:
        return []
    rows = []
    every = pd.concat(parts)
    for (variant, baseline), part in every.groupby(["variant", "baseline"], sort=False):
        row: dict[str, Any] = {"variant": variant, "baseline": baseline}
        for metric, quantity in _QUANTITIES.items():
            for scope, place in SCOPES.items():
                chosen = part[(part["metric"] == metric) & (part["scope"] == scope)]
                row[f"{quantity}, {place}"] = _range(chosen["ratio_measured"].dropna(), "{:.2f}")
        row["width"] = _range(part["embed_dim"], "{:.0f}")
        row["tokens"] = _range(part["seq_len"], "{:.0f}")
        row["reports"] = ", ".join(part["report"].unique())
        rows.append(row)
    return rows


def _timed(folder: Path, report: Path, made: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a row per variant whose training step was timed against softmax attention."""
    table = pd.read_csv(report / RATIOS)
    if not {"time_over_softmax", _DROPOUT} <= set(table):
        return []
    if "logical cores" not in made["machine"] or re.search("--mode[= ]eval", made["command"]):
        return []  # of a GPU (see `device_name`), or of the forward pass
    table = table[(table["form"] == "package") & ~table["variant"].str.startswith("softmax")]
    return [
        {
            "variant": row["variant"],
            "baseline": "softmax, 8 heads",
            "attention dropout": f"{row[_DROPOUT]:g}",
            "time": f"{row['time_over_softmax']:.2f} "
            f"[{row['time_over_softmax_p20']:.2f}, {row['time_over_softmax_p80']:.2f}]",
            "report": report.relative_to(folder).as_posix(),
        }
        for _, row in table.iterrows()
    ]


def _kernels(report: Path) -> dict[str, tuple[float, float]]:
    """Return the range of the time ratios to softmax attention per variant, timed on a GPU."""
    path = report / "rows.csv"
    if not path.is_file() or "comparison" not in pd.read_csv(path, nrows=0):
        return {}
    table = pd.read_csv(path)
    table = table[(table["timed"] == "graph") & table["comparison"].str.endswith(_IN_EQUAL_KERNELS)]
    ratios = table.groupby("comparison", sort=False)["time_ratio"].agg(["min", "max"])
    return {
        str(name).removesuffix(_IN_EQUAL_KERNELS): (low, high)
        for name, low, high in ratios.itertuples()
        if not str(name).startswith("softmax")
    }


def _range(values: pd.Series, form: str) -> str | None:
    if values.empty:
        return None
    low, high = form.format(values.min()), form.format(values.max())
    return low if low == high else f"{low} – {high}"


def _summary(
    counts: list[dict[str, Any]],
    times: list[dict[str, Any]],
    kernels: Mapping[str, tuple[float, float]],
) -> list[str]:
    """Return a sentence each on counts, times on a CPU and on a GPU, and the baseline to beat."""
    lines = []
    if counts:
        tops: dict[str, float] = {}
        for row in counts:
            if top := row["multiply-adds, attention layer"]:
                name = row["variant"]
                tops[name] = max(float(top.split(" – ")[-1]), tops.get(name, 0.0))
        above = [name for name, top in tops.items() if top >= 1]
        exceptions = f"; not {', '.join(above)}" if above else ""
        cheaper = len(tops) - len(above)
        lines.append(
            f"- **Operations: {_held(cheaper, len(tops))}.** {cheaper} of {len(tops)} variants "
            f"need fewer multiply-adds in the attention layer at every counted point{exceptions}."
        )
    if times:
        highs: dict[str, float] = {}
        for row in times:
            name = f"{row['variant']} with dropout {row['attention dropout']}"
            high = float(row["time"].rstrip("]").split(", ")[1])
            highs[name] = max(high, highs.get(name, 0.0))
        shorter = [name for name, high in highs.items() if high < 1]
        which = f": {', '.join(shorter)}" if shorter else ""
        lines.append(
            f"- **Time on a CPU: {_held(len(shorter), len(highs))}.** {len(shorter)} of "
            f"{len(highs)} training steps are faster than the baseline beyond the spread{which}."
        )
    if kernels:
        shorter = [name for name, (_, high) in kernels.items() if high < 1]
        told = "; ".join(f"{name} {low:.2f} – {high:.2f}" for name, (low, high) in kernels.items())
        lines.append(
            f"- **Time on a GPU: {_held(len(shorter), len(kernels))}.** {len(shorter)} of "
            f"{len(kernels)} kernels are faster than softmax attention with 8 heads, in equal "
            f"kernels, at all points: {told}."
        )
    else:
        lines.append("- **Time on a GPU: not measured.**")
    lines.append(
        "- Softmax attention with half the heads halves both counts and is the baseline to beat."
    )
    return lines


def _held(count: int, total: int) -> str:
    return "yes" if count == total else "in part" if count else "no"
