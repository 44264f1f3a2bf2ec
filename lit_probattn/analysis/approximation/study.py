"""Sparse and random approximations swapped into a trained model at evaluation; nothing is tuned.

Source: value-aware attention (Gupta and Berant, 2021), section 4, figures 1 and 2, tables 1 and 2.

Every attention layer computes its exact maps; then its heads' outputs are replaced:
  ovo        optimal-v-oblivious-r: the r largest weights, divided by their sum
  ovo_reopt  the same keys with the best weights, for r of at most the value size plus one
  ova        optimal-v-aware-r: the best point from at most r values. Exact for r = 1 and for r
             from the value size plus one on; between, an upper estimate by a greedy search, on
             --solver_samples samples
  norm       the r largest weights times norms of values
  window     r keys around the query (--window)
  lsh        hash buckets, r keys per round; with --rounds (layers that see both sides only, unless
             it is named)
  orf        random features, --features of them, --draws draws, --rows kinds; not sparse

Two views: propagated (approximate outputs are passed on; perplexity, or the percentage of wrong
predictions) and local (exact outputs are passed on; the error of every layer and head). `--scope
layers` and `--scope heads` approximate one layer or head at a time. lsh and orf need the kernel
exp(q · k / √E); the others work with every variant whose outputs are weighted means of values.
An interrupted study goes on where it stopped.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pandas as pd
import torch

from lit_probattn.analysis.approximation import figures
from lit_probattn.analysis.approximation.layers import (
    NotApplicableError,
    checked_layers,
    replaced_cores,
)
from lit_probattn.analysis.approximation.measure import (
    Score,
    local_errors,
    score,
    score_approximated,
    verify_caratheodory,
)
from lit_probattn.analysis.approximation.methods import (
    ESTIMATE,
    Approximation,
    Hashing,
    MethodName,
    RandomFeatures,
    SlidingWindow,
    sparse_methods,
)
from lit_probattn.analysis.approximation.oracles import Window
from lit_probattn.analysis.approximation.random_features import Rows
from lit_probattn.analysis.options import add_model_arguments
from lit_probattn.analysis.results import AnalysisError, Results, describe
from lit_probattn.records.rows import RowStore
from lit_probattn.records.tables import markdown_table
from lit_probattn.training.trained import Trained, identity, open_trained

STUDY = "approximate"
_RANKS = (1, 2, 4, 8, 16, 32, 64, 65, 128, 256, 512)
_KEY = ("scope", "method", "num_kept", "rounds", "detail", "draw")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_model_arguments(parser)
    add = parser.add_argument
    add("--split", choices=("val", "test"), default="test", help="default: test")
    add("--num_samples", type=int, default=64, help="samples for perplexity or error; default 64")
    add("--solver_samples", type=int, default=8, help="samples for ova with 1 < r ≤ value size")
    add("--local_samples", type=int, default=8, help="samples for the errors of layers, 0 for none")
    add("--batch_size", type=int, default=8, help="samples of a batch; default 8")
    add("--seed", type=int, default=0, help="decides which samples and draws; default 0")
    add("--methods", nargs="+", choices=get_args(MethodName), help="default: all that apply")
    add("--ranks", nargs="+", type=int, help="values of r; default: up to the sequence length")
    add("--window", choices=get_args(Window), default="exact_r", help="which keys r counts")
    add("--rounds", nargs="+", type=int, default=[1, 4, 16], help="rounds of lsh; default 1 4 16")
    add("--lsh_ranks", nargs="+", type=int, help="r of lsh; default: the even --ranks above 7")
    add("--duplicates", nargs="+", choices=("count", "union"), default=["count", "union"])
    add("--features", nargs="+", type=int, default=[64, 256, 1024], help="F of orf")
    add("--rows", nargs="+", choices=get_args(Rows), default=["performer", "literal"])
    add("--draws", type=int, default=5, help="draws of orf; default 5")
    add("--scope", choices=("all", "layers", "heads"), default="all", help="what is approximated")


def run(options: argparse.Namespace) -> None:
    """Compute and write."""
    _check(options)
    trained = open_trained(options)
    results = Results(options.out, STUDY, options.command)
    (first,) = list(_batches(trained, options, 1))
    with torch.no_grad(), checked_layers(trained.layers):
        score(trained.task, [first])
    length = int(first["inputs"].shape[1])
    methods = choose_methods(trained, options, length)
    table = propagated(trained, options, methods, results)
    results.table(table)
    results.figure(figures.draw_metric(table))
    parts = [explain(table, options, length, trained), summary(table)]
    if options.local_samples:
        parts += local_view(
            *(trained, options, methods, results),
            lambda: _batches(trained, options, options.local_samples),
        )
    text = "\n\n".join(parts)
    results.text("Approximations swapped into a trained model", describe(trained), text)


def _check(options: argparse.Namespace) -> None:
    for name in ("num_samples", "solver_samples", "batch_size", "draws"):
        if getattr(options, name) < 1:
            raise AnalysisError(f"--{name} must be at least 1, received {getattr(options, name)}")
    for name in ("ranks", "rounds", "features", "lsh_ranks"):
        given = getattr(options, name)
        if given is not None and min(given) < 1:
            raise AnalysisError(f"--{name} must be at least 1, received {min(given)}")


def _batches(trained: Trained, options: argparse.Namespace, count: int) -> Iterator[dict[str, Any]]:
    return trained.batches(options.split, count, seed=options.seed, rows=options.batch_size)


# ---- which approximations ----------------------------------------------------------------------


def choose_methods(
    trained: Trained, options: argparse.Namespace, length: int
) -> list[Approximation]:
    """Return all approximations that the flags ask for.

    Without --methods: the sparse ones; with a kernel exp(q · k / √E) random features too, and
    hashing if layers see both sides.
    """
    size = next(iter(trained.layers.values())).value_head_dim
    ranks = options.ranks or sorted({r for r in (*_RANKS, size, size + 1) if r <= length})
    names = options.methods or _applicable(trained, options)
    sparse = [name for name in names if name not in ("lsh", "orf", "window", "ovo_reopt")]
    methods = sparse_methods(sparse, ranks)
    if "ovo_reopt" in names:  # its cost grows with r³, and nothing is left beyond the value size
        methods += sparse_methods(["ovo_reopt"], [r for r in ranks if r <= size + 1])
    if "window" in names:
        methods += [SlidingWindow(r, options.window) for r in ranks]
    if "lsh" in names:
        kept = options.lsh_ranks or [r for r in ranks if r % 2 == 0 and r >= 8]
        methods += [
            Hashing(r, rounds, duplicates, options.seed)
            for r in kept
            for rounds in options.rounds
            for duplicates in options.duplicates
            if rounds > 1 or duplicates == options.duplicates[0]
        ]
    if "orf" in names:
        methods += [
            RandomFeatures(f, rows, options.seed + draw)
            for f in options.features
            for rows in options.rows
            for draw in range(options.draws)
        ]
    return methods


def _applicable(trained: Trained, options: argparse.Namespace) -> list[str]:
    names: list[str] = ["ovo", "ovo_reopt", "ova", "norm", "window"]
    found: list[bool] = []

    def look(opened: Any) -> Any:
        found.append(opened.is_causal)
        opened.pairs()
        return opened.output

    try:
        with replaced_cores(trained.layers, look):
            score(trained.task, _batches(trained, options, 1))
    except NotApplicableError:
        return names
    return [*names, "orf"] if any(found) else [*names, "lsh", "orf"]


# ---- the metric --------------------------------------------------------------------------------


def propagated(
    trained: Trained, options: argparse.Namespace, methods: list[Approximation], results: Results
) -> pd.DataFrame:
    """Return a row per scope and approximation: the metric, the exact model's, and the gap."""
    settings = {
        "study": STUDY,
        "model": identity(trained),
        **{k: getattr(options, k) for k in ("split", "num_samples", "solver_samples", "seed")},
        "batch_size": options.batch_size,
    }
    store = RowStore(results.path("partial.jsonl"), settings, _KEY)
    exact: dict[int, Score] = {}
    size = next(iter(trained.layers.values())).value_head_dim
    todo = [(scope, method) for scope in _scopes(trained, options) for method in methods]
    for number, ((label, names, head), method) in enumerate(todo, 1):
        row: dict[str, Any] = {name: None for name in _KEY}
        row |= {"scope": label, "method": method.name, "num_kept": method.num_kept}
        row |= method.settings
        if store.has(**row):
            continue
        status = method.status(size)
        count = options.solver_samples if status == ESTIMATE else options.num_samples
        if count not in exact:
            exact[count] = score(trained.task, _batches(trained, options, count))
        layers = {name: trained.layers[name] for name in names}
        start = time.perf_counter()
        found = score_approximated(
            trained.task, _batches(trained, options, count), layers, method, head
        )
        row |= {"status": status, "metric": found.metric, "value": found.value}
        row |= {"exact": exact[count].value, "difference": found.value - exact[count].value}
        row |= {"words": found.count, "samples": count, "value_dim": size}
        row["seconds"] = round(time.perf_counter() - start, 2)
        store.add(row)
        print(f"{number}/{len(todo)} {_name(row)}: {found.value:.3f}", flush=True)
    return store.finish()


def _name(row: dict[str, Any]) -> str:
    extra = [f"{k} {row[k]}" for k in ("rounds", "detail", "draw") if row.get(k) is not None]
    return " ".join([f"{row['scope']} {row['method']} r={row['num_kept']}", *extra])


def _scopes(
    trained: Trained, options: argparse.Namespace
) -> list[tuple[str, list[str], int | None]]:
    names = list(trained.layers)
    if options.scope == "all":
        return [("all", names, None)]
    if options.scope == "layers":
        return [(f"layer {i}", [name], None) for i, name in enumerate(names, 1)]
    return [
        (f"layer {i} head {h}", [name], h)
        for i, name in enumerate(names, 1)
        for h in range(trained.layers[name].num_heads)
    ]


# ---- what is said about it ---------------------------------------------------------------------


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
