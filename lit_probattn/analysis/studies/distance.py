"""Distances between the attention maps of the heads of a layer.

Source: FiSH, NeurIPS 2022, tables 8 and 12 (specification d.2):
    d(h, h') = ‖P_h − P_h'‖  (Frobenius, over the map of one sequence)
Mean and variance over all H (H − 1) / 2 pairs of local heads and all sequences of a layer; then the
mean over layers. The paper states neither norm nor data; --reduce row_mean is the mean over queries
of the distance of their rows, --maps logits compares scores before the softmax (0 where masked).
"""

from __future__ import annotations

import argparse
from itertools import combinations

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from lit_probattn.analysis.options import add_data_arguments, add_model_arguments
from lit_probattn.analysis.recording import LayerCall
from lit_probattn.analysis.results import AnalysisError, Results, describe
from lit_probattn.analysis.sampling import layer_numbers, sequences
from lit_probattn.records.tables import markdown_table, panels
from lit_probattn.training.trained import open_trained


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_model_arguments(parser)
    add_data_arguments(parser, num_samples=20, max_len=1024)
    add_maps_argument(parser)
    parser.add_argument(
        "--reduce",
        choices=("frobenius", "row_mean"),
        default="frobenius",
        help="norm of the whole difference, or the mean of the norms of its rows",
    )


def add_maps_argument(parser: argparse.ArgumentParser) -> None:
    """Add the choice between weights and scores."""
    parser.add_argument(
        "--maps",
        choices=("probs", "logits"),
        default="probs",
        help="weights after the softmax, or scores before it",
    )


def run(options: argparse.Namespace) -> None:
    """Compute and write."""
    trained = open_trained(options)
    found: dict[str, list[Tensor]] = {}
    for batch in sequences(trained, options):
        for one in batch:
            if one.call.layer.num_heads > 1:
                maps = attention_maps(one.call, options.maps)
                found.setdefault(one.layer, []).append(head_distances(maps, options.reduce).cpu())
    if not found:
        raise AnalysisError("every layer has a single head: there are no pairs to compare")
    numbers = layer_numbers(list(trained.layers))
    pairs = pd.concat(
        [pair_rows(numbers[name], name, torch.stack(parts)) for name, parts in found.items()]
    )
    summary = layer_summary(found, numbers)
    results = Results(options.out, "head_distance", options.command)
    results.table(pairs)
    results.table(summary, "layers")
    results.figure(draw(pairs))
    body = (
        f"Distances between heads ({options.reduce} norm of the difference of "
        f"{'maps' if options.maps == 'probs' else 'scores'}, {options.num_samples} samples of the "
        f"{options.split} split, at most {options.max_len or 'all'} positions). Layer average: "
        f"mean {summary['mean'].mean():.4g}, variance {summary['variance'].mean():.4g} over pairs "
        f"and sequences.\n\n{markdown_table(summary)}"
    )
    results.text("Distances between heads", describe(trained), body)


def attention_maps(call: LayerCall, kind: str) -> Tensor:
    """Return the maps of a single sequence, (H, N, L): weights, or scores with zeros where masked.

    Raises:
        AnalysisError: scores of a variant that has none.
    """
    if kind == "probs":
        return call.weights()[0]
    if not call.layer.core.has_scores:
        raise AnalysisError(
            f"{call.layer.core.variant} attention has no scores before a softmax: use --maps probs"
        )
    return call.scores()[0]


def head_distances(maps: Tensor, reduce: str = "frobenius") -> Tensor:
    """Return the distances of all pairs of heads, (H (H − 1) / 2,) float64.

    Args:
        maps: (H, N, L).
        reduce: `frobenius`, or `row_mean`.
    """
    values = []
    for first, second in combinations(maps.double().unbind(0), 2):
        rows = torch.linalg.vector_norm(first - second, dim=-1)
        values.append(rows.mean() if reduce == "row_mean" else torch.linalg.vector_norm(rows))
    return torch.stack(values)


def pair_rows(number: int, name: str, distances: Tensor) -> pd.DataFrame:
    """Return a row per pair of heads, with mean and variance over sequences.

    Args:
        number: the layer's number.
        name: its name.
        distances: (S, pairs).
    """
    num_pairs = distances.shape[1]
    heads = round((1 + (1 + 8 * num_pairs) ** 0.5) / 2)
    first, second = zip(*combinations(range(heads), 2), strict=True)
    columns = {"layer": number, "name": name, "head": first, "other_head": second}
    mean, variance = distances.mean(0).numpy(), distances.var(0, correction=0).numpy()
    return pd.DataFrame({**columns, "mean": mean, "variance": variance})


def layer_summary(found: dict[str, list[Tensor]], numbers: dict[str, int]) -> pd.DataFrame:
    """Return mean and variance over pairs and sequences of every layer."""
    rows = []
    for name, parts in found.items():
        values = torch.cat(parts)
        rows.append(
            {
                "layer": numbers[name],
                "name": name,
                "sequences": len(parts),
                "mean": float(values.mean()),
                "variance": float(values.var(correction=0)),
                "smallest": float(values.min()),
                "largest": float(values.max()),
            }
        )
    return pd.DataFrame(rows)


def draw(pairs: pd.DataFrame) -> Figure:
    """Draw the mean distances of heads, a matrix per layer on one colour scale."""
    layers = list(dict.fromkeys(pairs["layer"]))
    columns = min(6, len(layers))
    rows = -(-len(layers) // columns)
    figure, axes = panels(rows, columns, 2.3, 2.3)
    flat = [axis for row in axes for axis in row]
    top = float(pairs["mean"].max())
    image = None
    for axis, layer in zip(flat, layers, strict=False):
        part = pairs[pairs["layer"] == layer]
        heads = int(part["other_head"].max()) + 1
        matrix = np.zeros((heads, heads))
        matrix[part["head"], part["other_head"]] = part["mean"]
        image = axis.imshow(matrix + matrix.T, vmin=0.0, vmax=top or 1.0, cmap="viridis")
        axis.set_title(f"layer {layer}", fontsize=9)
        ticks = range(0, heads, 1 if heads <= 8 else 4)
        axis.set_xticks(ticks, [str(t + 1) for t in ticks], fontsize=7)
        axis.set_yticks(ticks, [str(t + 1) for t in ticks], fontsize=7)
        if heads <= 4:
            for i, j in combinations(range(heads), 2):
                value = matrix[i, j]
                colour = "black" if value > 0.6 * top else "white"
                for x, y in ((i, j), (j, i)):
                    axis.text(
                        x, y, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour
                    )
    for unused in flat[len(layers) :]:
        unused.remove()
    assert image is not None
    figure.colorbar(image, ax=flat[: len(layers)], label="mean distance", shrink=0.8)
    figure.supxlabel("head", fontsize=9)
    figure.supylabel("head", fontsize=9)
    return figure
