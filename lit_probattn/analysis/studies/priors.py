"""Learned parameters other than projections: priors, variances, mixing weights, noise scales.

Source: MGK, ICML 2022, table 8 (clamped priors as used, and normalised over components); FiSH,
NeurIPS 2022, Eq. (8) (mixing weights p_kj and noise scales s_k). A core returns these parameters by
`learned`. Only the checkpoint is read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes

from lit_probattn.analysis.study import ModelStudy
from lit_probattn.attention.core import ParameterTable
from lit_probattn.base.errors import ConfigError
from lit_probattn.records.figures import panels
from lit_probattn.records.tables import markdown_table, span

_MOST_BARS = 24


class Priors(ModelStudy):
    """Learned quantities, with a row per layer, quantity, head and component."""

    name, title = "priors", "Learned priors and mixing weights"
    with_data = False

    def _compute(self) -> str:
        table = self.rows()
        if table.empty:
            raise ConfigError(
                "the attention layers have only projections as parameters: expected a variant with "
                "priors, variances or mixing weights"
            )
        self.results.table(table)
        learned = {k: v for layer in self.layers.values() for k, v in layer.core.learned().items()}
        figure, (axes,) = panels(1, max(1, table["quantity"].nunique()), 4.2, 3.0)
        for axis, (quantity, part) in zip(axes, table.groupby("quantity", sort=False), strict=True):
            draw(axis, learned[str(quantity)], part)
        claim = "; ".join(
            f"{learned[str(quantity)].title} from {span(part['value'])}"
            for quantity, part in table.groupby("quantity", sort=False)
        )
        self.results.figure(figure, f"Learned values: {claim}")
        shown = table[["layer", "quantity", "head", "component", "value", "normalised"]]
        body = (
            "Values used by the attention, averaged over positions if they depend on the "
            "position; `normalised`: over components. Heads and components are numbered from "
            f"1.\n\n{markdown_table(shown.head(40))}"
        )
        if len(shown) > 40:
            body += f"\n\n{len(shown) - 40} more rows are in {self.results.path('csv').name}."
        return body

    @torch.no_grad()
    def rows(self) -> pd.DataFrame:
        """Return a row per layer, quantity, head and component."""
        rows: list[dict[str, Any]] = []
        for name, layer in self.layers.items():
            for quantity, found in layer.core.learned().items():
                values = found.values.double().cpu()
                total = values.sum(1, keepdim=True)
                for (head, component), value in np.ndenumerate(values.numpy()):
                    row = {"layer": self.numbers[name], "name": name, "quantity": quantity}
                    row |= {"head": head + 1, "component": component + 1, "value": float(value)}
                    share = value / float(total[head]) if found.is_share else float("nan")
                    rows.append(row | {"normalised": float(share)})
        return pd.DataFrame(rows)


def draw(axis: Axes, quantity: ParameterTable, part: pd.DataFrame) -> None:
    """Draw a quantity as bars per layer and head, or as a matrix if there are too many."""
    groups = part.groupby(["layer", "head"], sort=False)
    components = int(part["component"].max())
    if len(groups) > _MOST_BARS or quantity.is_matrix:
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
        axis.set(xlabel=quantity.component, ylabel="layer.head")
        axis.figure.colorbar(image, ax=axis, shrink=0.8)
    else:
        own = not quantity.of_layer
        labels = [f"{layer}.{head}" if own else str(layer) for layer, head in groups.groups]
        width = 0.8 / components
        for number, values in part.groupby("component"):
            places = np.arange(len(labels)) + (int(str(number)) - (components + 1) / 2) * width
            axis.bar(places, values["value"], width, label=f"{quantity.component} {number}")
        axis.set_xticks(range(len(labels)), labels, fontsize=7)
        axis.set_xlabel("layer.head" if own else "layer")
        axis.margins(y=0.25)
        if components > 1:
            axis.legend(fontsize=7, frameon=False, ncols=min(3, components))
    axis.set_title(quantity.title, fontsize=9)
