"""Several models' `approximate` results side by side: kernels, or variants of attention.

Source: value-aware attention (Gupta and Berant, 2021), figure 2 and table 2: how fast sparse
attention approaches full attention for kernels that are more or less skewed. Folders hold what
`approximate` wrote: `label=folder`. With `--runs label=runs/NAME/VERSION` a panel of training
curves (figure 3) is added.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from lit_probattn.analysis.approximation.methods import ESTIMATE
from lit_probattn.analysis.approximation.study import STUDY
from lit_probattn.analysis.results import AnalysisError, Results
from lit_probattn.analysis.studies.curves import read_run
from lit_probattn.records.tables import markdown_table, panels

_SHOWN = ("ovo", "ovo_reopt", "ova")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    add("--results", nargs="+", required=True, metavar="LABEL=FOLDER", help="of `approximate`")
    add("--runs", nargs="+", default=[], metavar="[LABEL=]FOLDER", help="run folders, for curves")
    add("--metric", default="train/loss", help="column of metrics.csv; default: train/loss")
    add("--out", type=Path, required=True, help="folder of the results")


def run(options: argparse.Namespace) -> None:
    """Compute and write."""
    table = pd.concat([read(text, "") for text in options.results], ignore_index=True)
    skew = pd.concat([read(text, "_skew") for text in options.results], ignore_index=True)
    local = pd.concat([read(text, "_local") for text in options.results], ignore_index=True)
    results = Results(options.out, "approximate_compare", options.command)
    results.table(table)
    results.figure(draw(table))
    parts = [
        "Metric of every model with approximate attention (OVO: ovo, OVA: ova), and its exact "
        "metric on the same samples. (≤): an upper estimate.",
        markdown_table(metric_table(table)),
        "How far the weights spread: exp(entropy) and the mass of the largest weights, mean over "
        "layers, heads and queries with at least half of the keys visible.",
        markdown_table(
            skew.groupby("model", sort=False)
            .mean(numeric_only=True)
            .drop(columns=["layer", "head"])
            .reset_index()
        ),
        "Relative error of heads with exact inputs, mean over layers and heads:",
        markdown_table(local_table(local), digits=3),
    ]
    if len(skew) and skew["model"].nunique() > 0:
        results.figure(draw_skew(skew), "skew")
    if options.runs:
        curves = pd.concat([read_run(text) for text in options.runs], ignore_index=True)
        results.figure(draw_curves(curves, options.metric), "curves")
    results.text("Approximate attention compared between models", [], "\n\n".join(parts))


def read(text: str, part: str) -> pd.DataFrame:
    """Read one table of `label=folder`, with a column `model`.

    Raises:
        AnalysisError: the text has no label, or the file is not there.
    """
    label, equals, folder = text.partition("=")
    if not equals:
        raise AnalysisError(f"--results takes LABEL=FOLDER, received {text!r}")
    path = Path(folder) / f"{STUDY}{part}.csv"
    if not path.is_file():
        raise AnalysisError(f"no {path.name} in {folder}: run `approximate --out {folder}` first")
    frame = pd.read_csv(path)
    frame.insert(0, "model", label)
    return frame


def metric_table(table: pd.DataFrame) -> pd.DataFrame:
    """A row per number of keys, columns per model and method; the last row is exact attention."""
    frame = table[table["method"].isin(_SHOWN) & (table["scope"] == table["scope"].iloc[0])].copy()
    frame["column"] = frame["model"] + " " + frame["method"]
    notes = (
        f" (≤; exact {row['exact']:.4g})" if row["status"] == ESTIMATE else ""
        for row in frame.to_dict("records")
    )
    frame["text"] = [f"{v:.4g}{note}" for v, note in zip(frame["value"], notes, strict=True)]
    wide = frame.pivot_table(
        index="num_kept", columns="column", values="text", aggfunc="first", sort=False
    ).sort_index()
    whole = frame[frame["status"] != ESTIMATE].groupby("column", sort=False)["exact"].first()
    wide.loc["exact"] = whole.map(lambda v: f"{v:.4g}")
    return wide.fillna("–").reset_index().rename(columns={"num_kept": "keys"})


def local_table(local: pd.DataFrame) -> pd.DataFrame:
    """Mean relative error: a row per number of keys, a column per model and method."""
    frame = local[local["method"].isin(_SHOWN)].copy()
    frame["column"] = frame["model"] + " " + frame["method"]
    wide = frame.pivot_table(index="num_kept", columns="column", values="rel_error", sort=False)
    return wide.sort_index().reset_index().rename(columns={"num_kept": "keys"})


def draw(table: pd.DataFrame) -> Figure:
    """Draw the metric over the exact one against the number of keys, a panel per method."""
    frame = table[table["scope"] == table["scope"].iloc[0]]
    methods = [m for m in _SHOWN if m in set(frame["method"])]
    figure, axes = panels(1, len(methods), 4.0, 3.6, sharey=True)
    for axis, method in zip(axes[0], methods, strict=True):
        for number, model in enumerate(dict.fromkeys(frame["model"])):
            part = frame[(frame["model"] == model) & (frame["method"] == method)]
            part = part.sort_values("num_kept")
            ratio = part["value"] / part["exact"]
            colour = f"C{number}"
            axis.plot(part["num_kept"], ratio, color=colour, lw=1.4, label=model)
            guess = part["status"] == ESTIMATE
            axis.plot(part["num_kept"][~guess], ratio[~guess], "o", ms=4, color=colour)
            axis.plot(part["num_kept"][guess], ratio[guess], "o", ms=5, mfc="white", color=colour)
        axis.axhline(1.0, color="0.5", lw=1, ls="--")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
        for show in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            show(lambda v, _: f"{v:g}")
        axis.set_title(
            f"{method} (open: upper estimate)" if method == "ova" else method, fontsize=9
        )
        axis.set_xlabel("keys r")
        axis.grid(color="0.9", lw=0.6)
    axes[0][0].set_ylabel(f"{frame['metric'].iloc[0]} / that of exact attention")
    axes[0][0].legend(fontsize=8, frameon=False)
    return figure


def draw_skew(skew: pd.DataFrame) -> Figure:
    """Draw effective support and mass of the 16 largest weights per model and layer (VAA-F7)."""
    figure, axes = panels(1, 2, 4.0, 3.4)
    columns = (("effective_support", "effective support (keys)"), ("top_16", "mass of 16 keys"))
    for axis, (column, name) in zip(axes[0], columns, strict=True):
        for number, model in enumerate(dict.fromkeys(skew["model"])):
            part = skew[skew["model"] == model]
            axis.plot(part["layer"], part[column], ".", color=f"C{number}", alpha=0.5)
            means = part.groupby("layer")[column].mean()
            axis.plot(means.index, means, color=f"C{number}", lw=1.4, label=model)
        axis.set_xticks(sorted(skew["layer"].unique()))
        axis.set_xlabel("layer")
        axis.set_ylabel(name)
        axis.grid(color="0.9", lw=0.6)
    axes[0][0].legend(fontsize=8, frameon=False)
    return figure


def draw_curves(curves: pd.DataFrame, metric: str) -> Figure:
    """Draw training curves (VAA-F3).

    Raises:
        AnalysisError: no run logged the metric.
    """
    frame = curves[curves["metric"] == metric]
    if frame.empty:
        raise AnalysisError(f"no run logged {metric}; logged: {', '.join(set(curves['metric']))}")
    figure, axes = panels(1, 1, 5.0, 3.4)
    axis = axes[0][0]
    for name in dict.fromkeys(frame["run"]):
        part = frame[frame["run"] == name].sort_values("step")
        smooth = part["value"].rolling(max(1, len(part) // 40), min_periods=1).mean()
        axis.plot(part["step"], smooth, lw=1.3, label=name)
    axis.set_xlabel("optimiser step")
    axis.set_ylabel(metric)
    axis.grid(color="0.9", lw=0.6)
    axis.legend(fontsize=8, frameon=False)
    return figure
