"""Ranks of a trained model's logits, and its metric with logits of lower rank.

Source: "Low-Rank Bottleneck in Multi-head Attention Models" (Bhojanapalli et al., 2020), and
diagnostics D1 to D6 of the specification. A head of size E has logits of rank at most E before the
mask; this study measures how much of it a model uses: effective, stable and energy ranks of centred
logits, also over E. The demand curve: all layers' logits, or one layer's, are replaced by their
best approximation of rank r, then masked and normalised, and the outputs passed on. The rank of the
maps themselves is given too; it says nothing about the bottleneck. Works for variants whose maps
are a softmax of scores.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from lit_probattn.analysis.approximation.layers import Opened, replaced_cores
from lit_probattn.analysis.approximation.measure import score
from lit_probattn.analysis.head_size.ranks import diagnose, map_rank, recovered_rank, truncate
from lit_probattn.analysis.options import add_data_arguments, add_model_arguments
from lit_probattn.analysis.recording import in_double
from lit_probattn.analysis.results import AnalysisError, Results, describe
from lit_probattn.analysis.sampling import layer_numbers, sequences
from lit_probattn.attention.functional import masked_softmax
from lit_probattn.records.rows import RowStore
from lit_probattn.records.tables import markdown_table, panels
from lit_probattn.training.trained import Trained, identity, open_trained

STUDY = "logit_ranks"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_model_arguments(parser)
    add_data_arguments(parser, num_samples=20, max_len=512)
    add = parser.add_argument
    add("--demand_samples", type=int, default=32, help="samples of the demand curve; 0 for none")
    add("--ranks", nargs="+", type=int, help="r of the demand curve; default: powers of 2 up to E")


def run(options: argparse.Namespace) -> None:
    """Compute and write."""
    if options.demand_samples < 0 or min(options.ranks or [1]) < 1:
        raise AnalysisError("--demand_samples must be at least 0 and --ranks at least 1")
    trained = open_trained(options)
    results = Results(options.out, STUDY, options.command)
    table = pd.DataFrame(rank_rows(trained, options))
    results.table(table)
    columns = [c for c in table.columns if c not in ("layer", "head", "sample", "num_tokens")]
    means = table.groupby("layer")[columns].mean().reset_index()
    results.figure(draw_ranks(table))
    parts = [
        f"Logits before the mask, {table['sample'].nunique()} sequences of the {options.split} "
        f"split, {len(table)} maps; means per layer. Head size {int(table['head_dim'].iloc[0])}. "
        "`rank` and `centred_rank`: above N · eps · σ₁ in float64. `map_rank`: singular values of "
        "the map above 1e-6, which is no measure of the bottleneck. `recovered_rank`: of the "
        "centred logarithms of the map (maps without a causal mask only).",
        markdown_table(means),
    ]
    if options.demand_samples:
        demand = demand_rows(trained, options, results)
        results.table(demand, "demand")
        results.figure(draw_demand(demand), "demand")
        wide = demand.pivot_table(index="rank", columns="scope", values="value", sort=False)
        metric, exact = demand["metric"].iloc[0], demand["exact"].iloc[0]
        parts += [
            f"Demand curve: {metric} over {demand['words'].iloc[0]} words with logits of rank r; "
            f"exact: {exact:.4g}.",
            markdown_table(wide.reset_index()),
        ]
    results.text("Ranks of logits", describe(trained), "\n\n".join(parts))


def rank_rows(trained: Trained, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row per sequence, layer and head."""
    rows = []
    layers = {name: in_double(layer) for name, layer in trained.layers.items()}
    numbers = layer_numbers(list(layers))
    for batch in sequences(trained, options, min_len=2):
        for one in batch:
            call = one.call.double(layers[one.layer])
            heads = call.call()
            masks, logits = heads.masks, call.layer.core.scores(heads)[0].detach()
            weights = call.weights()[0]
            _require_softmax(logits, weights, masks, one.layer)
            found: dict[str, Tensor] = diagnose(logits) | {"map_rank": map_rank(weights)}
            if not call.is_causal:
                found["recovered_rank"], found["clamped"] = recovered_rank(weights)
            size = call.layer.head_dim
            for head in range(len(logits)):
                values = {name: float(value[head]) for name, value in found.items()}
                relative = values["effective_rank"] / size
                row: dict[str, Any] = {
                    "layer": numbers[one.layer],
                    "head": head,
                    "sample": one.sample_id,
                }
                row |= {"num_tokens": logits.shape[-2], "head_dim": size, **values}
                rows.append({**row, "relative_effective_rank": relative})
    return rows


