"""What the study `approximate` says of its rows, and its view of single layers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd

from lit_probattn.analysis.approximation import figures
from lit_probattn.analysis.approximation.measure import local_errors, verify_caratheodory
from lit_probattn.analysis.approximation.methods import ESTIMATE, Approximation
from lit_probattn.analysis.results import Results, markdown_table
from lit_probattn.training.trained import Trained


def summary(table: pd.DataFrame) -> str:
    """A table of the metric: a row per number of keys, a column per method; means over draws."""
    frame = table[table["scope"] == table["scope"].iloc[0]].copy()
    frame["method"] = figures.labels(frame)
    cells = frame.groupby(["num_kept", "method"], sort=False).agg(
        value=("value", "mean"),
        spread=("value", "std"),
        status=("status", "first"),
        exact=("exact", "first"),
    )
    cells["text"] = [_cell(row) for row in cells.to_dict("records")]
    wide = cells["text"].unstack("method").sort_index()
    wide = wide[list(dict.fromkeys(frame["method"]))].fillna("–").reset_index()
    return markdown_table(wide.rename(columns={"num_kept": "keys or features"}))


def _cell(row: dict[str, Any]) -> str:
    text = f"{row['value']:.4g}"
    text += f" ± {row['spread']:.2g}" if row["spread"] == row["spread"] else ""
    return text + (f" (≤; exact {row['exact']:.4g})" if row["status"] == ESTIMATE else "")


def explain(table: pd.DataFrame, options: argparse.Namespace, length: int, trained: Trained) -> str:
    """Say what was measured, and which rows are estimates."""
    exact = table.drop_duplicates("samples")[["samples", "words", "metric", "exact"]]
    facts = "; ".join(
        f"{row.metric} {row.exact:.4g} over {row.words} words of {row.samples} samples"
        for row in exact.itertuples()
    )
    size = int(table["value_dim"].iloc[0])
    return (
        f"Split {options.split}, seed {options.seed}, sequences of {length}, "
        f"{len(trained.layers)} layers, value size {size}. Exact attention: {facts}. Below, the "
        f"same with approximate attention, scope: {options.scope}. Value-aware rows are exact for "
        f"r = 1 and r ≥ {size + 1}; those marked (≤) are upper estimates by a greedy search, on "
        "fewer "
        "samples (compare them with the exact value of those). LSH's r counts keys per round; ± is "
        "the standard deviation over draws."
    )


def local_view(
    trained: Trained,
    options: argparse.Namespace,
    methods: list[Approximation],
    results: Results,
    batches: Callable[[], Iterator[dict[str, Any]]],
) -> list[str]:
    """Write the errors of layers with exact inputs; return paragraphs about them."""
    errors = local_errors(trained.task, batches(), trained.layers, methods)
    table, skew = pd.DataFrame(errors.rows()), pd.DataFrame(errors.skew_rows())
    results.table(table, "local")
    results.table(skew, "skew")
    results.figure(figures.draw_local(table), "local")
    results.figure(figures.draw_relative(table), "local_mean")
    found = verify_caratheodory(trained.task, batches(), trained.layers)
    table = table.assign(method=figures.labels(table))
    means = table.groupby(["method", "num_kept"], sort=False)["rel_error"].mean().unstack(0)
    shown = means.sort_index().reset_index().rename(columns={"num_kept": "keys or features"})
    return [
        f"Relative error ‖o − õ‖ / ‖o‖ of heads whose inputs are exact, mean over layers, heads "
        f"and queries with at least r visible keys ({options.local_samples} samples):",
        markdown_table(shown, digits=3),
        f"Carathéodory: for {found.num_queries} queries, outputs from at most {found.most_keys} "
        f"values (limit {found.limit}) with a largest relative error of {found.largest_error:.1e}.",
        f"Effective support exp(entropy): mean {skew['effective_support'].mean():.1f} keys; mass "
        f"of the 16 largest weights {skew['top_16'].mean():.3f}.",
    ]
