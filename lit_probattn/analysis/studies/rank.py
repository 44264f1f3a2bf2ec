"""Rank distribution of attention maps, per layer.

Source: MGK, ICML 2022, figures 2 (right) and 7 (specification g.4): maps drawn at random over
samples and heads; the rank is the number of singular values of at least 1e-6. Maps are computed in
float64 from what the layers saw, after the softmax and before dropout, and end with the last real
token; --padded keeps the padding. --full is the paper's protocol: 1000 maps per layer, whole
sequences. An interrupted study goes on where it stopped.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from lit_probattn.analysis.options import add_data_arguments, add_model_arguments
from lit_probattn.analysis.recording import in_double
from lit_probattn.analysis.results import AnalysisError, Results, describe
from lit_probattn.analysis.sampling import generator, layer_numbers, sequences
from lit_probattn.records.rows import RowStore
from lit_probattn.records.tables import markdown_table, panels
from lit_probattn.training.trained import Trained, identity, open_trained

THRESHOLD = 1e-6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_model_arguments(parser)
    add_data_arguments(parser, num_samples=20, max_len=1024)
    parser.add_argument(
        "--threshold", type=float, default=THRESHOLD, help="smallest singular value that counts"
    )
    parser.add_argument(
        "--padded", action="store_true", help="pad to the longest length and keep it"
    )
    parser.add_argument("--full", action="store_true", help="1000 maps per layer, whole sequences")


def run(options: argparse.Namespace) -> None:
    """Compute and write."""
    if options.full:
        options.num_samples, options.max_len = 1000, 0
    if not options.threshold > 0:
        raise AnalysisError(f"--threshold must be positive, received {options.threshold}")
    trained = open_trained(options)
    results = Results(options.out, "rank", options.command)
    table = rank_rows(trained, options, results)
    results.table(table)
    results.figure(draw(table))
    summary = table.groupby("layer")[["num_tokens", "rank", "relative_rank"]].agg(["mean", "std"])
    summary.columns = pd.Index([" ".join(c).replace("_", " ") for c in summary.columns])
    summary.insert(0, "maps", table.groupby("layer").size())
    length = f"at most {options.max_len} positions" if options.max_len else "whole sequences"
    body = (
        f"Rank of random attention maps ({length}, {options.split} split, "
        f"{'with' if options.padded else 'without'} padding): singular values of at least "
        f"{options.threshold:g}, float64. The relative rank is that over the number of "
        f"positions.\n\n{markdown_table(summary.reset_index())}"
    )
    results.text("Rank distribution of attention maps", describe(trained), body)


def numerical_rank(matrix: Tensor, threshold: float = THRESHOLD) -> int:
    """Return the number of singular values of at least `threshold` of a matrix, in its dtype."""
    return int((torch.linalg.svdvals(matrix) >= threshold).sum())


def rank_rows(trained: Trained, options: argparse.Namespace, results: Results) -> pd.DataFrame:
    """Return a row per map: layer, name, sample, part, head, num_tokens, rank, relative_rank."""
    settings = {
        "study": "rank",
        "model": identity(trained),
        **{k: getattr(options, k) for k in ("split", "num_samples", "max_len", "seed", "padded")},
        "threshold": options.threshold,
    }
    store = RowStore(results.path("partial.jsonl"), settings, ("layer", "sample", "part"))
    layers = {name: in_double(layer) for name, layer in trained.layers.items()}
    numbers = layer_numbers(list(layers))
    for batch in sequences(trained, options, padded=options.padded):
        for one in batch:
            key = {"layer": numbers[one.layer], "sample": one.sample_id, "part": one.part}
            if store.has(**key):
                continue
            call = one.call.double(layers[one.layer])
            heads = call.layer.num_heads
            head = int(generator(options.seed, "head", one.layer, one.sample_id).integers(heads))
            weights = call.weights()[0, head]
            rank = numerical_rank(weights, options.threshold)
            row: dict[str, Any] = {"name": one.layer, **key, "head": head}
            row |= {"num_tokens": len(weights), "rank": rank, "relative_rank": rank / len(weights)}
            store.add(row)
    return store.finish().sort_values(["layer", "sample", "part"], ignore_index=True)


def draw(table: pd.DataFrame) -> Figure:
    """Draw a histogram of relative ranks per layer."""
    layers = list(dict.fromkeys(table["layer"]))
    columns = min(4, len(layers))
    rows = -(-len(layers) // columns)
    figure, axes = panels(rows, columns, 3.2, 2.6, sharex=True, sharey=True)
    flat = [axis for row in axes for axis in row]
    bins = np.linspace(0, 1, 26).tolist()
    for axis, layer in zip(flat, layers, strict=False):
        part = table[table["layer"] == layer]
        axis.hist(part["relative_rank"], bins=bins, color="#3b6ea5")
        axis.axvline(part["relative_rank"].mean(), color="black", lw=1, ls="--")
        rank, length = part["rank"].mean(), part["num_tokens"].mean()
        axis.set_title(f"layer {layer}: mean rank {rank:.1f} of {length:.1f}", fontsize=9)
    for unused in flat[len(layers) :]:
        unused.remove()
    figure.supxlabel("rank / number of positions (dashed: mean)", fontsize=9)
    figure.supylabel("number of maps", fontsize=9)
    return figure
