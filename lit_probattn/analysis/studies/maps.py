"""Attention maps of sequences: one picture per layer and head.

Source: MGK, ICML 2022, figures 2 (left), 6 and 9. The CSV file has, for every layer and head, means
over real queries: entropy in nats, the largest weight, and the distance between query and attended
key in positions.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from torch import Tensor

from lit_probattn.analysis.options import add_data_arguments, add_model_arguments
from lit_probattn.analysis.recording import LayerCall
from lit_probattn.analysis.results import AnalysisError, Results, describe
from lit_probattn.analysis.sampling import Sequence, layer_numbers, longest, sequences
from lit_probattn.records.tables import markdown_table, panels
from lit_probattn.training.trained import open_trained

_PIXELS = 256
_COLUMNS = ("num_tokens", "entropy_nats", "largest_weight", "mean_distance")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_model_arguments(parser)
    add_data_arguments(parser, num_samples=8, max_len=1024)
    parser.add_argument(
        "--layers", type=int, nargs="+", help="layers to draw, from 1; default: all"
    )
    parser.add_argument("--max_heads", type=int, default=8, help="heads to draw; default 8")
    parser.add_argument("--padded", action="store_true", help="show padding too")
    parser.add_argument("--save_maps", action="store_true", help="write the maps to an .npz file")


def run(options: argparse.Namespace) -> None:
    """Compute and write."""
    trained = open_trained(options)
    numbers = layer_numbers(list(trained.layers))
    _check_layers(options.layers, len(numbers))
    rows: list[dict[str, Any]] = []
    saved: dict[str, Any] = {}
    shown: list[Sequence] = []
    for batch in sequences(trained, options, padded=options.padded):
        for one in batch:
            weights = one.call.weights()[0].cpu()
            columns = {"layer": numbers[one.layer], "name": one.layer, "sample": one.sample_id}
            for head, values in enumerate(map_statistics(one.call, weights)):
                rows.append({**columns, "head": head + 1, **values})
            if options.save_maps:
                saved[f"sample{one.sample_id}_layer{numbers[one.layer]}"] = weights.numpy()
        shown = longest([*shown, *batch])
    table = pd.DataFrame(rows)
    results = Results(options.out, "attention_maps", options.command)
    results.table(table)
    maps = {numbers[one.layer]: one.call.weights()[0].cpu() for one in shown}
    chosen = {k: w for k, w in maps.items() if options.layers is None or k in options.layers}
    results.figure(draw(chosen, options.max_heads))
    if options.save_maps:
        np.savez_compressed(results.path("npz"), **saved)
    first = shown[0].sample_id
    means = table.groupby("layer")[list(_COLUMNS)].mean().reset_index()
    body = (
        f"Maps of sample {first} of the {options.split} split, the longest drawn (rows: queries, "
        f"columns: keys; colour: square root of the weight, one scale per map; over {_PIXELS} "
        "positions each cell shows its largest weight), without dropout and noise. Means over "
        f"heads and {table['sample'].nunique()} sample(s):\n\n{markdown_table(means)}"
    )
    results.text("Attention maps", describe(trained), body)


def map_statistics(call: LayerCall, weights: Tensor) -> list[dict[str, float]]:
    """Return means over the real queries of one sequence, a dict per head.

    Args:
        call: the call of a single sequence.
        weights: its maps, (H, N, L).
    """
    real = torch.ones(weights.shape[1], dtype=torch.bool)
    if call.key_mask is not None and call.key is None:
        real = call.key_mask[0].cpu()
    kept = weights[:, real].double()
    entropy = -torch.special.xlogy(kept, kept).sum(-1).mean(-1)
    rows = torch.arange(weights.shape[1])[real, None] + weights.shape[2] - weights.shape[1]
    distance = (rows - torch.arange(weights.shape[2])).abs().double()
    mean_distance = (kept * distance).sum(-1).mean(-1)
    largest = kept.amax(-1).mean(-1)
    columns = zip(entropy.tolist(), largest.tolist(), mean_distance.tolist(), strict=True)
    return [dict(zip(_COLUMNS, (int(real.sum()), *values), strict=True)) for values in columns]


def _check_layers(layers: list[int] | None, count: int) -> None:
    if layers is not None and not all(1 <= number <= count for number in layers):
        raise AnalysisError(f"--layers must be from 1 to {count}, received {layers}")


def draw(maps: dict[int, Tensor], max_heads: int) -> Figure:
    """Draw maps (H, N, L) of layers, by their number: a row per layer, a column per head."""
    columns = min(max_heads, max(len(weights) for weights in maps.values()))
    size = 1.9 if columns > 4 else 2.4
    figure, axes = panels(len(maps), columns, size, size)
    for row, (number, weights) in zip(axes, maps.items(), strict=True):
        for head, axis in enumerate(row):
            if head >= len(weights):
                axis.remove()
                continue
            draw_map(axis, weights[head])
            if row is axes[0]:
                axis.set_title(f"head {head + 1}", fontsize=9)
            if head == 0:
                axis.set_ylabel(f"layer {number}", fontsize=9)
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    return figure


def draw_map(axis: Axes, weights: Tensor) -> None:
    """Draw one map (N, L)."""
    small = shrink(weights)
    axis.imshow(
        small.numpy(),
        cmap="magma",
        norm=PowerNorm(0.5, vmin=0.0, vmax=max(float(small.max()), 1e-12)),
        extent=(0, weights.shape[1], weights.shape[0], 0),
        interpolation="nearest",
        aspect="auto",
    )
    axis.tick_params(labelsize=6, length=2)
    axis.locator_params(nbins=4, integer=True)


def shrink(weights: Tensor) -> Tensor:
    """Reduce a map to at most 256 x 256 cells, each the largest of what it covers."""
    rows, cols = (min(_PIXELS, n) for n in weights.shape)
    pooled: Tensor = torch.nn.functional.adaptive_max_pool2d(weights[None].float(), (rows, cols))
    return pooled[0]
