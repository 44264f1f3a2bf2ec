"""Summary of the efficiency claim over all reports: which ratios, for which sizes, by how much."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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
    counts, tops = _counted(folder, found)
    timed = [one for path in found for one in _timed(folder, path, reports[path]["made"])]
    times, highs = [row for row, _ in timed], _largest((_step(row), high) for row, high in timed)
    kernels: dict[str, tuple[float, float]] = {}
    for path in reports:
        for name, (low, high) in _kernels(path).items():
            least, most = kernels.get(name, (low, high))
            kernels[name] = min(low, least), max(high, most)
    if not counts and not times:
        return []
    lines = ["## The efficiency claim", ""]
    lines += ["All values are relative to the baseline; below 1 is cheaper.", ""]
    lines += _summary(tops, highs, kernels)
    if counts:
        lines += ["", "Counted for one forward pass, range of the ratios over the grids:", ""]
        lines += markdown_lines(pd.DataFrame(counts))
    if times:
        lines += ["", "Measured time of a training step on a CPU, median [20 %, 80 %]:", ""]
        lines += markdown_lines(pd.DataFrame(times))
    return lines


def _counted(
    folder: Path, found: Mapping[Path, Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return a row per variant and baseline with the ranges over the grids of all sweeps.

    Also the largest ratio of multiply-adds in the attention layer, by variant.
    """
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
        return [], {}
    rows = []
    every = pd.concat(parts)
    layers = every[(every["metric"] == "macs") & (every["scope"] == "attention")]
    layers = layers.dropna(subset="ratio_measured")
    tops = _largest(zip(layers["variant"], layers["ratio_measured"], strict=True))
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
    return rows, tops


def _largest(numbers: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the largest number of each name."""
    found: dict[str, float] = {}
    for name, number in numbers:
        found[name] = max(float(number), found.get(name, float(number)))
    return found


def _step(row: Mapping[str, Any]) -> str:
    return f"{row['variant']} with dropout {row['attention dropout']}"


def _timed(
    folder: Path, report: Path, made: Mapping[str, str]
) -> list[tuple[dict[str, Any], float]]:
    """Return a row per variant whose training step was timed against softmax attention.

    With each row, the 80 % quantile of its ratio.
    """
    table = pd.read_csv(report / RATIOS)
    if not {"time_over_softmax", _DROPOUT} <= set(table):
        return []
    if "logical cores" not in made["machine"] or re.search("--mode[= ]eval", made["command"]):
        return []  # of a GPU (see `device_name`), or of the forward pass
    table = table[(table["form"] == "package") & ~table["variant"].str.startswith("softmax")]
    return [
        (
            {
                "variant": row["variant"],
                "baseline": "softmax, 8 heads",
                "attention dropout": f"{row[_DROPOUT]:g}",
                "time": f"{row['time_over_softmax']:.2f} "
                f"[{row['time_over_softmax_p20']:.2f}, {row['time_over_softmax_p80']:.2f}]",
                "report": report.relative_to(folder).as_posix(),
            },
            float(row["time_over_softmax_p80"]),
        )
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
    tops: Mapping[str, float],
    highs: Mapping[str, float],
    kernels: Mapping[str, tuple[float, float]],
) -> list[str]:
    """Return a sentence each on counts, times on a CPU and on a GPU, and the baseline to beat.

    Args:
        tops: largest ratio of multiply-adds, by variant.
        highs: largest 80 % quantile of the ratio of a step's time, by variant and dropout.
        kernels: smallest and largest ratio of a kernel's time, by variant.
    """
    lines = []
    if tops:
        above = [name for name, top in tops.items() if top >= 1]
        exceptions = f"; not {', '.join(above)}" if above else ""
        cheaper = len(tops) - len(above)
        lines.append(
            f"- **Operations: {_held(cheaper, len(tops))}.** {cheaper} of {len(tops)} variants "
            f"need fewer multiply-adds in the attention layer at every counted point{exceptions}."
        )
    if highs:
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
