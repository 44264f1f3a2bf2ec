"""Attention maps of sequences, one image per layer and head.

Source: MGK, ICML 2022, figures 2 (left), 6 and 9. The CSV file contains means over real queries for
each layer and head: entropy in nats, the largest weight, and the distance between query and
attended key in positions.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from torch import Tensor

from lit_probattn.analysis.drawing import each_head
from lit_probattn.analysis.recording import LayerCall
from lit_probattn.analysis.sampling import token_words
from lit_probattn.analysis.study import ModelStudy
from lit_probattn.base.errors import ConfigError
from lit_probattn.records.figures import panels
from lit_probattn.records.tables import counted, markdown_table, span

_PIXELS = 256
_MOST_HEADS = 8  # drawn per layer
_WORDS = 32  # largest number of tokens that label a map
_COLUMNS = ("num_tokens", "entropy_nats", "largest_weight", "mean_distance")


class Maps(ModelStudy):
    """Maps of the longest sample, and statistics of all."""

    name, title = "attention_maps", "Attention maps"
    samples = (8, 1024)

    @staticmethod
    def _add_options(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--layers", type=int, nargs="+", help="layers to draw, from 1; default: all")
        add("--padded", action="store_true", help="also show padding")
        add("--save_maps", action="store_true", help="write the maps to an .npz file")

    def _compute(self) -> str:
        options, numbers = self.options, self.numbers
        _check_layers(options.layers, len(numbers))
        rows: list[dict[str, Any]] = []
        saved: dict[str, Any] = {}
        for one in self.sequences(padded=options.padded):
            weights = one.call.weights()[0].cpu()
            columns = {"layer": numbers[one.layer], "name": one.layer, "sample": one.sample_id}
            for head, values in enumerate(map_statistics(one.call, weights)):
                rows.append({**columns, "head": head + 1, **values})
            if options.save_maps:
                name = f"sample{one.sample_id}_layer{numbers[one.layer]}"
                saved[f"{name}_part{one.part}" if name in saved else name] = weights.numpy()
        table = pd.DataFrame(rows)
        self.results.table(table)
        maps = {numbers[one.layer]: one.call.weights()[0].cpu() for one in self.longest}
        chosen = {k: w for k, w in maps.items() if options.layers is None or k in options.layers}
        ids = self.longest[0].tokens
        words = [] if ids is None or len(ids) > _WORDS else token_words(self.trained.data, ids)
        means = table.groupby("layer")[list(_COLUMNS)].mean().reset_index()
        claim = (
            f"Mean entropy of the attention weights by layer: {span(means['entropy_nats'])} nats; "
            f"mean largest weight of a query: {span(means['largest_weight'], '.2f')}"
        )
        self.results.figure(draw(chosen, words), claim)
        if options.save_maps:
            np.savez_compressed(self.results.path("npz"), **saved)
        return (
            f"Maps of sample {self.longest[0].sample_id} of the {options.split} split, the "
            "longest drawn (rows: queries, columns: keys; colour: square root of the weight, "
            f"one scale per layer; with more than {_PIXELS} positions, each pixel shows its "
            "largest weight), without dropout. Means over heads and "
            f"{counted(table['sample'].nunique(), 'sample')}:\n\n{markdown_table(means)}"
        )


def map_statistics(call: LayerCall, weights: Tensor) -> list[dict[str, float]]:
    """Return means over the real queries of one sequence with maps (H, N, L), a dict per head."""
    real = call.real[0].cpu()
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
        raise ConfigError(f"--layers must be from 1 to {count}, received {layers}")


def draw(maps: dict[int, Tensor], words: Sequence[str] = ()) -> Figure:
    """Draw maps (H, N, L) by layer number, a row per layer and a column per head.

    The maps of a layer share one colour scale; `words` are the tokens of the sequence.
    """
    columns = min(_MOST_HEADS, max(len(weights) for weights in maps.values()))
    size = 1.9 if columns > 4 else 2.4
    figure, axes = panels(len(maps), columns, size, size)
    images: dict[int, Any] = {}
    last = list(maps)[-1]
    for axis, layer, head in each_head(axes, maps, lambda layer, head: head < len(maps[layer])):
        images[layer] = draw_map(axis, maps[layer][head], float(maps[layer][:columns].max()))
        if words and maps[layer].shape[1:] == (len(words), len(words)):
            places = [place + 0.5 for place in range(len(words))]
            axis.set_xticks(places, words if layer == last else [], rotation=90, fontsize=5)
            axis.set_yticks(places, words if head == 0 else [], fontsize=5)
    for row, image in zip(axes, images.values(), strict=True):
        there = [axis for axis in row if axis.figure is not None]
        bar = figure.colorbar(image, ax=there, shrink=0.9, pad=0.01)
        bar.ax.tick_params(labelsize=6)
        bar.set_label("attention weight", fontsize=7)
    figure.supxlabel("key (token attended to)", fontsize=9)
    figure.supylabel("query (token that attends)", fontsize=9)
    return figure


def draw_map(axis: Axes, weights: Tensor, top: float) -> AxesImage:
    """Draw one map (N, L) with colours from 0 to `top`."""
    image = axis.imshow(
        shrink(weights).numpy(),
        cmap="magma",
        norm=PowerNorm(0.5, vmin=0.0, vmax=max(top, 1e-12)),
        extent=(0, weights.shape[1], weights.shape[0], 0),
        interpolation="nearest",
        aspect="auto",
    )
    axis.tick_params(labelsize=6, length=2)
    axis.locator_params(nbins=4, integer=True)
    return image


def shrink(weights: Tensor) -> Tensor:
    """Reduce a map to at most 256 x 256 cells by maximum pooling."""
    rows, cols = (min(_PIXELS, n) for n in weights.shape)
    pooled: Tensor = torch.nn.functional.adaptive_max_pool2d(weights[None].float(), (rows, cols))
    return pooled[0]
