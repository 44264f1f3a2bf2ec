"""Spectrum of vectorised attention maps: the number of directions that the heads of a layer use.

Source: FiSH, NeurIPS 2022, section 1.2, figure 2, tables 9 and 13. With S sequences and vec(A) of
n² entries, not centred:
    C_l = 1 / (S H) Σ_s Σ_h vec(A_sh) vec(A_sh)ᵀ
The number of components is the smallest r such that the r largest eigenvalues are 95 % of their
sum, averaged over layers. The figure shows the mean of C_l over layers. Eigenvalues are those of
the Gram matrix of the maps, so there are at most S H, and the counts depend on S H. --full uses the
paper's protocol: 1000 sequences of 128 positions. If the maps of all layers exceed --max_gigabytes,
the model runs on the sequences several times, for a group of layers each time.
"""

from __future__ import annotations

import argparse
from collections.abc import Container

import numpy as np
import pandas as pd
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from torch import Tensor

from lit_probattn.analysis.drawing import BLUE
from lit_probattn.analysis.head_size.ranks import leading
from lit_probattn.analysis.options import add_maps
from lit_probattn.analysis.studies.distance import attention_maps
from lit_probattn.analysis.study import ModelStudy
from lit_probattn.attention import Attention
from lit_probattn.base.arguments import at_least
from lit_probattn.base.errors import ConfigError
from lit_probattn.records.figures import panels
from lit_probattn.records.tables import markdown_table, span

TOP = 50
SHARE = 0.95
# Number of vectors in the spectrum of the mean over layers; a Gram matrix of 8000² takes a minute.
_MAX_VECTORS = 8000
_ROWS = 200