def _require_softmax(logits: Tensor, weights: Tensor, masks: Any, name: str) -> None:
    allowed = masks.allowed(masks.all_rows, range(masks.num_keys), logits.device)
    expected = masked_softmax(logits, None if allowed is None else allowed[0])
    if not torch.allclose(expected, weights, atol=1e-6):
        raise AnalysisError(
            f"{name}: its maps are no softmax of its scores, so ranks of logits mean nothing here"
        )


def demand_rows(trained: Trained, options: argparse.Namespace, results: Results) -> pd.DataFrame:
    """Return a row per scope and rank: the metric with logits of that rank."""
    names = list(trained.layers)
    size = max(layer.head_dim for layer in trained.layers.values())
    ranks = options.ranks or [2**i for i in range(12) if 2**i <= size]
    settings = {"study": STUDY, "model": identity(trained), "split": options.split}
    settings |= {"demand_samples": options.demand_samples, "seed": options.seed}
    store = RowStore(results.path("partial.jsonl"), settings, ("scope", "rank"))

    def batches() -> Iterator[dict[str, Any]]:
        return trained.batches(
            options.split, options.demand_samples, seed=options.seed, rows=options.batch_size
        )

    exact = score(trained.task, batches())
    scopes = [("all", names), *((f"layer {i}", [name]) for i, name in enumerate(names, 1))]
    for scope, chosen in scopes:
        for rank in ranks:
            if store.has(scope=scope, rank=rank):
                continue
            layers = {name: trained.layers[name] for name in chosen}
            with torch.no_grad(), replaced_cores(layers, partial(truncated_output, rank=rank)):
                found = score(trained.task, batches())
            row = {"scope": scope, "rank": rank, "metric": found.metric, "value": found.value}
            store.add({**row, "exact": exact.value, "words": found.count})
            print(f"{scope} rank {rank}: {found.value:.3f}", flush=True)
    return store.finish()


def truncated_output(opened: Opened, rank: int) -> Tensor:
    """Return heads' outputs with logits of rank `rank`, (B, H, N, E_v)."""
    logits = opened.layer.core.scores(opened.call)
    weights = masked_softmax(truncate(logits.float(), rank), opened.allowed)
    return weights.to(opened.value.dtype) @ opened.value


def draw_ranks(table: pd.DataFrame) -> Figure:
    """Draw effective, stable and 90 % ranks per layer, a dot per head."""
    names = {"effective_rank": "effective", "stable_rank": "stable", "energy_90": "90 % of energy"}
    figure, axes = panels(1, 1, 5.0, 3.4)
    axis = axes[0][0]
    heads = table.groupby(["layer", "head"])[list(names)].mean().reset_index()
    for number, (column, label) in enumerate(names.items()):
        place = heads["layer"] + 0.15 * (number - 1)
        axis.plot(place, heads[column], "o", ms=4, alpha=0.6, color=f"C{number}", label=label)
    size = int(table["head_dim"].iloc[0])
    axis.axhline(size, color="black", lw=1, ls="--", label=f"head size {size}")
    axis.set_xticks(sorted(table["layer"].unique()))
    axis.set_xlabel("layer (a dot per head)")
    axis.set_ylabel("rank of centred logits")
    axis.set_ylim(0)
    axis.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def draw_demand(table: pd.DataFrame) -> Figure:
    """Draw the metric against the rank of logits (LRB-F4)."""
    figure, axes = panels(1, 1, 5.0, 3.4)
    axis = axes[0][0]
    for scope in dict.fromkeys(table["scope"]):
        part = table[table["scope"] == scope]
        width = 2.0 if scope == "all" else 1.0
        axis.plot(part["rank"], part["value"], marker="o", ms=4, lw=width, label=scope)
    axis.axhline(table["exact"].iloc[0], color="0.5", lw=1, ls="--", label="exact")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    axis.set_xlabel("rank of logits")
    axis.set_ylabel(str(table["metric"].iloc[0]))
    axis.grid(color="0.9", lw=0.6)
    axis.legend(fontsize=8, frameon=False)
    return figure
