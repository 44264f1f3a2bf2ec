"""Negative log-likelihood of queries under the mixture given by a layer's keys.

Source: MGK, ICML 2022, section 3.4, which does not define it. Reported, with normalised priors and
L the number of allowed keys of a query:
    kernel_nll   −log( 1/L Σ_j Σ_r π_r exp(−‖q − k_jr‖² / 2σ_r²) )
    density_nll  the same with each Gaussian divided by (2π σ_r²)^(E/2)
and both divided by the head size E. Values are means over real queries, heads and samples. Softmax
attention is treated as one Gaussian per key with σ² = √E, MGK's baseline.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from lit_probattn.analysis.drawing import BLUE
from lit_probattn.analysis.recording import LayerCall
from lit_probattn.analysis.study import ModelStudy
from lit_probattn.attention.mgk.functions import MGK, component_scores
from lit_probattn.attention.numerics import compute_dtype, repeat_heads, repeat_rows
from lit_probattn.base.errors import ConfigError
from lit_probattn.records.figures import panels
from lit_probattn.records.tables import markdown_table, span

_COLUMNS = ("kernel_nll", "density_nll", "kernel_nll_per_dim", "density_nll_per_dim")


class Likelihood(ModelStudy):
    """Likelihoods of queries, with means per layer and head."""

    name, title = "query_likelihood", "Likelihood of queries"
    samples = (64, 1024)

    def _compute(self) -> str:
        if not any(layer.core.has_gaussians for layer in self.layers.values()):
            raise ConfigError(
                "no layer is a mixture of Gaussians: query likelihood needs MGKAttention, or "
                "SoftmaxAttention (one Gaussian per key)"
            )
        rows = self.rows()
        table = layer_means(rows)
        self.results.table(table)
        means = table.groupby("layer")[list(_COLUMNS)].mean().reset_index()
        claim = (
            f"Mean negative log-likelihood of queries by layer: {span(means['kernel_nll'])} nats "
            f"(kernel), {span(means['density_nll_per_dim'])} nats per dimension (density)"
        )
        self.results.figure(draw(table), claim)
        return (
            f"Negative log-likelihood of queries in nats, {rows['sample'].nunique()} samples of "
            f"the {self.options.split} split, {int(rows['num_queries'].sum())} queries x heads x "
            f"layers. Mean over heads:\n\n{markdown_table(means)}"
        )

    def rows(self) -> pd.DataFrame:
        """Return a row per layer, sequence and head, with means over its queries."""
        key = ("layer", "sample", "part", "head")
        store = self.store(key, "split", "num_samples", "max_len", "seed")
        for one in self.sequences(of=lambda layer: layer.core.has_gaussians):
            place, heads = self.place(one), one.call.layer.num_heads
            if store.has(**place, head=heads):
                continue
            nll = {name: values[0] for name, values in query_nll(one.call).items()}
            for head in range(heads):
                counted = int(nll["kernel_nll"][head].isfinite().sum())
                means = {name: float(values[head].nanmean()) for name, values in nll.items()}
                store.add({**place, "head": head + 1, "num_queries": counted, **means})
        return store.finish()


@torch.no_grad()
def query_nll(call: LayerCall) -> dict[str, Tensor]:
    """Return the negative log-likelihoods of all queries of a call, by name, (S, H, N) each.

    Fully masked queries are NaN.
    """
    parts = mixture(call)
    allowed = call.allowed()
    count = allowed.sum(-1).to(parts.query.dtype)
    found = {}
    for name, density in (("kernel_nll", False), ("density_nll", True)):
        values = log_kernel(parts, density=density).masked_fill(~allowed, float("-inf"))
        nll = count.log() - values.logsumexp(-1)
        found[name] = nll.masked_fill(count == 0, float("nan"))
        found[f"{name}_per_dim"] = found[name] / parts.query.shape[-1]
    return found


def layer_means(rows: pd.DataFrame) -> pd.DataFrame:
    """Return means over queries per layer and head."""
    weighted = rows[list(_COLUMNS)].mul(rows["num_queries"], axis=0)
    keys = [rows["layer"], rows["head"]]
    means = weighted.groupby(keys).sum().div(rows["num_queries"].groupby(keys).sum(), axis=0)
    return means.reset_index()


def draw(table: pd.DataFrame) -> Figure:
    """Draw the kernel and density values, one dot per head."""
    figure, axes = panels(1, 2, 4.0, 3.0)
    for axis, column in zip(axes[0], ("kernel_nll", "density_nll_per_dim"), strict=True):
        for layer, part in table.groupby("layer"):
            axis.plot([layer] * len(part), part[column], "o", ms=5, alpha=0.6, color=BLUE)
            axis.plot([layer], [part[column].mean()], "_", ms=22, color="black")
        axis.set_xticks(sorted(table["layer"].unique()))
        axis.set(xlabel="layer", ylabel="nats per dimension" if "dim" in column else "nats")
        axis.set_xlim(table["layer"].min() - 0.5, table["layer"].max() + 0.5)
        axis.set_title("density, per dimension" if "dim" in column else "kernel", fontsize=9)
    figure.supxlabel("dots: heads, dashes: mean", fontsize=8)
    return figure


# ---- mixtures ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mixture:
    """The keys of a call as a mixture."""

    query: Tensor  # (S, H, N, E)
    key: Tensor  # (S, H, K, L, E)
    prior: Tensor  # π normalised over components, (H, K, 1 or L)
    variance: Tensor  # σ², (H, K)


def mixture(call: LayerCall) -> Mixture:
    """Return the mixture of a call whose core `has_gaussians`; priors are normalised."""
    heads = call.call()
    num_heads, query = heads.query.shape[1], heads.query.to(compute_dtype(heads.query))
    key, log_prior, variance = call.layer.core.gaussians(heads)
    if log_prior is None:
        prior = torch.full((*variance.shape, 1), 1.0 / variance.shape[1]).to(query)
    else:
        prior = log_prior.softmax(1)
    parts = (repeat_rows(part, num_heads) for part in (prior, variance))
    return Mixture(query, repeat_heads(key.to(query), num_heads), *parts)


def log_kernel(parts: Mixture, *, density: bool) -> Tensor:
    """Return log Σ_r π_r exp(−‖q − k_r‖² / 2σ_r²) of all pairs, (S, H, N, L).

    `density` divides each Gaussian by (2π σ²)^(E/2), so that it integrates to one.
    """
    arguments = MGK(parts.prior.log(), parts.variance, include_log_det=density)
    scores = component_scores(parts.query, parts.key, arguments)
    total = scores.logsumexp(2)
    if density:
        total = total - parts.query.shape[-1] / 2.0 * math.log(2.0 * math.pi)
    return total
