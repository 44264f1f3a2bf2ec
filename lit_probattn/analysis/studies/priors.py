"""What a layer learned beside its projections: priors, variances, mixing weights, noise scales.

Source: MGK, ICML 2022, table 8 (priors as they enter, clamped, and normalised over components);
FiSH, NeurIPS 2022, Eq. (8) (mixing weights p_kj and noise scales s_k); α of AST. Reads the
checkpoint only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

from lit_probattn.analysis.options import MODEL
from lit_probattn.analysis.results import AnalysisError
from lit_probattn.analysis.study import ModelStudy
from lit_probattn.attention import Attention
from lit_probattn.attention.ast import ASTCore
from lit_probattn.attention.fish.mixing import HeadMixing
from lit_probattn.attention.mgk.priors import MixturePrior, MixtureVariance
from lit_probattn.records.tables import markdown_table, panels

_MOST_BARS = 24
_COMPONENT = {
    "prior": "component",
    "variance": "component",
    "mixing": "global head",
    "noise_scale": "global head",
    "alpha": "α",
}
_TITLE = {
    "prior": "prior π",
    "variance": "variance σ²",
    "mixing": "mixing weight p",
    "noise_scale": "noise scale s",
    "alpha": "α of entmax",
}


class Priors(ModelStudy):
    """Learned quantities, a row per layer, quantity, head and component."""

    name, title = "priors", "Learned priors and mixing weights"
    flags = MODEL
    with_data = False

    def _compute(self) -> str:
        table = self.rows()
        if table.empty:
            raise AnalysisError(
                "the attention layers have no priors, variances, mixing weights or α: expected a "
                "mixture (MGK, MLK), a mixed (FiSH) or an adaptively sparse (AST) variant"
            )
        self.results.table(table)
        figure, (axes,) = panels(1, max(1, table["quantity"].nunique()), 4.2, 3.0)
        for axis, (quantity, part) in zip(axes, table.groupby("quantity", sort=False), strict=True):
            draw(axis, str(quantity), part)
        self.results.figure(figure)
        shown = table[["layer", "quantity", "head", "component", "value", "normalised"]]
        body = (
            "Values as they enter the attention, means over positions where positions have their "
            "own; `normalised` is over components. Heads and components count from 1.\n\n"
            f"{markdown_table(shown.head(40))}"
        )
        if len(shown) > 40:
            body += f"\n\n{len(shown) - 40} more rows are in {self.results.path('csv').name}."
        return body

    @torch.no_grad()
    def rows(self) -> pd.DataFrame:
        """Return a row per layer, quantity, head and component."""
        rows: list[dict[str, Any]] = []
        for name, layer in self.layers.items():
            for quantity, values in layer_values(layer).items():
                total = values.sum(1, keepdim=True)
                for (head, component), value in np.ndenumerate(values.numpy()):
                    row = {"layer": self.numbers[name], "name": name, "quantity": quantity}
                    row |= {"head": head + 1, "component": component + 1, "value": float(value)}
                    share = value / float(total[head]) if quantity == "prior" else float("nan")
                    rows.append(row | {"normalised": float(share)})
        return pd.DataFrame(rows)


@torch.no_grad()
def layer_values(layer: Attention) -> dict[str, Tensor]:
    """Return the learned quantities of a layer, each (heads, components) float64 on the CPU.

    `prior` π, `variance` σ² (only where learned or unequal), `mixing` p of local by global head
    (only for linear mixing), `noise_scale` s (one row), `alpha` of entmax.
    """
    found: dict[str, Tensor] = {}
    core = layer.core
    prior, variance = getattr(core, "prior", None), getattr(core, "variance", None)
    if isinstance(prior, MixturePrior):
        count = prior.value.shape[-1] if prior.share == "head_position" else 1
        found["prior"] = prior(count).exp().mean(-1)
    if isinstance(variance, MixtureVariance) and not variance.is_equal:
        found["variance"] = variance()
    mixing, noise = getattr(core, "mixing", None), getattr(core, "noise_scale", None)
    if isinstance(mixing, HeadMixing) and mixing.mixer in ("linear", "shared", "relu_sum"):
        found["mixing"] = mixing.values(None).weights[0]
    if isinstance(noise, nn.Module):
        found["noise_scale"] = noise()[None]
    if isinstance(core, ASTCore) and core.pre_alpha is not None:
        found["alpha"] = core.alphas(core.pre_alpha)[:, None]
    return {name: values.detach().double().cpu() for name, values in found.items()}


def draw(axis: Axes, quantity: str, part: pd.DataFrame) -> None:
    """Draw a quantity: bars per layer and head, or a matrix where they would be too many."""
    groups = part.groupby(["layer", "head"], sort=False)
    components = int(part["component"].max())
    if len(groups) > _MOST_BARS or quantity == "mixing":
        matrix = part.pivot_table(index=["layer", "head"], columns="component", values="value")
        limit = float(matrix.abs().to_numpy().max()) or 1.0
        signed = bool((matrix.to_numpy() < 0).any())
        image = axis.imshow(
            matrix.to_numpy(),
            aspect="auto",
            cmap="RdBu_r" if signed else "viridis",
            vmin=-limit if signed else None,
            vmax=limit if signed else None,
        )
        labels = [f"{layer}.{head}" for layer, head in matrix.index]
        step = max(1, len(labels) // 16)
        axis.set_yticks(range(0, len(labels), step), labels[::step], fontsize=7)
        axis.set_xticks(range(components), [str(c + 1) for c in range(components)], fontsize=7)
        axis.set(xlabel=_COMPONENT[quantity], ylabel="layer.head")
        axis.figure.colorbar(image, ax=axis, shrink=0.8)
    else:
        own = quantity != "noise_scale"  # noise scales belong to the layer
        labels = [f"{layer}.{head}" if own else str(layer) for layer, head in groups.groups]
        width = 0.8 / components
        for number, values in part.groupby("component"):
            places = np.arange(len(labels)) + (int(str(number)) - (components + 1) / 2) * width
            axis.bar(places, values["value"], width, label=f"{_COMPONENT[quantity]} {number}")
        axis.set_xticks(range(len(labels)), labels, fontsize=7)
        axis.set_xlabel("layer.head" if own else "layer")
        axis.margins(y=0.25)
        if components > 1:
            axis.legend(fontsize=7, frameon=False, ncols=min(3, components))
    axis.set_title(_TITLE[quantity], fontsize=9)
