"""Rank distribution of attention maps, per layer.

Source: MGK, ICML 2022, figures 2 (right) and 7: maps are drawn at random over samples and heads;
the rank is the number of singular values of at least 1e-6. Maps are computed in float64 from the
layers' inputs, after the softmax and before dropout, and end with the last real token; --padded
keeps the padding. --full uses the paper's protocol: 1000 maps per layer, whole sequences. Rerun an
interrupted study to resume it.
"""

from __future__ import annotations

import argparse

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lit_probattn.analysis.drawing import BLUE, tiles
from lit_probattn.analysis.head_size.ranks import map_rank
from lit_probattn.analysis.sampling import generator
from lit_probattn.analysis.study import ModelStudy
from lit_probattn.base.errors import ConfigError
from lit_probattn.records.tables import markdown_table, span


class Rank(ModelStudy):
    """Ranks of random maps, with means per layer."""

    name, title = "rank", "Rank distribution of attention maps"
    samples = (20, 1024)

    @staticmethod
    def _add_options(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--threshold", type=float, default=1e-6, help="smallest singular value that counts")
        add("--padded", action="store_true", help="keep padding to the longest length")
        add("--full", action="store_true", help="1000 maps per layer, whole sequences")

    def _compute(self) -> str:
        options = self.options
        if options.full:
            options.num_samples, options.max_len = 1000, 0
        if not options.threshold > 0:
            raise ConfigError(f"--threshold must be positive, received {options.threshold}")
        table = self.rows()
        self.results.table(table)
        groups = table.groupby("layer")
        shares = groups["relative_rank"].mean()
        claim = (
            f"Mean rank of the attention maps by layer: {span(100 * shares, '.0f')} % of full rank"
        )
        self.results.figure(draw(table), claim)
        summary = groups[["num_tokens", "rank", "relative_rank"]].agg(["mean", "std"])
        summary.columns = pd.Index([" ".join(c).replace("_", " ") for c in summary.columns])
        summary.insert(0, "maps", groups.size())
        length = f"at most {options.max_len} positions" if options.max_len else "whole sequences"
        return (
            f"Rank of random attention maps ({length}, {options.split} split, "
            f"{'with' if options.padded else 'without'} padding): singular values of at least "
            f"{options.threshold:g}, float64. The relative rank is the rank divided by the "
            f"number of positions.\n\n{markdown_table(summary.reset_index())}"
        )

    def rows(self) -> pd.DataFrame:
        """Return a row per map: name, layer, sample, part, head, num_tokens and rank."""
        options, key = self.options, ("layer", "sample", "part")
        flags = ("split", "num_samples", "max_len", "seed", "padded", "threshold")
        store = self.store(key, *flags)
        for one in self.sequences(double=True, padded=options.padded):
            if store.has(**self.place(one)):
                continue
            draws = generator(options.seed, "head", one.layer, one.sample_id)
            head = int(draws.integers(one.call.layer.num_heads))
            weights = one.call.weights()[0, head]
            rank, length = int(map_rank(weights, options.threshold)), len(weights)
            row = {"name": one.layer, **self.place(one), "head": head + 1, "num_tokens": length}
            store.add({**row, "rank": rank, "relative_rank": rank / length})
        return store.finish().sort_values(list(key), ignore_index=True)


def draw(table: pd.DataFrame) -> Figure:
    """Draw a histogram of relative ranks per layer."""
    layers = list(dict.fromkeys(table["layer"]))
    figure, axes = tiles(len(layers), 4, 3.2, 2.6, sharex=True, sharey=True)
    bins = np.linspace(0, 1, 26).tolist()
    for axis, layer in zip(axes, layers, strict=True):
        part = table[table["layer"] == layer]
        axis.hist(part["relative_rank"], bins=bins, color=BLUE)
        axis.axvline(part["relative_rank"].mean(), color="black", lw=1, ls="--")
        rank, length = part["rank"].mean(), part["num_tokens"].mean()
        axis.set_title(f"layer {layer}: mean rank {rank:.1f} of {length:.1f}", fontsize=9)
    figure.supxlabel("rank / number of positions (dashed: mean)", fontsize=9)
    figure.supylabel("number of maps", fontsize=9)
    return figure
