"""Spectrum of vectorised attention maps: how many directions the heads of a layer use.

Source: FiSH, NeurIPS 2022, section 1.2, figure 2, tables 9 and 13 (specification d.2). With S
sequences, vec(A) of n² entries, and no centring:
    C_l = 1 / (S H) Σ_s Σ_h vec(A_sh) vec(A_sh)ᵀ
Number of components: the smallest r whose largest r eigenvalues make 95 % of their sum; then the
mean over layers. The picture is of the mean of C_l over layers. Eigenvalues come from the Gram
matrix of the maps, so there are at most S H of them, and the counts depend on S H.
--full is the paper's protocol: 1000 sequences of 128 positions.
"""

from __future__ import annotations

import argparse

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from lit_probattn.analysis.options import add_data_arguments, add_model_arguments
from lit_probattn.analysis.results import AnalysisError, Results, describe
from lit_probattn.analysis.sampling import layer_numbers, sequences
from lit_probattn.analysis.studies.distance import add_maps_argument, attention_maps
from lit_probattn.records.tables import markdown_table, panels
from lit_probattn.training.trained import open_trained

TOP = 50
SHARE = 0.95
# Vectors that enter the spectrum of the mean over layers; a Gram matrix of 8000² takes a minute.
_MAX_VECTORS = 8000
_ROWS = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_model_arguments(parser)
    add_data_arguments(parser, num_samples=64, max_len=0)
    parser.add_argument(
        "--length", type=int, default=128, help="positions n of every sequence; default 128"
    )
    parser.add_argument("--full", action="store_true", help="1000 sequences")
    parser.add_argument(
        "--max_gigabytes", type=float, default=4.0, help="memory that the maps may take"
    )
    add_maps_argument(parser)


def run(options: argparse.Namespace) -> None:
    """Compute and write."""
    if options.length < 2:
        raise AnalysisError(f"--length must be at least 2, received {options.length}")
    if options.full:
        options.num_samples = 1000
    options.max_len = options.length
    trained = open_trained(options)
    _check_memory(options, sum(layer.num_heads for layer in trained.layers.values()))
    vectors: dict[str, list[Tensor]] = {}
    for batch in sequences(trained, options, min_len=options.length):
        for one in batch:
            maps = attention_maps(one.call, options.maps)
            vectors.setdefault(one.layer, []).append(maps.flatten(1).cpu())
    numbers = layer_numbers(list(trained.layers))
    layers = {numbers[name]: torch.cat(parts) for name, parts in vectors.items()}
    spectra = {number: spectrum(maps) for number, maps in layers.items()}
    mean, used = mean_spectrum(layers)
    counts = pd.DataFrame(
        [
            {
                "layer": number,
                "maps": len(layers[number]),
                "components": num_components(values),
                "top_1_share": float(values[0] / values.sum()),
                "top_10_share": float(values[:10].sum() / values.sum()),
            }
            for number, values in spectra.items()
        ]
    )
    results = Results(options.out, "spectrum", options.command)
    results.table(spectrum_rows({**{str(k): v for k, v in spectra.items()}, "mean": mean}))
    results.table(counts, "layers")
    results.figure(draw(spectra, mean))
    body = (
        f"Spectrum of vectorised {'maps' if options.maps == 'probs' else 'scores'} of "
        f"{options.length} x {options.length}, not centred, {options.split} split. Components for "
        f"95 % of the sum of eigenvalues, layer average: {counts['components'].mean():.1f} of at "
        f"most {counts['maps'].min()} (sequences x heads); for the mean matrix over layers: "
        f"{num_components(mean)} ({used} maps).\n\n{markdown_table(counts)}"
    )
    results.text("Spectrum of attention maps", describe(trained), body)


def _check_memory(options: argparse.Namespace, num_heads: int) -> None:
    gigabytes = options.num_samples * num_heads * options.length**2 * 4 / 1e9
    if gigabytes > options.max_gigabytes:
        raise AnalysisError(
            f"the maps would take {gigabytes:.1f} GB: lower --num_samples ({options.num_samples}) "
            f"or --length ({options.length}), or raise --max_gigabytes ({options.max_gigabytes:g})"
        )


