"""Key weights W_K and the keys of a sequence as images.

Source: MGK, ICML 2022, figures 13 (W_K of every head and component, (E, C)) and 14 (keys of the
first 100 tokens of a random sequence, (100, E), every component). Shifted keys have one W_K and K
shifts b_r. The CSV file contains, per layer, head and component: the Frobenius norm and the
effective rank of W_K (exponential of the entropy of its normalised squared singular values), the
mean norm of the keys and their mean distance from those of the first component.
"""

from __future__ import annotations

import argparse
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from lit_probattn.analysis.drawing import each_head
from lit_probattn.analysis.head_size.ranks import effective_rank
from lit_probattn.analysis.recording import LayerCall
from lit_probattn.analysis.study import ModelStudy
from lit_probattn.attention import Attention
from lit_probattn.attention.layer import split_heads
from lit_probattn.base.arguments import at_least
from lit_probattn.records.figures import panels
from lit_probattn.records.tables import markdown_table, span

_MOST_HEADS = 4  # drawn per layer


class Keys(ModelStudy):
    """Key weights of all layers, and keys of the longest sample."""

    name, title = "keys", "Key weights and keys"
    samples = (8, 1024)

    @staticmethod
    def _add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--tokens", type=at_least(1), default=100, help="keys to draw")

    def _compute(self) -> str:
        options, results = self.options, self.results
        for _ in self.sequences():  # only the longest is used
            pass
        rows: list[dict[str, Any]] = []
        weights: dict[int, Tensor] = {}
        keys: dict[int, Tensor] = {}
        for number, one in enumerate(self.longest, 1):
            weights[number] = key_weights(one.call.layer).cpu()
            keys[number] = component_keys(one.call).cpu()
            columns = {"layer": number, "name": one.layer}
            rows += [columns | row for row in statistics(weights[number], keys[number])]
        table = pd.DataFrame(rows)
        results.table(table)
        size = next(iter(weights.values())).shape[2]
        ranks = span(table["weight_effective_rank"], ".1f")
        claim = f"Key weights of a head have an effective rank of {ranks}, with head size {size}"
        results.figure(draw(weights, "model width", "head size"), claim, "weights")
        shown = {number: values[:, :, : options.tokens] for number, values in keys.items()}
        further = table[table["component"] > 1]
        claim = f"Mean norm of the keys by head: {span(table['key_norm'])}" + (
            f"; distance from the first component: {span(further['distance_from_first'])}"
            if len(further)
            else ""
        )
        results.figure(draw(shown, "head size", "token"), claim)
        return (
            f"Key weights, and keys of the first {options.tokens} real tokens of sample "
            f"{self.longest[0].sample_id}, the longest drawn ({options.split} split). Colours are "
            "symmetric around zero, one scale per layer.\n\n"
            f"{markdown_table(table.drop(columns='name').head(40))}"
        )


def key_weights(layer: Attention) -> Tensor:
    """Return W_K by key head and component, (H_kv, K, E, C); K = 1 for shifted keys."""
    weight = layer.key_proj.weight.detach()
    # Rows of W_K are the channels of keys.
    heads = layer.layout
    split = split_heads(weight.T[None], heads.key, heads.keys_per_head)  # (1, H_kv, [K,] C, E)
    if split.dim() == 4:
        split = split[:, :, None]
    return split[0].mT.detach()


def component_keys(call: LayerCall) -> Tensor:
    """Return the keys of the scores, (H, K, L, E), of a single sequence."""
    key = call.project()[1]
    return (key if key.dim() == 5 else key[:, :, None])[0]


def statistics(weights: Tensor, keys: Tensor) -> list[dict[str, Any]]:
    """Return the statistics of each head and component; see the module docstring.

    Args:
        weights: (H_kv, K or 1, E, C).
        keys: (H, K, L, E).
    """
    rows: list[dict[str, Any]] = []
    for head in range(keys.shape[0]):
        owner = head * weights.shape[0] // keys.shape[0]
        for component in range(keys.shape[1]):
            matrix = weights[owner, component if weights.shape[1] > 1 else 0]
            moved = keys[head, component] - keys[head, 0]
            energy = torch.linalg.svdvals(matrix.double()).square()
            rows.append(
                {
                    "head": head + 1,
                    "component": component + 1,
                    "weight_norm": float(torch.linalg.matrix_norm(matrix)),
                    "weight_effective_rank": float(effective_rank(energy)),
                    "key_norm": float(keys[head, component].norm(dim=-1).mean()),
                    "distance_from_first": float(moved.norm(dim=-1).mean()),
                }
            )
    return rows


def draw(matrices: dict[int, Tensor], columns: str, rows: str) -> Figure:
    """Draw matrices (H, K, rows, columns), a row per layer and a column per head and component."""
    heads = min(_MOST_HEADS, max(len(m) for m in matrices.values()))
    parts = max(m.shape[1] for m in matrices.values())
    tall = next(iter(matrices.values())).shape
    height = 2.6 if tall[2] > tall[3] else 1.6
    figure, axes = panels(len(matrices), heads * parts, 1.7, height)

    def exists(layer: int, place: int) -> bool:
        head, part = divmod(place, parts)
        return head < len(matrices[layer]) and part < matrices[layer].shape[1]

    def heading(place: int) -> str:
        head, part = divmod(place, parts)
        return f"head {head + 1}" + (f", key {part + 1}" if parts > 1 else "")

    images = {}
    for axis, layer, place in each_head(axes, matrices, exists, heading, size=8):
        values, limit = matrices[layer], float(matrices[layer].abs().max()) or 1.0
        images[layer] = axis.imshow(
            values[divmod(place, parts)].numpy(),
            cmap="RdBu_r",
            vmin=-limit,
            vmax=limit,
            aspect="auto",
        )
        axis.tick_params(labelsize=6, length=2)
        axis.locator_params(nbins=3, integer=True)
    for row, image in zip(axes, images.values(), strict=True):
        figure.colorbar(image, ax=row, shrink=0.8, pad=0.01).ax.tick_params(labelsize=6)
    figure.supxlabel(columns, fontsize=9)
    figure.supylabel(rows, fontsize=9)
    return figure
