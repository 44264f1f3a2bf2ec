"""Compare the `approximate` results of several models, such as kernels or variants of attention.

Source: value-aware attention (Gupta and Berant, 2021), figure 2 and table 2: how fast sparse
attention approaches full attention for more or less skewed kernels. Pass output folders of
`approximate` as `label=folder`. `--runs label=runs/NAME/VERSION` adds a panel of training curves
(figure 3).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from lit_probattn.analysis.approximation.figures import WORDS, keys_claim
from lit_probattn.analysis.approximation.methods import ESTIMATE
from lit_probattn.analysis.approximation.study import Approximate, cell
from lit_probattn.analysis.drawing import label, plain_log, powers_of_two
from lit_probattn.analysis.options import add_out
from lit_probattn.analysis.studies.curves import check_labels, claim_of, read_runs
from lit_probattn.analysis.studies.curves import draw as draw_curves
from lit_probattn.analysis.study import Study
from lit_probattn.base.errors import ConfigError
from lit_probattn.records.figures import panels
from lit_probattn.records.tables import markdown_table

_SHOWN = ("ovo", "ovo_reopt", "ova")


class Compare(Study):
    """Metric, spread of the weights, and errors of layers, with a column or line per model."""

    name, title = "approximate_compare", "Approximate attention compared between models"

    @staticmethod
    def _add_options(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        text = "output folders of `approximate`"
        add("--results", nargs="+", required=True, metavar="LABEL=FOLDER", help=text)
        text = "run folders for training curves"
        add("--runs", nargs="+", default=[], metavar="[LABEL=]FOLDER", help=text)
        add("--metric", default="train/loss", help="column of metrics.csv")
        add_out(parser)

    def _compute(self) -> str:
        options, results = self.options, self.results
        table, skew, local = (
            pd.concat([read(text, part) for text in options.results], ignore_index=True)
            for part in ("", "_skew", "_local")
        )
        check_labels("--results", [text.partition("=")[0] for text in options.results])
        check_alike(table)
        results.table(table)
        results.figure(draw(table), keys_claim(table, _SHOWN, "model"))
        spread = skew.groupby("model", sort=False).mean(numeric_only=True)
        if len(skew):
            support = (f"{k} {v:.1f}" for k, v in spread["effective_support"].items())
            claim = f"Effective support, mean over layers, in keys: {', '.join(support)}"
            results.figure(draw_skew(skew), claim, "skew")
        if options.runs:
            curves = read_runs(options.runs)
            if options.metric not in set(curves["metric"]):
                logged = ", ".join(dict.fromkeys(curves["metric"]))
                raise ConfigError(f"no run logged {options.metric}; logged: {logged}")
            claim = claim_of(curves, options.metric)
            results.figure(draw_curves(curves, [options.metric]), claim, "curves")
        parts = [
            "Metric of each model with approximate attention (OVO: ovo, OVA: ova) and with "
            "exact attention, on the same samples. (≤): upper estimate.",
            markdown_table(metric_table(table)),
            "Concentration of the weights: exp(entropy) and the mass of the largest weights, "
            "mean over layers, heads and queries that attend to at least half of the keys.",
            markdown_table(spread.drop(columns=["layer", "head"]).reset_index()),
            "Relative error of heads with exact inputs, mean over layers and heads:",
            markdown_table(local_table(local), digits=3),
        ]
        return "\n\n".join(parts)


def read(text: str, part: str) -> pd.DataFrame:
    """Read one table of `label=folder`, with a column `model`.

    Raises:
        ConfigError: the text has no label, or the file is missing.
    """
    label, equals, folder = text.partition("=")
    if not equals:
        raise ConfigError(f"--results: expected LABEL=FOLDER, received {text!r}")
    path = Path(folder) / Approximate.name / f"{Approximate.name}{part}.csv"
    if not path.is_file():
        raise ConfigError(f"no {path.name} in {folder}: run `approximate --out {folder}` first")
    frame = pd.read_csv(path)
    frame.insert(0, "model", label)
    return frame


def check_alike(table: pd.DataFrame) -> None:
    """Check that the results of all models are of one scope, one metric and equal samples.

    Raises:
        ConfigError: they differ; the message contains the values of each model.
    """
    rows = table[table["status"] != ESTIMATE].drop_duplicates("model")
    for column in ("scope", "metric", "samples", "words"):
        if rows[column].nunique() > 1:
            pairs = zip(rows["model"], rows[column], strict=True)
            values = ", ".join(f"{model} {value}" for model, value in pairs)
            raise ConfigError(
                f"--results: different {column} ({values}): compare results of `approximate` with "
                "equal --scope, --split and --num_samples, of models of the same task and data"
            )


def metric_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return a row per number of keys and a column per model and method; the last row is exact."""
    frame = _shown(table[table["scope"] == table["scope"].iloc[0]])
    frame["text"] = [cell(row) for row in frame.to_dict("records")]
    wide = frame.pivot_table(
        index="num_kept", columns="column", values="text", aggfunc="first", sort=False
    ).sort_index()
    whole = frame[frame["status"] != ESTIMATE].groupby("column", sort=False)["exact"].first()
    wide.loc["exact"] = whole.map(lambda v: f"{v:.4g}")
    return wide.fillna("–").reset_index().rename(columns={"num_kept": "keys"})