def spectrum(vectors: Tensor) -> Tensor:
    """Return the eigenvalues of 1/m Σ v vᵀ for m vectors (m, d), largest first, float64.

    They are those of the m x m Gram matrix, so there are min(m, d) that can differ from zero.
    """
    gram = vectors.double() @ vectors.double().mT / len(vectors)
    values: Tensor = torch.linalg.eigvalsh(gram).flip(0).clamp_min(0.0)
    return values[: min(vectors.shape)]


def mean_spectrum(layers: dict[int, Tensor]) -> tuple[Tensor, int]:
    """Return the eigenvalues of the mean over layers of their matrices, and the vectors used."""
    most = max(1, _MAX_VECTORS // len(layers))
    scaled = [v[:most].double() / len(v[:most]) ** 0.5 for v in layers.values()]
    if len({v.shape[1] for v in scaled}) > 1:
        raise AnalysisError("layers see different numbers of positions: lower --length")
    stacked = torch.cat(scaled)
    factor = len(stacked) / len(layers)  # undoes the mean over vectors of `spectrum`
    return spectrum(stacked) * factor, len(stacked)


def num_components(eigenvalues: Tensor, share: float = SHARE) -> int:
    """Return the smallest r whose r largest eigenvalues make `share` of the sum.

    Args:
        eigenvalues: largest first.
        share: in (0, 1].
    """
    total = eigenvalues.cumsum(0)
    return int((total < share * total[-1]).sum()) + 1


def spectrum_rows(spectra: dict[str, Tensor]) -> pd.DataFrame:
    """Return a row per layer and eigenvalue, with its share and the cumulative share.

    All of the first 200 eigenvalues, and every tenth of the others.
    """
    parts = []
    for layer, values in spectra.items():
        share = values / values.sum()
        columns = {"number": np.arange(1, len(values) + 1), "eigenvalue": values.numpy()}
        cumulative = {"share": share.numpy(), "cumulative_share": share.cumsum(0).numpy()}
        part = pd.DataFrame({"layer": layer, **columns, **cumulative})
        parts.append(part[(part["number"] <= _ROWS) | (part["number"] % 10 == 0)])
    return pd.concat(parts)


def draw(spectra: dict[int, Tensor], mean: Tensor) -> Figure:
    """Draw the top eigenvalues of the mean matrix, its cumulative share, and that of each layer."""
    figure, axes = panels(1, 3, 3.7, 3.0)
    top, all_of_it, by_layer = axes[0]
    count = min(TOP, len(mean))
    top.bar(range(1, count + 1), mean[:count].numpy(), color="#3b6ea5")
    top.set(
        yscale="log", xlabel="number", ylabel="eigenvalue", title=f"top {count}, mean of layers"
    )
    share = (mean.cumsum(0) / mean.sum()).numpy()
    all_of_it.plot(range(1, len(share) + 1), share, color="#3b6ea5")
    components = num_components(mean)
    all_of_it.axvline(components, color="black", lw=1, ls="--")
    all_of_it.text(components, 0.05, f" {components} for 95 %", fontsize=8)
    all_of_it.set(xlabel="eigenvalues", ylabel="share of the sum", ylim=(0, 1.02))
    all_of_it.set_title("cumulative, mean of layers")
    for (number, values), shade in zip(
        spectra.items(), np.linspace(0.1, 0.9, len(spectra)), strict=True
    ):
        curve = (values.cumsum(0) / values.sum()).numpy()
        colour = matplotlib_colour(float(shade))
        by_layer.plot(
            range(1, len(curve) + 1), curve, color=colour, lw=1.2, label=f"layer {number}"
        )
    by_layer.axhline(SHARE, color="0.5", lw=0.8, ls=":")
    by_layer.set(xlabel="eigenvalues", ylim=(0, 1.02), title="cumulative, by layer")
    if len(spectra) <= 8:
        by_layer.legend(fontsize=7, frameon=False)
    for axis in axes[0]:
        axis.title.set_fontsize(9)
    return figure


def matplotlib_colour(position: float) -> tuple[float, float, float, float]:
    """Return a colour of the viridis scale."""
    from matplotlib import colormaps

    red, green, blue, alpha = colormaps["viridis"](position)
    return (red, green, blue, alpha)