class Spectrum(ModelStudy):
    """Spectra of the maps of each layer, and of their mean over layers."""

    name, title = "spectrum", "Spectrum of attention maps"
    samples = (64, 0)

    @staticmethod
    def _add_options(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--length", type=at_least(2), default=128, help="positions n of every sequence")
        add("--full", action="store_true", help="1000 sequences")
        text = "memory limit of maps and their spectrum"
        add("--max_gigabytes", type=float, default=4.0, help=text)
        add_maps(parser)

    def _compute(self) -> str:
        options = self.options
        if options.full:
            options.num_samples = 1000
        options.max_len = options.length
        most = max(1, _MAX_VECTORS // len(self.layers))
        spectra: dict[int, Tensor] = {}
        num_maps: dict[int, int] = {}
        first: dict[int, Tensor] = {}
        for group in self._groups():
            for number, maps in self._maps(group).items():
                spectra[number], num_maps[number] = spectrum(maps), len(maps)
                first[number] = maps[:most].clone()
        mean, used = mean_spectrum(first)
        components = int(leading(mean, SHARE))
        counts = pd.DataFrame(
            [
                {
                    "layer": number,
                    "maps": num_maps[number],
                    "components": int(leading(values, SHARE)),
                    "top_1_share": float(values[0] / values.sum()),
                    "top_10_share": float(values[:10].sum() / values.sum()),
                }
                for number, values in spectra.items()
            ]
        )
        self.results.table(spectrum_rows({**{str(k): v for k, v in spectra.items()}, "mean": mean}))
        self.results.table(counts, "layers")
        claim = (
            f"{components} of {used} eigenvalues hold 95 % of the spectrum of the mean "
            f"over layers; in single layers {span(counts['components'], 'd')}"
        )
        self.results.figure(draw(spectra, mean), claim)
        return (
            f"Spectrum of vectorised {'maps' if options.maps == 'probs' else 'scores'} of "
            f"{options.length} x {options.length}, not centred, {options.split} split. Components "
            "for 95 % of the sum of eigenvalues, layer average: "
            f"{counts['components'].mean():.1f} of at most {counts['maps'].min()} (sequences x "
            f"heads); for the mean matrix over layers: {components} ({used} maps).\n\n"
            f"{markdown_table(counts)}"
        )

    def _maps(self, group: Container[Attention]) -> dict[int, Tensor]:
        """Return the maps of some layers as vectors, (S H, n²) by layer number."""
        vectors: dict[int, list[Tensor]] = {}
        for one in self.sequences(of=lambda layer: layer in group, min_len=self.options.length):
            maps = attention_maps(one.call, self.options.maps).flatten(1).cpu()
            vectors.setdefault(self.numbers[one.layer], []).append(maps)
        return {number: torch.cat(vectors.pop(number)) for number in list(vectors)}

    def _groups(self) -> list[list[Attention]]:
        """Return groups of layers whose maps fit into memory together.

        The limit also includes the float64 maps of one layer, its Gram matrix and the workspace of
        its eigenvalues, and the stored vectors of finished layers.

        Raises:
            ConfigError: a single layer does not fit.
        """
        options = self.options
        kept = _MAX_VECTORS * options.length**2 * 4 / 1e9
        groups: list[list[Attention]] = [[]]
        taken = 0.0
        for layer in self.layers.values():
            num_maps = options.num_samples * layer.num_heads
            maps = num_maps * options.length**2 * 4 / 1e9
            spectrum_takes = 2 * maps + 3 * num_maps**2 * 8 / 1e9
            least = min(kept, maps * len(self.layers)) + maps + spectrum_takes
            if least > options.max_gigabytes:
                raise ConfigError(
                    f"the maps of one layer and their spectrum require {least:.2g} GB: reduce "
                    f"--num_samples ({options.num_samples}) or --length ({options.length}), or "
                    f"raise --max_gigabytes ({options.max_gigabytes:g})"
                )
            if groups[-1] and taken + least > options.max_gigabytes:
                groups.append([])
                taken = 0.0
            groups[-1].append(layer)
            taken += maps
        return groups


def spectrum(vectors: Tensor) -> Tensor:
    """Return the eigenvalues of 1/m Σ v vᵀ for m vectors (m, d), in descending order, float64.

    They are those of the m x m Gram matrix, so at most min(m, d) are nonzero.
    """
    vectors = vectors.double()
    gram = vectors @ vectors.mT / len(vectors)
    values: Tensor = torch.linalg.eigvalsh(gram).flip(0).clamp_min(0.0)
    return values[: min(vectors.shape)]


def mean_spectrum(layers: dict[int, Tensor]) -> tuple[Tensor, int]:
    """Return the eigenvalues of the mean matrix over layers, and the number of vectors used."""
    widths = {v.shape[1] for v in layers.values()}
    if len(widths) > 1:
        raise ConfigError("layers have different numbers of positions: reduce --length")
    stacked = torch.empty(sum(map(len, layers.values())), widths.pop(), dtype=torch.float64)
    for rows, maps in zip(
        stacked.split([len(v) for v in layers.values()]), layers.values(), strict=True
    ):
        rows.copy_(maps).div_(len(maps) ** 0.5)
    factor = len(stacked) / len(layers)  # reverses the mean over vectors in `spectrum`
    return spectrum(stacked) * factor, len(stacked)


def spectrum_rows(spectra: dict[str, Tensor]) -> pd.DataFrame:
    """Return a row per layer and eigenvalue, with its share and the cumulative share.

    The first 200 eigenvalues are listed, and every tenth of the others.
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
    """Draw the largest eigenvalues of the mean matrix, and cumulative shares of mean and layers."""
    figure, ((top, total, by_layer),) = panels(1, 3, 3.7, 3.0)
    count = min(TOP, len(mean))
    top.bar(range(1, count + 1), mean[:count].numpy(), color=BLUE)
    top.set(
        yscale="log", xlabel="number", ylabel="eigenvalue", title=f"top {count}, mean of layers"
    )
    share = (mean.cumsum(0) / mean.sum()).numpy()
    total.plot(range(1, len(share) + 1), share, color=BLUE)
    components = int(leading(mean, SHARE))
    total.axvline(components, color="black", lw=1, ls="--")
    total.text(components, 0.05, f" {components} for 95 %", fontsize=8)
    total.set(xlabel="eigenvalues", ylabel="share of the sum", ylim=(0, 1.02))
    total.set_title("cumulative, mean of layers")
    shades = colormaps["viridis"](np.linspace(0.1, 0.9, len(spectra)))
    for (number, values), colour in zip(spectra.items(), shades, strict=True):
        curve = (values.cumsum(0) / values.sum()).numpy()
        places = range(1, len(curve) + 1)
        by_layer.plot(places, curve, color=colour, lw=1.2, label=f"layer {number}")
    by_layer.axhline(SHARE, color="0.5", lw=0.8, ls=":")
    by_layer.set(xlabel="eigenvalues", ylim=(0, 1.02), title="cumulative, by layer")
    if len(spectra) <= 8:
        by_layer.legend(fontsize=7, frameon=False)
    for axis in (top, total, by_layer):
        axis.title.set_fontsize(9)
    return figure
