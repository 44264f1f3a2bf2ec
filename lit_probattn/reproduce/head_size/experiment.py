"""Perplexity against the number of heads, under both rules for the head size: the report."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_probattn.analysis.drawing import label, powers_of_two, score_limits
from lit_probattn.base.config_files import file_named
from lit_probattn.compare.cells import Cell
from lit_probattn.compare.command import add_flags, place_of
from lit_probattn.compare.command import run as run_cells
from lit_probattn.compare.predict import build_task
from lit_probattn.compare.report import Report
from lit_probattn.records.tables import panels
from lit_probattn.reproduce.head_size.grid import RULES, Grid, perplexity_of

MODULE = "lit_probattn.head_size experiment"
# What tells the points of the grid apart; the seed does not.
POINT = ["rule", "num_heads", "head_dim", "embed_dim", "mlp_dim"]


class HeadSizeReport(Report):
    """The report with sizes, and perplexity drawn against heads and against parameters."""

    def columns(self, cell: Cell, result: dict[str, Any]) -> dict[str, Any]:
        """Return rule and sizes of a point, and its parameters without the token table."""
        sizes = cell.config["model"]["init_args"]
        with torch.device("meta"):
            task: Any = build_task(cell, cell.data())
        return {
            "rule": cell.row.name.partition("-")[0],
            "num_heads": sizes["attention"]["init_args"]["num_heads"],
            **{key: sizes[key] for key in ("head_dim", "embed_dim", "mlp_dim")},
            "metric": perplexity_of(result["report"])[0],
            "perplexity": result["values"]["test"],
            "num_parameters": result["parameters"],
            "num_other_parameters": result["parameters"] - task.model.tokens.weight.numel(),
        }

    def figures(self) -> dict[str, Figure]:
        """Return perplexity against heads and against parameters."""
        return {"heads": draw_heads(self.rows), "parameters": draw_parameters(self.rows)}

    def text(self) -> list[str]:
        """Return what the rules are."""
        metric = self.rows["metric"].iloc[0]
        return [
            f"Metric {metric}, of the last checkpoint. Methods: rule: head size (width/MLP). "
            "`d / h`: heads of size width / heads; `fixed`: heads of the grid's size; `matched`: "
            "heads of size d / h and the parameters of the fixed model, by a wider MLP (rule M1) "
            "or embedding (M2)."
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `python -m lit_probattn.head_size experiment`."""
    parser.add_argument("--grid", required=True, help="name or file of configs/reproduce")
    add_flags(parser, runs=Path("runs/head_size"))


def run(options: argparse.Namespace) -> int:
    """Run the grid and write table, figures and text; see `lit_probattn.compare.command.run`.

    Raises:
        GridError: the grid is malformed.
    """
    path = Path(file_named("table", options.grid))
    table = Grid.read(path).table(path.stem, place_of(options))
    return run_cells(table, options, options.arguments[1:], module=MODULE, report=HeadSizeReport)


def _curves(axis: Axes, table: pd.DataFrame, column: str, limits: tuple[float, float]) -> None:
    """Draw means by rule, with deviations only where there are several seeds."""
    known_spread = False
    for number, rule in enumerate(dict.fromkeys(table["rule"])):
        points = table[table["rule"] == rule].groupby(column)["perplexity"]
        means, spread = points.mean(), points.std()
        known_spread |= bool(spread.notna().any())
        axis.errorbar(
            *(means.index, means, spread if spread.notna().any() else None),
            marker="o",
            ms=4,
            lw=1.3,
            capsize=2,
            color=f"C{number}",
            label=RULES[str(rule)],
        )
    powers_of_two(axis)
    spread_words = "mean ± standard deviation" if known_spread else "one seed: no spread known"
    label(axis, y=f"test perplexity ({spread_words})", legend=8)
    axis.set_ylim(limits)


def _limits(table: pd.DataFrame) -> tuple[float, float]:
    """Return limits of perplexity that seeds alone would not fill, the same for all panels."""
    groups = table.groupby([column for column in POINT if column in table])["perplexity"]
    spread = groups.std()
    ends = [groups.mean() + sign * spread.fillna(0.0) for sign in (-1, 1)]
    return score_limits([*ends[0], *ends[1]], spread.max())


def draw_heads(table: pd.DataFrame) -> Figure:
    """Draw perplexity against the number of heads (LRB-F1), and against varied head sizes."""
    varied = table[table["rule"] == "head_size"]
    figure, axes = panels(1, 1 if varied.empty else 2, 5.0, 3.8)
    limits = _limits(table)
    _curves(axes[0][0], table[table["rule"] != "head_size"], "num_heads", limits)
    axes[0][0].set_xlabel("heads")
    if not varied.empty:
        _curves(axes[0][1], varied, "head_dim", limits)
        axes[0][1].set_xlabel(f"head size at {varied['num_heads'].iloc[0]} heads")
    return figure


def draw_parameters(table: pd.DataFrame) -> Figure:
    """Draw perplexity against all parameters and those beside the token table (LRB-F2)."""
    figure, axes = panels(1, 2, 4.4, 3.6, sharey=True)
    labels = {
        "num_parameters": "parameters",
        "num_other_parameters": "parameters without the token table",
    }
    for axis, (column, words) in zip(axes[0], labels.items(), strict=True):
        _curves(axis, table, column, _limits(table))
        axis.set_xlabel(words)
        axis.set_xscale("linear")
        axis.xaxis.set_major_formatter(lambda v, _: f"{v / 1e6:.2f}M")
    return figure
