"""Learning curves of several runs in one figure, from their metrics.csv.

Source: MGK, ICML 2022, figures 1, 5, 11 and 12; FiSH, NeurIPS 2022, figure 5. There is a panel per
metric. Runs are folders (runs/NAME/VERSION) or `label=folder`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from lit_probattn.analysis.drawing import tiles
from lit_probattn.analysis.options import add_out
from lit_probattn.analysis.study import Study
from lit_probattn.base.errors import ConfigError
from lit_probattn.records.tables import counted, markdown_table
from lit_probattn.training.logs import FILE_NAME
from lit_probattn.training.saving import best_mode

_SCORES = ("loss", "accuracy", "bleu", "ppl_segments")
_DEFAULT = ("train/loss", *(f"{split}/{score}" for split in ("val", "test") for score in _SCORES))
_TEST_NOTE = (
    "Metrics of test/ were logged during training (run.test_during_training) and selected no "
    "checkpoint. The table omits their best values, which would be selected on test data."
)


class Curves(Study):
    """All logged values, and the best value of each run."""

    name, title = "learning_curves", "Learning curves"

    @staticmethod
    def _add_options(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--runs", nargs="+", required=True, metavar="[LABEL=]FOLDER", help="run folders")
        add("--metrics", nargs="+", help=f"columns of metrics.csv; default: {', '.join(_DEFAULT)}")
        add_out(parser)

    def _compute(self) -> str:
        options = self.options
        long = read_runs(options.runs)
        metrics = choose_metrics(long, options.metrics)
        long = long[long["metric"].isin(metrics)]
        self.results.table(long)
        curves = [m for m in metrics if has_curve(long, m)]
        if curves:
            self.results.figure(draw(long, curves), claim_of(long, curves[0]))
        of_test = any(is_of_test(metric) for metric in metrics)
        return (
            f"{counted(long['run'].nunique(), 'run')}. Best is the largest accuracy, BLEU, F1, "
            "exact match, score or return, or the smallest value of another metric.\n\n"
            f"{markdown_table(best_values(long))}" + (f"\n\n{_TEST_NOTE}" if of_test else "")
        )


def split_label(text: str) -> tuple[str, Path]:
    """Return label and path of `[label=]path`; the label may be empty.

    Both may contain `=`: the path is the longest one that exists, or else follows the last `=`.
    """
    words = text.split("=")
    places = (("=".join(words[:n]), Path("=".join(words[n:]))) for n in range(len(words)))
    found = next((place for place in places if place[1].exists()), None)
    return found or ("=".join(words[:-1]), Path(words[-1]))


def check_labels(flag: str, labels: Sequence[str]) -> None:
    """Check that labels are unique; otherwise their rows would be merged.

    Raises:
        ConfigError: a label is duplicate.
    """
    for number, label in enumerate(labels):
        if label in labels[:number]:
            raise ConfigError(f"{flag}: duplicate label {label}; use LABEL=FOLDER")


def read_runs(texts: Sequence[str]) -> pd.DataFrame:
    """Read the metrics of several `[label=]folder`; the default label is NAME/VERSION.

    Raises:
        ConfigError: two runs have the same label; see also `read_run`.
    """
    runs = [(label or name_of(path), path) for label, path in map(split_label, texts)]
    check_labels("--runs", [label for label, _ in runs])
    return pd.concat([read_run(path, label) for label, path in runs], ignore_index=True)


def read_run(folder: Path, label: str = "") -> pd.DataFrame:
    """Read the metrics of a run as rows of run, step, metric, value; `run` is the label.

    Raises:
        ConfigError: the folder has no metrics.csv.
    """
    file = folder / FILE_NAME
    if not file.is_file():
        raise ConfigError(f"no {FILE_NAME} in {folder}: expected a run folder, runs/NAME/VERSION")
    wide = pd.read_csv(file)
    if "step" not in wide or wide.empty:
        raise ConfigError(f"{file} has no steps")
    long = wide.melt("step", var_name="metric", value_name="value").dropna(subset=["value"])
    long.insert(0, "run", label)
    return long


def by_step(logged: pd.DataFrame, metric: str) -> pd.Series:
    """Return a metric of a run by step, the last of several values; empty if it was not logged."""
    part = logged[logged["metric"] == metric].drop_duplicates("step", keep="last")
    return part.set_index("step")["value"].sort_index()


def name_of(folder: Path) -> str:
    """Return the default label of a run, NAME/VERSION."""
    return f"{folder.resolve().parent.name}/{folder.resolve().name}"


def choose_metrics(long: pd.DataFrame, wanted: list[str] | None) -> list[str]:
    """Return the metrics to show.

    Raises:
        ConfigError: a requested metric was not logged by any run.
    """
    there = list(dict.fromkeys(long["metric"]))
    chosen = [m for m in _DEFAULT if m in there] if wanted is None else wanted
    missing = [m for m in chosen if m not in there]
    if missing or not chosen:
        names = ", ".join(missing) or "none of the usual metrics"
        raise ConfigError(f"no run logged {names}; logged: {', '.join(there)}")
    return chosen


def has_curve(long: pd.DataFrame, metric: str) -> bool:
    """Return whether any run logged the metric more than once."""
    return bool((long[long["metric"] == metric].groupby("run").size() > 1).any())


def grows(metric: str) -> bool:
    """Return whether larger values are better, by the name of a metric."""
    return best_mode(metric) == "max"


def is_of_test(metric: str) -> bool:
    """Return whether a metric belongs to the test split."""
    return metric.startswith("test/")


def best_values(long: pd.DataFrame) -> pd.DataFrame:
    """Return the best value, its step and the last value per run and metric.

    Metrics of the test split have only the last value, since the best one would be selected on test
    data.
    """
    rows = []
    for (name, metric), part in long.groupby(["run", "metric"], sort=False):
        place = part["value"].idxmax() if grows(str(metric)) else part["value"].idxmin()
        best, step = part.loc[place, "value"], part.loc[place, "step"]
        if is_of_test(str(metric)):
            best = step = None
        last = part.sort_values("step")["value"].iloc[-1]
        rows.append({"run": name, "metric": metric, "best": best, "at step": step, "last": last})
    return pd.DataFrame(rows)


def claim_of(long: pd.DataFrame, metric: str) -> str:
    """Return the run with the best value of a metric, or with the best last one of a test metric.

    One run is described by its own value.
    """
    table = best_values(long[long["metric"] == metric])
    column = "last" if is_of_test(metric) else "best"
    place = table[column].idxmax() if grows(metric) else table[column].idxmin()
    first = table.loc[place]
    word = "Last" if column == "last" else "Best"
    among = f" of {len(table)} runs, {first['run']}" if len(table) > 1 else ""
    return f"{word} {metric}{among}: {first[column]:.4g}"


def draw(long: pd.DataFrame, metrics: list[str]) -> Figure:
    """Draw a panel per metric with a line per run."""
    figure, axes = tiles(len(metrics), 3, 4.0, 3.0)
    for axis, metric in zip(axes, metrics, strict=True):
        for name in dict.fromkeys(long["run"]):
            part = long[(long["run"] == name) & (long["metric"] == metric)].sort_values("step")
            values = part["value"]
            marker = "o" if len(part) <= 20 else ""
            axis.plot(part["step"], values, marker=marker, ms=3, lw=1.2, label=name)
        axis.set_xlabel("optimiser step")
        axis.set_title(metric, fontsize=10)
        axis.grid(color="0.9", lw=0.6)
    handles, labels = axes[0].get_legend_handles_labels()
    place: Any = {"loc": "outside lower center", "ncols": min(4, len(labels))}
    figure.legend(handles, labels, fontsize=8, frameon=False, **place)
    return figure
