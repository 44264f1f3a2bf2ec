"""Responsibilities of mixture components for tokens, and usage of components.

Source: MGK, ICML 2022, Eq. (8). With γ_ijr the responsibility of component r of key j for query i
(MGK, and MLK mixed after the feature map), and P_ij the attention weight:
    query_share u_ir  = Σ_j P_ij γ_ijr             share of component r in the attention of query i
    key_share   c_jr  = Σ_i P_ij γ_ijr / Σ_i P_ij  share of component r in the attention to key j
    usage       U_r   = mean of u_ir over real queries
    entropy of u_i in nats, and the mutual information of key and component for query i:
    I_i = Σ_jr P_ij γ_ijr log(γ_ijr / u_ir).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from lit_probattn.analysis.drawing import each_head
from lit_probattn.analysis.recording import LayerCall
from lit_probattn.analysis.sampling import token_words
from lit_probattn.analysis.study import ModelStudy
from lit_probattn.base.errors import ConfigError
from lit_probattn.records.figures import panels
from lit_probattn.records.tables import markdown_table, span

_MOST_HEADS = 4  # drawn per layer


class Responsibilities(ModelStudy):
    """Usage of components per layer and head, and shares of the tokens of the longest sample."""

    name, title = "responsibilities", "Responsibilities of components"
    samples = (16, 1024)

    @staticmethod
    def _add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--tokens", type=int, default=32, help="tokens to draw")

    def _compute(self) -> str:
        options, results = self.options, self.results
        if not any(layer.core.has_components for layer in self.layers.values()):
            raise ConfigError(
                "no layer has components with responsibilities: expected MGKAttention, or "
                "MLKAttention with mix=after"
            )
        rows: list[dict[str, Any]] = []
        for one in self.sequences(of=lambda layer: layer.core.has_components):
            rows += [self.place(one) | row for row in usage_rows(token_shares(one.call))]
        usage, shown = pd.DataFrame(rows), self.longest
        found = {self.numbers[one.layer]: token_shares(one.call) for one in shown}
        ids = shown[0].tokens
        tokens = [token_rows(shares, ids).assign(layer=layer) for layer, shares in found.items()]
        table = usage_table(usage)
        results.table(table)
        results.table(pd.concat(tokens), "tokens", digits=4)
        shares = {layer: parts["query_share"] for layer, parts in found.items()}
        words = [] if ids is None else token_words(self.trained.data, ids[: options.tokens])
        largest = 100 * table.groupby(["layer", "head"])["usage"].max()
        claim = (
            f"The most used component of a head receives {span(largest, '.0f')} % of the attention "
            f"(equal use: {100 / table['component'].max():.0f} %)"
        )
        results.figure(draw(shares, options.tokens, words), claim)
        return (
            f"Usage of components over {usage['sample'].nunique()} samples of the "
            f"{options.split} split: share of component r in the attention weight, "
            "entropy over components per query, and mutual information of key and component per "
            "query, in nats (means over queries and samples). Tokens of sample "
            f"{shown[0].sample_id}, the longest drawn, are in "
            f"{results.path('csv', 'tokens').name} and in the "
            f"figure.\n\n{markdown_table(table.head(40))}"
        )


@torch.no_grad()
def token_shares(call: LayerCall) -> dict[str, Tensor]:
    """Return the shares of a single sequence on the CPU; see the module docstring.

    Returns:
        `query_share` (H, K, N), `key_share` (H, K, L), `entropy` and `mutual_information` (H, N),
        `real` (N,) bool.
    """
    weights, shares = call.layer.core.posterior(call.call())
    real = call.real[0]
    weights = weights[0] * real[None, :, None]  # (H, N, L)
    joint = weights[:, None] * shares[0]  # (H, K, N, L)
    query_share = joint.sum(-1)
    received = weights.sum(1)[:, None]
    key_share = joint.sum(2) / received.masked_fill(received == 0, 1.0)
    entropy = torch.special.entr(query_share).sum(1)
    inside = torch.special.xlogy(joint, shares[0]).sum((1, 3))
    found = {
        "query_share": query_share,
        "key_share": key_share,
        "entropy": entropy,
        "mutual_information": inside + entropy,
        "real": real,
    }
    return {name: values.cpu() for name, values in found.items()}


def usage_rows(shares: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Return means over real queries as a dict per head and component."""
    real = shares["real"]
    usage = shares["query_share"][..., real].mean(-1)
    entropy = shares["entropy"][:, real].mean(-1)
    information = shares["mutual_information"][:, real].mean(-1)
    return [
        {
            "head": head + 1,
            "component": component + 1,
            "usage": float(usage[head, component]),
            "entropy": float(entropy[head]),
            "mutual_information": float(information[head]),
        }
        for head in range(usage.shape[0])
        for component in range(usage.shape[1])
    ]


def usage_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return means over sequences with a row per layer, head and component."""
    columns = ["usage", "entropy", "mutual_information"]
    return rows.groupby(["layer", "head", "component"])[columns].mean().reset_index()


def token_rows(shares: dict[str, Tensor], tokens: list[int] | None = None) -> pd.DataFrame:
    """Return a row per head, component and real position, with its token."""
    places = shares["real"].nonzero()[:, 0]
    heads, components, _ = shares["query_share"].shape
    index = pd.MultiIndex.from_product(
        [range(1, heads + 1), range(1, components + 1), places.tolist()],
        names=["head", "component", "position"],
    )
    columns = {n: shares[n][..., places].flatten().numpy() for n in ("query_share", "key_share")}
    table = pd.DataFrame(columns, index=index).reset_index()
    if tokens is not None:
        table.insert(3, "token", [tokens[place] for place in table["position"]])
    return table


def draw(found: dict[int, Tensor], tokens: int, words: Sequence[str] = ()) -> Figure:
    """Draw the shares of components per query as stacked bars, by layer and head.

    `found` are query shares (H, K, N) by layer number; `words` label the queries.
    """
    heads = min(_MOST_HEADS, max(shares.shape[0] for shares in found.values()))
    figure, axes = panels(len(found), heads, 3.2, 2.0, sharex=True, sharey=True)
    for axis, layer, head in each_head(axes, found, lambda layer, head: head < len(found[layer])):
        values = found[layer][head, :, :tokens].double().numpy()
        places = range(values.shape[1])
        labels = [f"component {r + 1}" for r in range(len(values))]
        axis.stackplot(places, values, labels=labels, step="mid", linewidth=0)
        axis.set(xlim=(0, max(1, values.shape[1] - 1)), ylim=(0, 1))
        axis.tick_params(labelsize=7)
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if words:
            axis.set_xticks(range(len(words)), words, rotation=90, fontsize=6)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=4, fontsize=8, frameon=False)
    figure.supxlabel("query", fontsize=9)
    figure.supylabel("share of the attention", fontsize=9)
    return figure
