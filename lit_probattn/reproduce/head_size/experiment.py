"""Perplexity against the number of heads, under both rules for the head size.

Every point is an ordinary run of the command line (`fit`, then `test` of its last checkpoint) and
leaves one result file; a point whose file is there is not run again, and an interrupted one goes on
from its newest checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_probattn.analysis.results import Results
from lit_probattn.cli.app import main as run_command
from lit_probattn.configs import read_yaml
from lit_probattn.records.provenance import replace_text
from lit_probattn.records.tables import markdown_table, panels
from lit_probattn.reproduce.head_size.grid import Grid, GridError, Point
from lit_probattn.training.checkpoints import list_checkpoints, load_checkpoint
from lit_probattn.training.run_folder import versions_of

_NAMES = {
    "standard": "head size d / h",
    "fixed": "fixed head size",
    "matched_mlp": "d / h, MLP matched (M1)",
    "matched_width": "d / h, width matched (M2)",
    "head_size": "head size varied",
}


@dataclass(frozen=True)
class Place:
    """Where data lie and results go.

    Args:
        data_dir, cache_dir: folders of the data; None for their defaults.
        runs: folder of the runs.
        accelerator: Lightning's name of the hardware.
    """

    data_dir: str | None
    cache_dir: str | None
    runs: Path
    accelerator: str


def common_arguments(grid: Grid, point: Point, place: Place) -> list[str]:
    """Files and flags of a point, without the subcommand."""
    flags: dict[str, Any] = {
        **grid.flags,
        "seed_everything": point.seed,
        "model.init_args.embed_dim": point.embed_dim,
        "model.init_args.mlp_dim": point.mlp_dim,
        "model.init_args.head_dim": point.head_dim,
        "model.init_args.attention.init_args.num_heads": point.num_heads,
        "run.root": str(place.runs),
        "run.name": point.name,
        "trainer.accelerator": place.accelerator,
        "trainer.devices": 1,
        "trainer.enable_progress_bar": False,
    }
    folders = {"data_dir": place.data_dir, "cache_dir": place.cache_dir}
    flags |= {f"data.init_args.{k}": v for k, v in folders.items() if v is not None}
    words = [w for name, value in flags.items() for w in (f"--{name}", _text(value))]
    return ["--config", grid.task, "--config", grid.attention, *words]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def result_path(point: Point, place: Place) -> Path:
    """The result file of a point."""
    return place.runs / "results" / f"{point.name}.json"


def run_point(grid: Grid, point: Point, place: Place) -> dict[str, Any]:
    """Train and test one point, or read its result.

    Raises:
        GridError: a command failed.
    """
    path = result_path(point, place)
    if path.is_file():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    common = common_arguments(grid, point, place)
    for part, checkpoint in (("fit", "auto"), ("test", "last")):
        print(f"{point.name}: {part}", flush=True)
        status = run_command([part, *common, "--ckpt_path", checkpoint])
        if status:
            raise GridError(f"{point.name}: {part} ended with status {status}")
    result = _read_run(place.runs, point.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(result, indent=2))
    return result


def _read_run(root: Path, name: str) -> dict[str, Any]:
    """Perplexity, parameters and steps of a finished run."""
    version = versions_of(root, name)[0]
    newest = list_checkpoints(version / "checkpoints", "step")[0]
    state = load_checkpoint(newest)
    weights = {k: v for k, v in state["state_dict"].items() if k.startswith("model.")}
    results = sorted(version.glob("test-*.json"), key=lambda p: p.stat().st_mtime)
    scores = json.loads(results[-1].read_text())
    scores = scores.get("metrics", scores)
    metric, value = perplexity_of(scores)
    table = weights["model.tokens.weight"].numel()
    total = sum(v.numel() for v in weights.values())
    return {
        "metric": metric,
        "perplexity": value,
        "num_parameters": total,
        "num_other_parameters": total - table,
        "steps": int(state["global_step"]),
    }


def perplexity_of(scores: dict[str, Any]) -> tuple[str, float]:
    """Name and value of the perplexity among test results: of tokens, or of hidden words.

    Raises:
        GridError: there is none.
    """
    for name, value in scores.items():
        if name.startswith("test/ppl_"):
            return name, float(value)
        if name == "test/mlm_loss":
            return "exp(test/mlm_loss)", math.exp(float(value))
    raise GridError(f"no test/ppl_* and no test/mlm_loss among {', '.join(scores)}")


def read_sizes(grid: Grid, place: Place) -> tuple[int, int]:
    """Layers and rows of the token table, which matching by width needs.

    The table's rows are the task's `vocab_size`; without one, those of the first finished run.

    Raises:
        GridError: matching by width is asked for, and the rows are not known yet.
    """
    task = read_yaml(grid.task)
    layers = grid.flags.get(
        "model.init_args.num_layers", task["model"]["init_args"].get("num_layers")
    )
    rows = task["data"]["init_args"].get("vocab_size")
    if rows is None:
        for path in sorted(place.runs.glob("h*/*/checkpoints")):
            newest = list_checkpoints(path, "step")
            if newest:
                state = load_checkpoint(newest[0])["state_dict"]
                rows = len(state["model.tokens.weight"])
                break
    if rows is None and grid.matched_width_heads:
        raise GridError("no run has finished yet, so the vocabulary's size is not known")
    return int(layers), int(rows or 1)


def run_grid(grid: Grid, place: Place, shard: tuple[int, int] = (0, 1)) -> pd.DataFrame:
    """Run a grid, or every k-th model of it; return the rows that are finished."""
    first = Grid(**{**vars(grid), "matched_width_heads": ()})
    done = 0
    for stage in (first, grid):
        layers, rows = read_sizes(stage, place)
        models = {point.model: point for point in stage.points(layers, rows)}
        for number, point in enumerate(models.values()):
            if number % shard[1] == shard[0]:
                run_point(grid, point, place)
                done += 1
    return table_of(grid, place)


def table_of(grid: Grid, place: Place) -> pd.DataFrame:
    """Rows of all finished points."""
    layers, size = read_sizes(grid, place)
    rows = []
    for point in grid.points(layers, size):
        path = result_path(point, place)
        if path.is_file():
            rows.append({**vars(point), **json.loads(path.read_text())})
    return pd.DataFrame(rows)


def plan(points: Sequence[Point]) -> list[str]:
    """Lines that list the models of a grid."""
    return [f"{p.rule:14} {p.name}" for p in points]


# ---- the experiment ----------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `python -m lit_probattn.head_size experiment`."""
    add = parser.add_argument
    add("--grid", type=Path, required=True, help="a file of configs/reproduce")
    add("--data_dir", help="folder of the text (or LIT_PROBATTN_DATA)")
    add("--cache_dir", help="folder of the caches (or LIT_PROBATTN_CACHE)")
    add("--runs", type=Path, default=Path("runs/head_size"), help="folder of the runs")
    add("--out", type=Path, required=True, help="folder of the results")
    add("--accelerator", default="auto", help="Lightning's name: auto, cpu, gpu")
    add("--shard", default="0/1", help="I/N: every N-th model from the I-th")
    add("--report", action="store_true", help="train nothing, write what is finished")


