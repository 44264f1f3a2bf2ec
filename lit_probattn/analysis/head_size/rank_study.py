"""Ranks of the logits of a trained model, and its metric with logits of lower rank.

Source: "Low-Rank Bottleneck in Multi-head Attention Models" (Bhojanapalli et al., 2020). A head of
size E has logits of rank at most E before the mask; this study measures how much of it a model
uses: effective, stable and energy ranks of centred logits, also relative to E. For the demand
curve, the logits of all layers, or of one, are replaced by their best approximation of rank r, then
masked and normalised, and the outputs are passed on. The rank of the maps is also reported, but is
no measure of the bottleneck. Supported are variants whose maps are a softmax of scores.
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

from lit_probattn.analysis.approximation.figures import least_within
from lit_probattn.analysis.approximation.layers import Opened, replaced_cores
from lit_probattn.analysis.approximation.measure import score
from lit_probattn.analysis.drawing import label, powers_of_two
from lit_probattn.analysis.head_size.ranks import diagnose, map_rank, recovered_rank, truncate
from lit_probattn.analysis.recording import visible
from lit_probattn.analysis.study import ModelStudy
from lit_probattn.attention import HeadCall
from lit_probattn.attention.numerics import masked_softmax
from lit_probattn.base.arguments import at_least
from lit_probattn.base.errors import ConfigError
from lit_probattn.records.figures import panels
from lit_probattn.records.tables import markdown_table, span


class LogitRanks(ModelStudy):
    """Ranks of the logits of all maps, and the demand curve."""

    name, title = "logit_ranks", "Ranks of logits"
    samples = (20, 512)

    @staticmethod
    def _add_options(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        text = "samples of the demand curve, 0 for none"
        add("--demand_samples", type=at_least(0), default=32, help=text)
        text = "r of the demand curve; default: powers of 2 up to E"
        add("--ranks", type=at_least(1), nargs="+", help=text)

    def _compute(self) -> str:
        options, results = self.options, self.results
        table = pd.DataFrame(self.rows())
        results.table(table)
        columns = [c for c in table.columns if c not in ("layer", "head", "sample", "num_tokens")]
        means = table.groupby("layer")[columns].mean().reset_index()
        size = int(table["head_dim"].iloc[0])
        ranks = span(means["effective_rank"], ".1f")
        claim = f"Effective rank of the centred logits by layer: {ranks}, with head size {size}"
        results.figure(draw_ranks(table), claim)
        parts = [
            f"Logits before the mask, {table['sample'].nunique()} sequences of the "
            f"{options.split} split, {len(table)} maps; means per layer. Head size "
            f"{int(table['head_dim'].iloc[0])}. `rank` and `centred_rank`: above N · eps · σ₁ in "
            "float64. `map_rank`: singular values of the map above 1e-6, which does not measure "
            "the bottleneck. `recovered_rank`: rank of the centred logarithms of the map (only "
            "for maps without a causal mask), over the maps without weights below 1e-30; "
            "`clamped`: share of the others.",
            markdown_table(means),
        ]
        if options.demand_samples:
            demand = self.demand()
            results.table(demand, "demand")
            results.figure(draw_demand(demand), demand_claim(demand), "demand")
            wide = demand.pivot_table(index="rank", columns="scope", values="value", sort=False)
            metric, exact = demand["metric"].iloc[0], demand["exact"].iloc[0]
            parts += [
                f"Demand curve: {metric} over {demand['words'].iloc[0]} predictions with logits of "
                f"rank r; exact: {exact:.4g}.",
                markdown_table(wide.reset_index()),
            ]
        return "\n\n".join(parts)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per sequence, layer and head."""
        rows = []
        for one in self.sequences(double=True, min_len=2):
            heads, weights = one.call.call(), one.call.weights()[0]
            logits, size = one.call.layer.core.scores(heads)[0].detach(), one.call.layer.head_dim
            _require_softmax(heads, logits, weights, one.layer)
            found: dict[str, Tensor] = diagnose(logits) | {"map_rank": map_rank(weights)}
            if not one.call.is_causal:
                recovered, clamped = recovered_rank(weights)
                found["recovered_rank"] = recovered.double().masked_fill(clamped, float("nan"))
                found["clamped"] = clamped
            for head in range(len(logits)):
                row: dict[str, Any] = {"layer": self.numbers[one.layer], "head": head + 1}
                row |= {"sample": one.sample_id, "num_tokens": logits.shape[-2], "head_dim": size}
                row |= {name: float(value[head]) for name, value in found.items()}
                rows.append({**row, "relative_effective_rank": row["effective_rank"] / size})
        return rows

    def demand(self) -> pd.DataFrame:
        """Return a row per scope and rank: the metric with logits of that rank."""
        options, task = self.options, self.trained.task
        size = max(layer.head_dim for layer in self.layers.values())
        ranks = options.ranks or [2**i for i in range(12) if 2**i <= size]
        store = self.store(("scope", "rank"), "split", "demand_samples", "seed")

        def batches() -> Iterator[dict[str, Any]]:
            count, rows = options.demand_samples, options.batch_size
            return self.trained.batches(options.split, count, seed=options.seed, rows=rows)

        exact = score(task, batches())
        alone = {f"layer {i}": {name: self.layers[name]} for name, i in self.numbers.items()}
        scopes = {"all": self.layers, **alone}
        for scope, layers in scopes.items():
            for rank in ranks:
                if store.has(scope=scope, rank=rank):
                    continue
                with torch.no_grad(), replaced_cores(layers, partial(truncated_output, rank=rank)):
                    found = score(task, batches())
                row = {"scope": scope, "rank": rank, "metric": found.metric, "value": found.value}
                store.add({**row, "exact": exact.value, "words": found.count})
                print(f"{scope} rank {rank}: {found.value:.3f}", flush=True)
        return store.finish({"scope": scope, "rank": rank} for scope in scopes for rank in ranks)


