"""Which component of a mixture answers: responsibilities of tokens, usage of components.

Source: MGK, ICML 2022, Eq. (8); specification of the extensions, 8. With γ_ijr the responsibility
of component r of key j for query i (MGK, and MLK mixed after the feature map), and P_ij the
attention weight:
    query_share u_ir  = Σ_j P_ij γ_ijr             which component query i reads
    key_share   c_jr  = Σ_i P_ij γ_ijr / Σ_i P_ij  by which component key j is read
    usage       U_r   = mean of u_ir over real queries
    entropy of u_i in nats, and the mutual information of key and component for query i:
    I_i = Σ_jr P_ij γ_ijr log(γ_ijr / u_ir).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence as Sequence_
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from lit_probattn.analysis.options import add_data_arguments, add_model_arguments
from lit_probattn.analysis.recording import LayerCall
from lit_probattn.analysis.results import AnalysisError, Results, describe
from lit_probattn.analysis.sampling import Sequence, layer_numbers, longest, sequences
from lit_probattn.records.tables import markdown_table, panels
from lit_probattn.training.trained import open_trained


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_model_arguments(parser)
    add_data_arguments(parser, num_samples=16, max_len=1024)
    parser.add_argument("--tokens", type=int, default=32, help="tokens to draw; default 32")
    parser.add_argument("--max_heads", type=int, default=4, help="heads to draw; default 4")


def run(options: argparse.Namespace) -> None:
    """Compute and write."""
    trained = open_trained(options)
    if not any(layer.core.has_components for layer in trained.layers.values()):
        raise AnalysisError(
            "no layer has components with responsibilities: expected MGKAttention, or MLKAttention "
            "with mix=after"
        )
    numbers = layer_numbers(list(trained.layers))
    usage: list[dict[str, Any]] = []
    shown: list[Sequence] = []
    for batch in sequences(trained, options):
        mixtures = [one for one in batch if one.call.layer.core.has_components]
        for one in mixtures:
            columns = {"layer": numbers[one.layer], "sample": one.sample_id, "part": one.part}
            usage += [columns | row for row in usage_rows(token_shares(one.call))]
        shown = longest([*shown, *mixtures])
    found = {numbers[one.layer]: token_shares(one.call) for one in shown}
    ids = shown[0].tokens
    tokens = [token_rows(shares, ids).assign(layer=layer) for layer, shares in found.items()]
    table = usage_table(pd.DataFrame(usage))
    results = Results(options.out, "responsibilities", options.command)
    results.table(table)
    results.table(pd.concat(tokens), "tokens", digits=4)
    shares = {layer: parts["query_share"] for layer, parts in found.items()}
    words = [] if ids is None else token_words(trained.data, ids[: options.tokens])
    results.figure(draw(shares, options.tokens, options.max_heads, words))
    body = (
        f"Usage of components over {pd.DataFrame(usage)['sample'].nunique()} samples of the "
        f"{options.split} split: share of the attention that component r carries, entropy over "
        "components per query, and mutual information of key and component per query, in nats "
        f"(means over queries and samples). Tokens of sample {shown[0].sample_id}, the longest "
        f"drawn, are in {results.path('csv', 'tokens').name} and in the picture."
        f"\n\n{markdown_table(table.head(40))}"
    )
    results.text("Responsibilities of components", describe(trained), body)


@torch.no_grad()
def token_shares(call: LayerCall) -> dict[str, Tensor]:
    """Return the shares of a single sequence, on the CPU; see the module.

    Returns:
        `query_share` (H, K, N), `key_share` (H, K, L), `entropy` and `mutual_information` (H, N),
        `real` (N,) bool.
    """
    weights, shares = call.layer.core.posterior(call.call())
    real = torch.ones(weights.shape[2], dtype=torch.bool, device=weights.device)
    if call.key is None and call.key_mask is not None:
        real = call.key_mask[0]
    weights = weights[0] * real[None, :, None]  # (H, N, L)
    joint = weights[:, None] * shares[0]  # (H, K, N, L)
    query_share = joint.sum(-1)
    received = weights.sum(1)[:, None]
    key_share = joint.sum(2) / received.masked_fill(received == 0, 1.0)
    entropy = -torch.special.xlogy(query_share, query_share).sum(1)
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
    """Return means over real queries, a dict per head and component."""
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
    """Return means over sequences, a row per layer, head and component."""
    columns = ["usage", "entropy", "mutual_information"]
    return rows.groupby(["layer", "head", "component"])[columns].mean().reset_index()


def token_rows(shares: dict[str, Tensor], tokens: list[int] | None = None) -> pd.DataFrame:
    """Return a row per head, component and real position, with the token there."""
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


def token_words(data: Any, tokens: list[int]) -> list[str]:
    """Return the words of tokens, if the DataModule can decode them; else nothing."""
    decode = getattr(data, "decode", None)
    return [] if decode is None else [str(decode([token])).strip() for token in tokens]


def draw(
    found: dict[int, Tensor], tokens: int, max_heads: int, words: Sequence_[str] = ()
) -> Figure:
    """Draw, per layer and head, the component that each query reads (stacked shares).

    Args:
        found: query shares (H, K, N) of layers, by their number.
        tokens: queries to draw.
        max_heads: heads to draw.
        words: of the queries, to write below them.
    """
    heads = min(max_heads, max(shares.shape[0] for shares in found.values()))
    figure, axes = panels(len(found), heads, 3.2, 2.0, sharex=True, sharey=True)
    for row, (number, shares) in zip(axes, found.items(), strict=True):
        for head, axis in enumerate(row):
            if head >= len(shares):
                axis.remove()
                continue
            values = shares[head, :, :tokens].double().numpy()
            places = range(values.shape[1])
            labels = [f"component {r + 1}" for r in range(len(values))]
            axis.stackplot(places, values, labels=labels, step="mid", linewidth=0)
            axis.set(xlim=(0, max(1, values.shape[1] - 1)), ylim=(0, 1))
            axis.tick_params(labelsize=7)
            axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            if words:
                axis.set_xticks(range(len(words)), words, rotation=90, fontsize=6)
            if row is axes[0]:
                axis.set_title(f"head {head + 1}", fontsize=9)
            if head == 0:
                axis.set_ylabel(f"layer {number}", fontsize=9)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=4, fontsize=8, frameon=False)
    figure.supxlabel("query", fontsize=9)
    figure.supylabel("share of the attention", fontsize=9)
    return figure
