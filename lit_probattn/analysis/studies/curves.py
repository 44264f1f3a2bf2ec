"""Learning curves of several runs in one picture, from their metrics.csv.

Source: MGK, ICML 2022, figures 1, 5, 11 and 12; FiSH, NeurIPS 2022, figure 5. A panel per metric.
Runs are folders (runs/NAME/VERSION) or `label=folder`; --smooth averages as many logged values of
the training loss; --log draws losses and perplexities on a logarithmic scale.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter

from lit_probattn.analysis.results import AnalysisError, Results
from lit_probattn.records.tables import markdown_table, panels
from lit_probattn.training.logs import FILE_NAME

_DEFAULT = ("train/loss", "val/loss", "val/accuracy", "val/ppl_segments")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    add("--runs", nargs="+", required=True, metavar="[LABEL=]FOLDER", help="run folders")
    add("--metrics", nargs="+", help=f"columns of metrics.csv; default: {', '.join(_DEFAULT)}")
    add("--smooth", type=int, default=1, help="logged values of train/ metrics to average")
    add("--log", action="store_true", help="logarithmic scale for losses and perplexities")
    add("--out", type=Path, required=True, help="folder of the results")


def run(options: argparse.Namespace) -> None:
    """Compute and write."""
    if options.smooth < 1:
        raise AnalysisError(f"--smooth must be at least 1, received {options.smooth}")
    long = pd.concat([read_run(text) for text in options.runs], ignore_index=True)
    metrics = choose_metrics(long, options.metrics)
    long = long[long["metric"].isin(metrics)]
    results = Results(options.out, "learning_curves", options.command)
    results.table(long)
    results.figure(draw(long, metrics, options.smooth, options.log))
    smooth = f", training metrics averaged over {options.smooth} logged values"
    body = (
        f"{long['run'].nunique()} runs{smooth if options.smooth > 1 else ''}. Best is the largest "
        "accuracy or the smallest loss or perplexity.\n\n"
        f"{markdown_table(best_values(long))}"
    )
    results.text("Learning curves", [], body)


def read_run(text: str) -> pd.DataFrame:
    """Read the metrics of `[label=]folder` as rows of run, step, metric, value.

    Raises:
        AnalysisError: the folder has no metrics.csv.
    """
    label, equals, folder = text.rpartition("=")
    path = Path(folder if equals else text)
    file = path / FILE_NAME
    if not file.is_file():
        raise AnalysisError(f"no {FILE_NAME} in {path}: expected a run folder, runs/NAME/VERSION")
    wide = pd.read_csv(file)
    if "step" not in wide or wide.empty:
        raise AnalysisError(f"{file} has no steps")
    long = wide.melt("step", var_name="metric", value_name="value").dropna(subset=["value"])
    long.insert(0, "run", label or f"{path.resolve().parent.name}/{path.resolve().name}")
    return long


def choose_metrics(long: pd.DataFrame, wanted: list[str] | None) -> list[str]:
    """Return the metrics to show.

    Raises:
        AnalysisError: no run has one that is wanted.
    """
    there = list(dict.fromkeys(long["metric"]))
    chosen = [m for m in _DEFAULT if m in there] if wanted is None else wanted
    missing = [m for m in chosen if m not in there]
    if missing or not chosen:
        names = ", ".join(missing) or "none of the usual metrics"
        raise AnalysisError(f"no run logged {names}; logged: {', '.join(there)}")
    return chosen


def grows(metric: str) -> bool:
    """Whether larger is better."""
    return "accuracy" in metric


def best_values(long: pd.DataFrame) -> pd.DataFrame:
    """Return, per run and metric, the best value, its step, and the last value."""
    rows = []
    for (name, metric), part in long.groupby(["run", "metric"], sort=False):
        place = part["value"].idxmax() if grows(str(metric)) else part["value"].idxmin()
        best, step = part.loc[place, "value"], part.loc[place, "step"]
        last = part.sort_values("step")["value"].iloc[-1]
        rows.append({"run": name, "metric": metric, "best": best, "at step": step, "last": last})
    return pd.DataFrame(rows)


def draw(long: pd.DataFrame, metrics: list[str], smooth: int, log: bool) -> Figure:
    """Draw a panel per metric, a line per run."""
    columns = min(3, len(metrics))
    rows = -(-len(metrics) // columns)
    figure, axes = panels(rows, columns, 4.0, 3.0)
    flat = [axis for row in axes for axis in row]
    for axis, metric in zip(flat, metrics, strict=False):
        for name in dict.fromkeys(long["run"]):
            part = long[(long["run"] == name) & (long["metric"] == metric)].sort_values("step")
            values = part["value"]
            if metric.startswith("train/") and smooth > 1:
                values = values.rolling(smooth, min_periods=1).mean()
            marker = "o" if len(part) <= 20 else ""
            axis.plot(part["step"], values, marker=marker, ms=3, lw=1.2, label=name)
        axis.set_xlabel("optimiser step")
        axis.set_title(metric, fontsize=10)
        axis.grid(color="0.9", lw=0.6)
        if log and not grows(metric):
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter(ScalarFormatter())
            axis.yaxis.set_minor_formatter(ScalarFormatter())
            axis.tick_params(axis="y", which="minor", labelsize=8)
    for unused in flat[len(metrics) :]:
        unused.remove()
    handles, labels = flat[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(4, len(labels)),
        fontsize=8,
        frameon=False,
    )
    return figure
