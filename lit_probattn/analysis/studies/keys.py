"""Key weights W_K and the keys of a sequence, as pictures.

Source: MGK, ICML 2022, figures 13 (W_K of every head and component, (E, C)) and 14 (keys of the
first 100 tokens of a random sequence, (100, E), every component). Shifted keys have one W_K and K
shifts b_r. The CSV file has, per layer, head and component: the Frobenius norm and the effective
rank of W_K (exponential of the entropy of its normalised squared singular values), the mean norm of
the keys and their mean distance from those of the first component.
"""

from __future__ import annotations

import argparse
from typing import Any

import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from lit_probattn.analysis.options import add_data_arguments, add_model_arguments
from lit_probattn.analysis.recording import LayerCall
from lit_probattn.analysis.results import AnalysisError, Results, describe
from lit_probattn.analysis.sampling import Sequence, layer_numbers, longest, sequences
from lit_probattn.attention import Attention
from lit_probattn.attention.layer import split_heads
from lit_probattn.records.tables import markdown_table, panels
from lit_probattn.training.trained import open_trained


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_model_arguments(parser)
    add_data_arguments(parser, num_samples=8, max_len=1024)
    parser.add_argument("--tokens", type=int, default=100, help="keys to draw; default 100")
    parser.add_argument("--max_heads", type=int, default=4, help="heads to draw; default 4")


def run(options: argparse.Namespace) -> None:
    """Compute and write."""
    if options.tokens < 1:
        raise AnalysisError(f"--tokens must be at least 1, received {options.tokens}")
    trained = open_trained(options)
    found: list[Sequence] = []
    for batch in sequences(trained, options):
        found = longest([*found, *batch])
    numbers = layer_numbers([one.layer for one in found])
    rows: list[dict[str, Any]] = []
    weights: dict[int, Tensor] = {}
    keys: dict[int, Tensor] = {}
    for one in found:
        number = numbers[one.layer]
        weights[number] = key_weights(one.call.layer).cpu()
        keys[number] = component_keys(one.call).cpu()
        columns = {"layer": number, "name": one.layer}
        rows += [columns | row for row in statistics(weights[number], keys[number])]
    table = pd.DataFrame(rows)
    results = Results(options.out, "keys", options.command)
    results.table(table)
    results.figure(
        draw(weights, options.max_heads, "W_K: rows head size, columns width"), "weights"
    )
    shown = {number: values[:, :, : options.tokens] for number, values in keys.items()}
    results.figure(draw(shown, options.max_heads, "keys: rows tokens, columns head size"))
    shown_rows = table.drop(columns="name").head(40)
    body = (
        f"Key weights, and keys of the first {options.tokens} real tokens of sample "
        f"{found[0].sample_id}, the longest drawn ({options.split} split). Colours are symmetric "
        f"around zero, one scale per layer.\n\n{markdown_table(shown_rows)}"
    )
    results.text("Key weights and keys", describe(trained), body)


def key_weights(layer: Attention) -> Tensor:
    """Return W_K by key head and component, (H_kv, K, E, C); K = 1 where shifts make components."""
    weight = layer.key_proj.weight.detach()
    # Rows of W_K are the channels of keys.
    heads = layer.layout
    split = split_heads(weight.T[None], heads.key, heads.keys_per_head)  # (1, H_kv, [K,] C, E)
    if split.dim() == 4:
        split = split[:, :, None]
    return split[0].mT.detach()


def component_keys(call: LayerCall) -> Tensor:
    """Return the keys that scores see, (H, K, L, E), of a single sequence."""
    key = call.project()[1]
    return (key if key.dim() == 5 else key[:, :, None])[0]


def effective_rank(matrix: Tensor) -> float:
    """Return exp of the entropy of the normalised squared singular values."""
    energy = torch.linalg.svdvals(matrix.double()).square()
    share = energy / energy.sum()
    return float(torch.exp(-torch.special.xlogy(share, share).sum()))


def statistics(weights: Tensor, keys: Tensor) -> list[dict[str, Any]]:
    """Return a dict per head and component; see the module.

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
            rows.append(
                {
                    "head": head + 1,
                    "component": component + 1,
                    "weight_norm": float(torch.linalg.matrix_norm(matrix)),
                    "weight_effective_rank": effective_rank(matrix),
                    "key_norm": float(keys[head, component].norm(dim=-1).mean()),
                    "distance_from_first": float(moved.norm(dim=-1).mean()),
                }
            )
    return rows


def draw(matrices: dict[int, Tensor], max_heads: int, title: str) -> Figure:
    """Draw matrices (H, K, rows, columns): a row per layer, a column per head and component."""
    heads = min(max_heads, max(len(m) for m in matrices.values()))
    parts = max(m.shape[1] for m in matrices.values())
    tall = next(iter(matrices.values())).shape
    height = 2.6 if tall[2] > tall[3] else 1.6
    figure, axes = panels(len(matrices), heads * parts, 1.7, height)
    for row, (number, values) in zip(axes, matrices.items(), strict=True):
        limit = float(values.abs().max()) or 1.0
        for place, axis in enumerate(row):
            head, part = divmod(place, parts)
            if head >= len(values) or part >= values.shape[1]:
                axis.remove()
                continue
            image = axis.imshow(
                values[head, part].numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto"
            )
            _label(
                axis,
                row is axes[0],
                f"head {head + 1}" + (f", key {part + 1}" if parts > 1 else ""),
            )
            if place == 0:
                axis.set_ylabel(f"layer {number}", fontsize=8)
        figure.colorbar(image, ax=row, shrink=0.8, pad=0.01).ax.tick_params(labelsize=6)
    figure.suptitle(title, fontsize=9)
    return figure


def _label(axis: Axes, first: bool, text: str) -> None:
    axis.tick_params(labelsize=6, length=2)
    axis.locator_params(nbins=3, integer=True)
    if first:
        axis.set_title(text, fontsize=8)