def local_table(local: pd.DataFrame) -> pd.DataFrame:
    """Return mean relative errors, a row per number of keys and a column per model and method."""
    frame = _shown(local)
    wide = frame.pivot_table(index="num_kept", columns="column", values="rel_error", sort=False)
    return wide.sort_index().reset_index().rename(columns={"num_kept": "keys"})


def _shown(table: pd.DataFrame) -> pd.DataFrame:
    frame = table[table["method"].isin(_SHOWN)]
    return frame.assign(column=frame["model"] + " " + frame["method"])


def draw(table: pd.DataFrame) -> Figure:
    """Draw the metric relative to exact attention over the number of keys, a panel per method."""
    frame = table[table["scope"] == table["scope"].iloc[0]]
    methods = [m for m in _SHOWN if m in set(frame["method"])]
    figure, (axes,) = panels(1, len(methods), 4.0, 3.6, sharey=True)
    for axis, method in zip(axes, methods, strict=True):
        for number, model in enumerate(dict.fromkeys(frame["model"])):
            part = frame[(frame["model"] == model) & (frame["method"] == method)]
            part = part.sort_values("num_kept")
            ratio, guess = part["value"] / part["exact"], part["status"] == ESTIMATE
            colour = f"C{number}"
            axis.plot(part["num_kept"], ratio, color=colour, lw=1.4, label=model)
            axis.plot(part["num_kept"][~guess], ratio[~guess], "o", ms=4, color=colour)
            axis.plot(part["num_kept"][guess], ratio[guess], "o", ms=5, mfc="white", color=colour)
        axis.axhline(1.0, color="0.5", lw=1, ls="--")
        powers_of_two(axis)
        plain_log(axis)
        title = f"{method}: {WORDS[method]}"
        title += "\n(open: upper estimate)" if method == "ova" else ""
        label(axis, "keys r", title=title)
    axes[0].set_ylabel(f"{frame['metric'].iloc[0]} relative to exact attention")
    axes[0].legend(fontsize=8, frameon=False)
    return figure


def draw_skew(skew: pd.DataFrame) -> Figure:
    """Draw effective support and the mass of the 16 largest weights per model and layer."""
    figure, (axes,) = panels(1, 2, 4.0, 3.4)
    columns = (("effective_support", "effective support (keys)"), ("top_16", "mass of 16 keys"))
    for axis, (column, name) in zip(axes, columns, strict=True):
        for number, model in enumerate(dict.fromkeys(skew["model"])):
            part = skew[skew["model"] == model]
            axis.plot(part["layer"], part[column], ".", color=f"C{number}", alpha=0.5)
            means = part.groupby("layer")[column].mean()
            axis.plot(means.index, means, color=f"C{number}", lw=1.4, label=model)
        axis.set_xticks(sorted(skew["layer"].unique()))
        label(axis, "layer", name)
    axes[0].legend(fontsize=8, frameon=False)
    return figure
