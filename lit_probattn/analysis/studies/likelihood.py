"""Negative log-likelihood of queries under the mixture that a layer's keys make.

Source: MGK, ICML 2022, section 3.4 (specification g.5), which does not define it. Reported, with
priors normalised and L the keys that a query may see:
    kernel_nll   −log( 1/L Σ_j Σ_r π_r exp(−‖q − k_jr‖² / 2σ_r²) )
    density_nll  the same with each Gaussian divided by (2π σ_r²)^(E/2)
and both divided by the head size E. Means over real queries, heads and samples. Softmax attention
counts as one Gaussian per key with σ² = √E, MGK's baseline.
"""

from __future__ import annotations

import argparse
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from lit_probattn.analysis.options import add_data_arguments, add_model_arguments
from lit_probattn.analysis.recording import LayerCall
from lit_probattn.analysis.results import AnalysisError, Results, describe
from lit_probattn.analysis.sampling import layer_numbers, sequences
from lit_probattn.analysis.studies.mixtures import log_kernel, mixture
from lit_probattn.records.rows import RowStore
from lit_probattn.records.tables import markdown_table, panels
from lit_probattn.training.trained import Trained, identity, open_trained

_COLUMNS = ("kernel_nll", "density_nll", "kernel_nll_per_dim", "density_nll_per_dim")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_model_arguments(parser)
    add_data_arguments(parser, num_samples=64, max_len=1024)


def run(options: argparse.Namespace) -> None:
    """Compute and write."""
    trained = open_trained(options)
    if not any(layer.core.has_gaussians for layer in trained.layers.values()):
        raise AnalysisError(
            "no layer is a mixture of Gaussians: query likelihood needs MGKAttention, or "
            "SoftmaxAttention (one Gaussian per key)"
        )
    results = Results(options.out, "query_likelihood", options.command)
    rows = likelihood_rows(trained, options, results)
    table = layer_means(rows)
    results.table(table)
    results.figure(draw(table))
    means = table.groupby("layer")[list(_COLUMNS)].mean().reset_index()
    body = (
        f"Negative log-likelihood of queries in nats, {rows['sample'].nunique()} samples of the "
        f"{options.split} split, {int(rows['num_queries'].sum())} queries x layers. Mean over "
        f"heads:\n\n{markdown_table(means)}"
    )
    results.text("Likelihood of queries", describe(trained), body)


@torch.no_grad()
def query_nll(call: LayerCall) -> dict[str, Tensor]:
    """Return the negative log-likelihood of every query of a call, by name, (S, H, N) each.

    Queries that may see nothing are NaN.
    """
    parts = mixture(call)
    allowed = call.allowed()
    count = allowed.sum(-1).to(parts.query.dtype)
    found = {}
    for name, density in (("kernel_nll", False), ("density_nll", True)):
        values = log_kernel(parts, density=density).masked_fill(~allowed, float("-inf"))
        nll = count.log() - values.logsumexp(-1)
        found[name] = nll.masked_fill(count == 0, float("nan"))
        found[f"{name}_per_dim"] = found[name] / parts.query.shape[-1]
    return found


def likelihood_rows(
    trained: Trained, options: argparse.Namespace, results: Results
) -> pd.DataFrame:
    """Return a row per layer, sequence and head, with means over its queries."""
    flags = ("split", "num_samples", "max_len", "seed")
    settings = {k: getattr(options, k) for k in flags}
    settings |= {"study": "query_likelihood", "model": identity(trained)}
    store = RowStore(results.path("partial.jsonl"), settings, ("layer", "sample", "part", "head"))
    numbers = layer_numbers(list(trained.layers))
    for batch in sequences(trained, options):
        for one in batch:
            key = {"layer": numbers[one.layer], "sample": one.sample_id, "part": one.part}
            last = one.call.layer.num_heads - 1
            if not one.call.layer.core.has_gaussians or store.has(**key, head=last):
                continue
            nll = {name: values[0] for name, values in query_nll(one.call).items()}
            for head in range(one.call.layer.num_heads):
                row: dict[str, Any] = {**key, "head": head}
                row["num_queries"] = int(nll["kernel_nll"][head].isfinite().sum())
                row |= {n: float(values[head].nanmean()) for n, values in nll.items()}
                store.add(row)
    return store.finish()


def layer_means(rows: pd.DataFrame) -> pd.DataFrame:
    """Return means over queries per layer and head."""
    weighted = rows[list(_COLUMNS)].mul(rows["num_queries"], axis=0)
    keys = [rows["layer"], rows["head"]]
    means = weighted.groupby(keys).sum().div(rows["num_queries"].groupby(keys).sum(), axis=0)
    return means.reset_index()


def draw(table: pd.DataFrame) -> Figure:
    """Draw the kernel and density values, a dot per head."""
    figure, axes = panels(1, 2, 4.0, 3.0)
    for axis, column in zip(axes[0], ("kernel_nll", "density_nll_per_dim"), strict=True):
        for layer, part in table.groupby("layer"):
            axis.plot([layer] * len(part), part[column], "o", ms=5, alpha=0.6, color="#3b6ea5")
            axis.plot([layer], [part[column].mean()], "_", ms=22, color="black")
        axis.set_xticks(sorted(table["layer"].unique()))
        axis.set(xlabel="layer", ylabel="nats per dimension" if "dim" in column else "nats")
        axis.set_xlim(table["layer"].min() - 0.5, table["layer"].max() + 0.5)
        axis.set_title("density, per dimension" if "dim" in column else "kernel", fontsize=9)
    figure.supxlabel("dots: heads, dashes: mean", fontsize=8)
    return figure
