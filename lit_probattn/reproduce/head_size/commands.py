"""What the subcommands of `python -m lit_probattn.head_size` do."""

from __future__ import annotations

import argparse

import pandas as pd
import torch
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_probattn.analysis.head_size import theory as theorems
from lit_probattn.analysis.head_size.theorem import attention_map, counter_example, unreachable
from lit_probattn.analysis.results import Results, markdown_table, panels
from lit_probattn.attention import SoftmaxAttention
from lit_probattn.convert.to_mgk import ConversionError, find_layers, restore_layer
from lit_probattn.convert.wider_heads import embed_into_head_size
from lit_probattn.reproduce.head_size.experiment import Place, run_grid, table_of
from lit_probattn.reproduce.head_size.grid import Grid, GridError
from lit_probattn.training.checkpoints import load_checkpoint, save_checkpoint

# What belongs to the run that wrote the checkpoint and not to the new weights.
_DROPPED = ("loops", "callbacks", "MixedPrecision", "training", "optimizer_states", "lr_schedulers")


# ---- theorems ----------------------------------------------------------------------------------


def theory(options: argparse.Namespace) -> None:
    """Run the theorems and write tables, figure and text."""
    results = Results(options.out, "theory", options.command)
    construction = theorems.construction_table()
    thresholds = theorems.threshold_table()
    divergence = theorems.divergence_table()
    results.table(construction, "theorem1")
    results.table(thresholds, "thresholds")
    results.table(divergence)
    results.figure(theorems.draw_divergence(divergence))
    inputs, weights, column = counter_example()
    scan = torch.linspace(-30, 30, 601, dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    errors = [float((attention_map(w * one, one, inputs) - weights).abs().max()) for w in scan]
    parts = [
        "Theorem 1, constructed in float64 (P: softmax of 3 · N(0, 1), X of width 2n): largest "
        "error of an entry of the map. Head size n − 1 is as good as n, which the paper asks for.",
        markdown_table(construction, digits=2),
        "Least head size of random maps: the rank of C log P without a mask, and the least rank of "
        "a completion under a causal mask. The paper's rule is n.",
        markdown_table(thresholds),
        f"Counter-example (d = 1, n = 2): the second column is ({column[0]}, {column[1]}) for "
        f"every weight, the error at least {min(errors):.2f} over {len(scan)} weights; certificate "
        f"‖C (log P) U‖ = {unreachable(inputs, weights):.3f}.",
        "Mean divergence of fitted heads from random maps (figure): zero from n − 1 on, where the "
        "truncated factors are exact; at the causal threshold it is what L-BFGS leaves.",
        markdown_table(divergence, digits=2),
    ]
    if options.strictness:
        strict = theorems.strictness_table(steps=options.steps)
        results.table(strict, "theorem2")
        parts += [
            f"Theorem 2: relative squared errors of layers with 4 heads of several sizes, fitted "
            f"to one with d = 8, d_p = 4 ({options.steps} steps, 3 seeds). Size 2 = d / h is the "
            "standard layer. A floor of the optimiser, not a proof.",
            markdown_table(strict, digits=2),
        ]
    results.text("Fixed head size: what a head can represent", [], "\n\n".join(parts))


# ---- enlarging heads ---------------------------------------------------------------------------


def embed(options: argparse.Namespace) -> None:
    """Write a checkpoint whose softmax layers have larger heads and compute the same.

    Raises:
        GridError: the checkpoint or the sizes do not fit.
    """
    config_file = options.output.with_suffix(".yaml")
    for path in (options.output, config_file):
        if path.exists():
            raise GridError(f"{path} exists: choose another name or remove it")
    checkpoint = load_checkpoint(options.checkpoint)
    parameters = dict(checkpoint.get("hyper_parameters", {}))
    head_dim = options.from_head_dim or parameters.get("head_dim")
    if head_dim is None:
        raise GridError("the head size is not known: give --from_head_dim")
    state = dict(checkpoint.get("state_dict", {}))
    try:
        names = find_layers(state)
        for number, name in enumerate(names):
            layer = restore_layer(state, name, head_dim)
            wide = embed_into_head_size(
                layer, options.head_dim, padding_std=options.padding_std, seed=number
            )
            prefix = f"{name}." if name else ""
            state.update({f"{prefix}{k}": v.clone() for k, v in wide.state_dict().items()})
    except (ConversionError, ValueError) as error:
        raise GridError(str(error)) from error
    kept = {k: v for k, v in checkpoint.items() if k not in _DROPPED}
    parameters["head_dim"] = options.head_dim
    new = {**kept, "state_dict": state, "hyper_parameters": parameters, "global_step": 0}
    save_checkpoint(
        {**new, "epoch": 0, "optimizer_states": [], "lr_schedulers": []}, options.output
    )
    config = {"model": {"init_args": {"head_dim": options.head_dim}}}
    config_file.write_text(yaml.safe_dump(config))
    print(f"{len(names)} layers: head size {head_dim} -> {options.head_dim}")
    print(f"wrote {options.output} and {config_file}")


def same_function(layer: SoftmaxAttention, wide: SoftmaxAttention, x: torch.Tensor) -> float:
    """Return the relative difference of two layers' outputs on inputs (B, N, C)."""
    with torch.no_grad():
        exact = layer(x)
        return float((wide(x) - exact).norm() / exact.norm())


# ---- the experiment ----------------------------------------------------------------------------


def experiment(options: argparse.Namespace) -> None:
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


_NAMES = {
    "standard": "head size d / h",
    "fixed": "fixed head size",
    "matched_mlp": "d / h, MLP matched (M1)",
    "matched_width": "d / h, width matched (M2)",
    "head_size": "head size varied",
}


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