def run(options: argparse.Namespace) -> None:
    """Run the grid and write table, figures and text.

    Raises:
        GridError: the grid or the shard is malformed, or nothing is finished.
    """
    grid = Grid.read(options.grid)
    place = Place(options.data_dir, options.cache_dir, options.runs, options.accelerator)
    number, _, count = options.shard.partition("/")
    if not (number.isdigit() and count.isdigit() and int(number) < int(count)):
        raise GridError(f"--shard takes I/N with I below N, received {options.shard!r}")
    if options.report:
        table = table_of(grid, place)
    else:
        table = run_grid(grid, place, (int(number), int(count)))
    if table.empty:
        raise GridError("no model of the grid is finished")
    results = Results(options.out, "head_size", options.command)
    results.table(table)
    results.figure(draw_heads(table, grid))
    results.figure(draw_parameters(table), "parameters")
    columns = ["rule", "num_heads", "head_dim", "embed_dim", "mlp_dim", "num_parameters"]
    shown = table.groupby(columns, sort=False)["perplexity"].agg(["mean", "std", "count"])
    body = (
        f"Grid {options.grid.name}: task {grid.task}, {table['steps'].iloc[0]} steps, "
        f"{table['seed'].nunique()} seeds; metric {table['metric'].iloc[0]}. `standard`: head size "
        f"d / h; `fixed`: head size {grid.head_dim}; `matched_mlp` and `matched_width`: heads of "
        "size d / h, parameters of the fixed model by a wider MLP (rule M1) or embedding (M2).\n\n"
        f"{markdown_table(shown.reset_index())}"
    )
    results.text("Perplexity against the number of heads", [], body)


def _curves(axis: Axes, table: pd.DataFrame, column: str) -> None:
    for number, rule in enumerate(dict.fromkeys(table["rule"])):
        points = table[table["rule"] == rule].groupby(column)["perplexity"]
        means = points.mean()
        spread = points.std().fillna(0.0)
        axis.errorbar(
            *(means.index, means, spread),
            marker="o",
            ms=4,
            lw=1.3,
            capsize=2,
            color=f"C{number}",
            label=_NAMES[str(rule)],
        )
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    axis.set_ylabel("test perplexity")
    axis.grid(color="0.9", lw=0.6)
    axis.legend(fontsize=8, frameon=False)


def draw_heads(table: pd.DataFrame, grid: Grid) -> Figure:
    """Draw perplexity against the number of heads (LRB-F1), and against varied head sizes."""
    varied = table[table["rule"] == "head_size"]
    figure, axes = panels(1, 1 if varied.empty else 2, 5.0, 3.8)
    _curves(axes[0][0], table[table["rule"] != "head_size"], "num_heads")
    axes[0][0].set_xlabel(f"heads (width {grid.embed_dim}; fixed head size {grid.head_dim})")
    if not varied.empty:
        _curves(axes[0][1], varied, "head_dim")
        axes[0][1].set_xlabel(f"head size at {grid.head_sizes_heads} heads")
    return figure


def draw_parameters(table: pd.DataFrame) -> Figure:
    """Draw perplexity against all parameters and those beside the token table (LRB-F2)."""
    figure, axes = panels(1, 2, 4.4, 3.6, sharey=True)
    _curves(axes[0][0], table, "num_parameters")
    axes[0][0].set_xlabel("parameters")
    _curves(axes[0][1], table, "num_other_parameters")
    axes[0][1].set_xlabel("parameters without the token table")
    for axis in axes[0]:
        axis.set_xscale("linear")
        axis.xaxis.set_major_formatter(lambda v, _: f"{v / 1e6:.2f}M")
    return figure