def _require_softmax(call: HeadCall, logits: Tensor, weights: Tensor, name: str) -> None:
    seen = visible(call)
    expected = masked_softmax(logits, None if seen is None else seen[0])
    if not torch.allclose(expected, weights, atol=1e-6):
        raise ConfigError(
            f"{name}: its maps are not a softmax of scores, so ranks of logits are not defined"
        )


def truncated_output(opened: Opened, rank: int) -> Tensor:
    """Return the outputs of heads with logits of rank `rank`, (B, H, N, E_v).

    The rank is that of each sample's logits without padding.
    """
    logits, keys = opened.layer.core.scores(opened.call), opened.seen.key_mask
    real = None if keys is None else opened.seen.real[:, None, :, None] & keys[:, None, None]
    weights = masked_softmax(truncate(logits.float(), rank, real), opened.allowed)
    return weights.to(opened.value.dtype) @ opened.value


def demand_claim(table: pd.DataFrame) -> str:
    """Return the smallest rank, in all layers, from which the metric is within 5 % of exact."""
    whole = table[table["scope"] == "all"].sort_values("rank")
    metric, exact = whole["metric"].iloc[0], float(whole["exact"].iloc[0])
    rank = least_within(whole, "rank")
    if rank is None:
        last = whole.iloc[-1]
        return f"Logits of rank {last['rank']}: {metric} {last['value']:.4g}, exact {exact:.4g}"
    return (
        f"From rank {rank} of the logits in all layers, the {metric} is within 5 % of the exact "
        f"one, {exact:.4g}"
    )


def draw_ranks(table: pd.DataFrame) -> Figure:
    """Draw effective, stable and 90 % ranks per layer, one dot per head."""
    names = {"effective_rank": "effective", "stable_rank": "stable", "energy_90": "90 % of energy"}
    figure, ((axis,),) = panels(1, 1, 5.0, 3.4)
    heads = table.groupby(["layer", "head"])[list(names)].mean().reset_index()
    for number, (column, name) in enumerate(names.items()):
        place = heads["layer"] + 0.15 * (number - 1)
        axis.plot(place, heads[column], "o", ms=4, alpha=0.6, color=f"C{number}", label=name)
    size = int(table["head_dim"].iloc[0])
    axis.axhline(size, color="black", lw=1, ls="--", label=f"head size {size}")
    axis.set_xticks(sorted(table["layer"].unique()))
    label(axis, "layer (a dot per head)", "rank of centred logits", grid=False)
    axis.set_ylim(0)
    axis.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def draw_demand(table: pd.DataFrame) -> Figure:
    """Draw the metric against the rank of logits."""
    figure, ((axis,),) = panels(1, 1, 5.0, 3.4)
    for scope in dict.fromkeys(table["scope"]):
        part = table[table["scope"] == scope]
        width = 2.0 if scope == "all" else 1.0
        axis.plot(part["rank"], part["value"], marker="o", ms=4, lw=width, label=scope)
    axis.axhline(table["exact"].iloc[0], color="0.5", lw=1, ls="--", label="exact")
    powers_of_two(axis)
    label(axis, "rank of logits", str(table["metric"].iloc[0]), legend=8)
    return figure
