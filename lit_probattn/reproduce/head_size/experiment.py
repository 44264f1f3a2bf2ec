"""Report of the head-size experiment: perplexity against the number of heads by rule."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import pandas as pd
import torch
from matplotlib.figure import Figure

from lit_probattn.compare.model import build_task
from lit_probattn.compare.report import Report
from lit_probattn.compare.runs import Run
from lit_probattn.records.figures import ReportFigure, panels
from lit_probattn.reproduce.head_size.curves import (
    draw_curves,
    in_millions,
    limits_of,
    series_by,
    series_by_rule,
)
from lit_probattn.reproduce.head_size.grid import perplexity_of


class HeadSizeReport(Report):
    """Report with sizes, and perplexity drawn against heads and parameters."""

    draws_scores: ClassVar[bool] = False

    def columns(self, run: Run, result: dict[str, Any]) -> dict[str, Any]:
        """Return `point_columns`."""
        return point_columns(run, result)

    def figures(self) -> dict[str, ReportFigure]:
        """Return the figures of perplexity against heads and against parameters."""
        draws = {"heads": draw_heads, "parameters": draw_parameters}
        means = self.rows.groupby(["rule", "num_heads"], sort=False)["perplexity"].mean()
        rule, heads = means.idxmin()
        claim = (
            f"Lowest test perplexity {means.min():.1f}, by rule {rule} with {heads} heads; highest "
            f"{means.max():.1f}"
        )
        counts = sorted({int(n) for n in self.rows.groupby("row")["seed"].nunique()})
        caption = (
            f"Points are means over seeds, n = {' or '.join(map(str, counts))}; error bars are one "
            "standard deviation (n − 1), none for a single seed."
        )
        return {
            name: ReportFigure(claim, caption, partial(draw, self.rows))
            for name, draw in draws.items()
        }

    def text(self) -> list[str]:
        """Return the description of the rules."""
        metric = self.rows["metric"].iloc[0]
        return [
            f"Metric {metric}, of the last checkpoint. Methods: rule: head size (width/MLP). "
            "`d / h`: heads of size width / heads; `fixed`: heads of the grid's size; `matched`: "
            "heads of size d / h and the parameters of the fixed model, by a wider MLP (rule M1) "
            "or embedding (M2); `width varied`: baselines of several widths."
        ]


def sizes_of(run: Run) -> dict[str, Any]:
    """Return rule and sizes of a model whose row is named after its rule."""
    sizes = run.config["model"]["init_args"]
    return {
        "rule": run.row.name.partition("-")[0],
        "num_heads": sizes["attention"]["init_args"]["num_heads"],
        **{key: sizes[key] for key in ("head_dim", "embed_dim", "mlp_dim")},
    }


def point_columns(run: Run, result: dict[str, Any]) -> dict[str, Any]:
    """Return rule and sizes of a point, and its parameters without the token embedding."""
    with torch.device("meta"):
        task: Any = build_task(run, run.data())
    return {
        **sizes_of(run),
        "metric": perplexity_of(result["report"])[0],
        "perplexity": result["values"]["test"],
        "num_parameters": result["parameters"],
        "num_other_parameters": result["parameters"] - task.model.tokens.weight.numel(),
    }


def draw_heads(table: pd.DataFrame) -> Figure:
    """Draw perplexity against the number of heads and against the head size."""
    varied = table[table["rule"] == "head_size"]
    of_width = table[table["rule"].isin(["head_size", "width", "width_and_heads"])]
    figure, axes = panels(1, 1 if varied.empty else 2, 5.0, 3.8)
    limits = limits_of(table)
    draw_curves(axes[0][0], series_by_rule(table.drop(of_width.index)), "num_heads", limits)
    axes[0][0].set_xlabel("heads")
    if not varied.empty:
        draw_curves(axes[0][1], series_by(varied, "num_heads", "{} heads"), "head_dim", limits)
        axes[0][1].set_xlabel("head size")
    return figure


def draw_parameters(table: pd.DataFrame) -> Figure:
    """Draw perplexity against parameters, with and without the token embedding."""
    figure, axes = panels(1, 2, 4.4, 3.6, sharey=True)
    labels = {
        "num_parameters": "parameters",
        "num_other_parameters": "parameters without the token embedding",
    }
    for axis, (column, words) in zip(axes[0], labels.items(), strict=True):
        draw_curves(axis, series_by_rule(table), column, limits_of(table))
        axis.set_xlabel(words)
        in_millions(axis)
    return figure
