"""Distances between the attention maps of the heads of a layer.

Source: FiSH, NeurIPS 2022, tables 8 and 12:
    d(h, h') = ‖P_h − P_h'‖  (Frobenius, over the map of one sequence)
Mean and variance are over all H (H − 1) / 2 pairs of local heads and all sequences of a layer,
followed by the mean over layers. The paper specifies neither norm nor data; --reduce row_mean is
the mean distance of rows over queries, --maps logits compares scores before the softmax (0 if
masked).
"""

from __future__ import annotations

import argparse
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from lit_probattn.analysis.drawing import tiles
from lit_probattn.analysis.options import add_maps
from lit_probattn.analysis.recording import LayerCall
from lit_probattn.analysis.study import ModelStudy
from lit_probattn.base.errors import ConfigError
from lit_probattn.records.tables import counted, markdown_table, span


class Distance(ModelStudy):
    """Distances of all pairs of heads, and their means per layer."""

    name, title = "head_distance", "Distances between heads"
    samples = (20, 1024)

    @staticmethod
    def _add_options(parser: argparse.ArgumentParser) -> None:
        add_maps(parser)
        parser.add_argument(
            "--reduce",
            default="frobenius",
            choices=("frobenius", "row_mean"),
            help="norm of the difference, or mean norm of its rows",
        )

    def _compute(self) -> str:
        options = self.options
        found: dict[str, list[Tensor]] = {}
        for one in self.sequences(of=lambda layer: layer.num_heads > 1):
            maps = attention_maps(one.call, options.maps)
            found.setdefault(one.layer, []).append(head_distances(maps, options.reduce).cpu())
        if not found:
            raise ConfigError("every layer has a single head: no pairs to compare")
        pairs = pd.concat(
            [pair_rows(self.numbers[name], name, torch.stack(x)) for name, x in found.items()]
        )
        summary = layer_summary(found, self.numbers)
        self.results.table(pairs)
        self.results.table(summary, "layers")
        count = int(summary["sequences"].max())
        near = summary.loc[summary["mean"].idxmin()]
        claim = f"Mean distance between heads by layer: {span(summary['mean'])}" + (
            f", smallest in layer {near['layer']}" if len(summary) > 1 else ""
        )
        self.results.figure(draw(pairs), claim)
        return (
            f"Distances between heads ({options.reduce} norm of the difference of "
            f"{'maps' if options.maps == 'probs' else 'scores'}, {counted(count, 'sample')} of the "
            f"{options.split} split, at most {options.max_len or 'all'} positions). Layer "
            f"average: mean {summary['mean'].mean():.4g}, variance "
            f"{summary['variance'].mean():.4g} over pairs and sequences.\n\n"
            f"{markdown_table(summary)}"
        )


def attention_maps(call: LayerCall, kind: str) -> Tensor:
    """Return the maps of one sequence, (H, N, L): weights, or scores with 0 for masked pairs.

    Raises:
        ConfigError: the variant has no scores.
    """
    if kind == "probs":
        return call.weights()[0]
    if not call.layer.core.makes.has_scores:
        raise ConfigError(
            f"{call.layer.core.name} attention has no scores before a softmax: use --maps probs"
        )
    return call.scores()[0]


def head_distances(maps: Tensor, reduce: str = "frobenius") -> Tensor:
    """Return the distances of all pairs of maps (H, N, L); (H (H − 1) / 2,) float64."""
    values = []
    for first, second in combinations(maps.double().unbind(0), 2):
        rows = torch.linalg.vector_norm(first - second, dim=-1)
        values.append(rows.mean() if reduce == "row_mean" else torch.linalg.vector_norm(rows))
    return torch.stack(values)


def pair_rows(number: int, name: str, distances: Tensor) -> pd.DataFrame:
    """Return mean and variance of distances (S, pairs) over sequences, a row per pair of heads."""
    num_pairs = distances.shape[1]
    heads = round((1 + (1 + 8 * num_pairs) ** 0.5) / 2)
    first, second = zip(*combinations(range(1, heads + 1), 2), strict=True)
    columns = {"layer": number, "name": name, "head": first, "other_head": second}
    mean, variance = distances.mean(0).numpy(), distances.var(0, correction=0).numpy()
    return pd.DataFrame({**columns, "mean": mean, "variance": variance})


def layer_summary(found: dict[str, list[Tensor]], numbers: dict[str, int]) -> pd.DataFrame:
    """Return mean and variance over pairs and sequences of each layer."""
    rows = []
    for name, parts in found.items():
        values = torch.cat(parts)
        row = {"layer": numbers[name], "name": name, "sequences": len(parts)}
        row |= {"mean": float(values.mean()), "variance": float(values.var(correction=0))}
        rows.append(row | {"smallest": float(values.min()), "largest": float(values.max())})
    return pd.DataFrame(rows)


def draw(pairs: pd.DataFrame) -> Figure:
    """Draw the mean distances of heads, one matrix per layer with a common colour scale."""
    layers = list(dict.fromkeys(pairs["layer"]))
    figure, axes = tiles(len(layers), 6, 2.3, 2.3)
    top = float(pairs["mean"].max())
    for axis, layer in zip(axes, layers, strict=True):
        part = pairs[pairs["layer"] == layer]
        heads = int(part["other_head"].max())
        matrix = np.zeros((heads, heads))
        matrix[part["head"] - 1, part["other_head"] - 1] = part["mean"]
        image = axis.imshow(matrix + matrix.T, vmin=0.0, vmax=top or 1.0, cmap="viridis")
        axis.set_title(f"layer {layer}", fontsize=9)
        ticks = range(0, heads, 1 if heads <= 8 else 4)
        axis.set_xticks(ticks, [str(t + 1) for t in ticks], fontsize=7)
        axis.set_yticks(ticks, [str(t + 1) for t in ticks], fontsize=7)
        if heads <= 4:
            for i, j in combinations(range(heads), 2):
                value = matrix[i, j]
                colour = "black" if value > 0.6 * top else "white"
                style: Any = {"ha": "center", "va": "center", "fontsize": 7, "color": colour}
                for x, y in ((i, j), (j, i)):
                    axis.text(x, y, f"{value:.2f}", **style)
    figure.colorbar(image, ax=axes, label="mean distance", shrink=0.8)
    figure.supxlabel("head", fontsize=9)
    figure.supylabel("head", fontsize=9)
    return figure
