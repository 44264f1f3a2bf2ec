"""Evaluate a trained model with sparse and random approximations of attention, without tuning.

Source: value-aware attention (Gupta and Berant, 2021), section 4, figures 1 and 2, tables 1 and 2.

Each attention layer computes its exact maps; then the outputs of its heads are replaced:
  ovo        optimal-v-oblivious-r: the r largest weights, divided by their sum
  ovo_reopt  the same keys with optimal weights, for r of at most the value size plus one
  ova        optimal-v-aware-r: the best point from at most r values. Exact for r = 1 and for r
             greater than the value size; otherwise an upper estimate by a greedy search, on
             --solver_samples samples
  norm       the r largest weights times norms of values
  window     r keys around the query (--window)
  lsh        hash buckets with r keys per round and --rounds rounds (by default only for
             bidirectional layers)
  orf        --features random features with --draws draws and kinds --rows; not sparse

There are two measurements: propagated (approximate outputs are passed on; perplexity, or the
percentage of wrong predictions) and local (exact outputs are passed on; the error of each layer and
head). `--scope layers` and `--scope heads` approximate one layer or head at a time. lsh and orf
require the kernel exp(q · k / √E); the others support all variants whose outputs are weighted means
of values. Rerun an interrupted study to resume it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any, get_args

import pandas as pd
import torch

from lit_probattn.analysis.approximation import figures
from lit_probattn.analysis.approximation.layers import (
    Opened,
    checked_layers,
    replaced_cores,
)
from lit_probattn.analysis.approximation.lsh import Duplicates
from lit_probattn.analysis.approximation.measure import (
    LocalErrors,
    Score,
    Witnesses,
    observed,
    score,
    score_approximated,
)
from lit_probattn.analysis.approximation.methods import (
    ESTIMATE,
    Approximation,
    Aware,
    ByNorm,
    Hashing,
    MethodName,
    Oblivious,
    RandomFeatures,
    Reoptimised,
    SlidingWindow,
)
from lit_probattn.analysis.approximation.oracles import Window
from lit_probattn.analysis.approximation.random_features import Rows
from lit_probattn.analysis.options import SPLITS
from lit_probattn.analysis.recording import record
from lit_probattn.analysis.study import ModelStudy
from lit_probattn.base.arguments import at_least
from lit_probattn.base.errors import UnsupportedError
from lit_probattn.records.tables import counted, markdown_table

_RANKS = (1, 2, 4, 8, 16, 32, 64, 65, 128, 256, 512)
_KEY = ("scope", "method", "num_kept", "rounds", "detail", "draw")


class Approximate(ModelStudy):
    """The metric with each approximation, and the errors of each layer."""

    name, title = "approximate", "Approximations in a trained model"

    @staticmethod
    def _add_options(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--split", default="test", choices=SPLITS, help="split of the data")
        add("--num_samples", type=at_least(1), default=64, help="samples for perplexity or error")
        text = "samples for ova with 1 < r ≤ value size"
        add("--solver_samples", type=at_least(1), default=8, help=text)
        text = "samples for the errors of layers, 0 for none"
        add("--local_samples", type=at_least(0), default=8, help=text)
        add("--batch_size", type=at_least(1), default=8, help="samples per batch")
        add("--seed", type=at_least(0), default=0, help="seed of samples and draws")
        text = "methods; default: all that apply"
        add("--methods", nargs="+", choices=get_args(MethodName), help=text)
        add("--ranks", type=at_least(1), nargs="+", help="values of r; default: up to the length")
        add("--window", default="exact_r", choices=get_args(Window), help="keys that r counts")
        add("--rounds", type=at_least(1), nargs="+", default=[1, 4, 16], help="rounds of lsh")
        text, ways = "how lsh counts pairs", get_args(Duplicates)
        add("--duplicates", nargs="+", default=list(ways), choices=ways, help=text)
        add("--features", type=at_least(1), nargs="+", default=[64, 256, 1024], help="F of orf")
        rows = ["performer", "literal"]
        add("--rows", nargs="+", default=rows, choices=get_args(Rows), help="rows of orf")
        add("--draws", type=at_least(1), default=5, help="draws of orf")
        add("--scope", default="all", choices=("all", "layers", "heads"), help="approximated parts")

    def _compute(self) -> str:
        self.value_dim = next(iter(self.layers.values())).value_head_dim
        (first,) = list(self.batches(1))
        with checked_layers(self.layers), record(self.trained.task.model) as calls:
            score(self.trained.task, [first])
        length = max((call.query if call.key is None else call.key).shape[1] for call in calls)
        methods = self.choose_methods(length)
        table = self.propagated(methods)
        self.results.table(table)
        claim = figures.keys_claim(table.assign(method=figures.labels(table)))
        self.results.figure(figures.draw_metric(table), claim)
        parts = [self.explain(table, length), summary(table)]
        if self.options.local_samples:
            parts += self.local_view(methods)
        return "\n\n".join(parts)

    def batches(self, count: int) -> Iterator[dict[str, Any]]:
        """Return `count` samples in batches, equal in every call."""
        options = self.options
        return self.trained.batches(
            options.split, count, seed=options.seed, rows=options.batch_size
        )

    def count(self, wanted: int) -> int:
        """Return a number of samples, at most those of the split."""
        return min(wanted, self.trained.num_samples(self.options.split))

    # ---- approximations ------------------------------------------------------------------------

    def choose_methods(self, length: int) -> list[Approximation]:
        """Return the approximations selected by the flags.

        Without --methods: the sparse ones; with the kernel exp(q · k / √E) also random features,
        and hashing for bidirectional layers.
        """
        options, size = self.options, self.value_dim
        ranks = options.ranks or sorted({r for r in (*_RANKS, size, size + 1) if r <= length})
        names = options.methods or self._applicable()
        kinds = {kind.name: kind for kind in (Oblivious, Aware, ByNorm)}
        methods: list[Approximation] = [kinds[n](r) for n in names if n in kinds for r in ranks]
        if "ovo_reopt" in names:  # its cost grows with r³, and it is exact for r > E_v
            methods += [Reoptimised(r) for r in ranks if r <= size + 1]
        if "window" in names:
            methods += [SlidingWindow(r, options.window) for r in ranks]
        if "lsh" in names:
            kept = [r for r in ranks if r % 2 == 0 and r >= 8]
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

    def _applicable(self) -> list[str]:
        names: list[str] = ["ovo", "ovo_reopt", "ova", "norm", "window"]
        causal: list[bool] = []

        def look(opened: Opened) -> torch.Tensor:
            causal.append(opened.seen.is_causal)
            opened.pairs()
            return opened.output

        try:
            with replaced_cores(self.layers, look):
                score(self.trained.task, self.batches(1))
        except UnsupportedError:
            return names
        return [*names, "orf"] if any(causal) else [*names, "lsh", "orf"]

    # ---- the metric ----------------------------------------------------------------------------

    def propagated(self, methods: list[Approximation]) -> pd.DataFrame:
        """Return a row per scope and approximation: metric, exact metric, difference."""
        options, task, size = self.options, self.trained.task, self.value_dim
        store = self.store(_KEY, "split", "num_samples", "solver_samples", "seed", "batch_size")
        exact: dict[int, Score] = {}
        todo = [
            (_job(label, method), names, head, method)
            for label, names, head in self._scopes()
            for method in methods
        ]
        for number, (job, names, head, method) in enumerate(todo, 1):
            if store.has(**job):
                continue
            status = method.status(size)
            wanted = options.solver_samples if status == ESTIMATE else options.num_samples
            count = self.count(wanted)
            if count not in exact:
                exact[count] = score(task, self.batches(count))
            layers = {name: self.layers[name] for name in names}
            start = time.perf_counter()
            found = score_approximated(task, self.batches(count), layers, method, head)
            row = {**job, "status": status, "metric": found.metric, "value": found.value}
            row |= {"exact": exact[count].value, "difference": found.value - exact[count].value}
            row |= {"words": found.count, "samples": count, "value_dim": size}
            row["seconds"] = round(time.perf_counter() - start, 2)
            store.add(row)
            extra = [f"{k} {row[k]}" for k in ("rounds", "detail", "draw") if row[k] is not None]
            name = " ".join([f"{row['scope']} {method.name} r={method.num_kept}", *extra])
            print(f"{number}/{len(todo)} {name}: {found.value:.3f}", flush=True)
        return store.finish(job for job, *_ in todo)

    def _scopes(self) -> list[tuple[str, list[str], int | None]]:
        if self.options.scope == "all":
            return [("all", list(self.layers), None)]
        if self.options.scope == "layers":
            return [(f"layer {i}", [name], None) for name, i in self.numbers.items()]
        return [
            (f"layer {i} head {h + 1}", [name], h)
            for name, i in self.numbers.items()
            for h in range(self.layers[name].num_heads)
        ]

    # ---- text ----------------------------------------------------------------------------------

    def local_view(self, methods: list[Approximation]) -> list[str]:
        """Write the errors of layers with exact inputs; return paragraphs for the text."""
        task, samples = self.trained.task, self.count(self.options.local_samples)
        errors = observed(LocalErrors(methods), task, self.batches(samples), self.layers)
        table, skew = pd.DataFrame(errors.rows()), pd.DataFrame(errors.skew_rows())
        self.results.table(table, "local")
        self.results.table(skew, "skew")
        self.results.figure(figures.draw_local(table), figures.error_claim(table), "local")
        claim = figures.error_claim(table.assign(method=figures.labels(table)))
        self.results.figure(figures.draw_relative(table), claim, "local_mean")
        found = observed(Witnesses(), task, self.batches(samples), self.layers)
        table = table.assign(method=figures.labels(table))
        means = table.groupby(["method", "num_kept"], sort=False)["rel_error"].mean().unstack(0)
        shown = means.sort_index().reset_index().rename(columns={"num_kept": "keys or features"})
        return [
            "Relative error ‖o − õ‖ / ‖o‖ of heads whose inputs are exact, mean over layers, heads "
            "and queries with at least r visible keys, or all of their sample "
            f"({samples} samples):",
            markdown_table(shown, digits=3),
            f"Carathéodory: the outputs of {found.num_queries} queries combine at most "
            f"{found.most_keys} values (limit {found.limit}), with a largest relative error of "
            f"{found.largest_error:.1e}.",
            f"Effective support exp(entropy): mean {skew['effective_support'].mean():.1f} keys; "
            f"mass of the 16 largest weights {skew['top_16'].mean():.3f}.",
        ]

    def explain(self, table: pd.DataFrame, length: int) -> str:
        """Return the settings of the measurement, and the rows that are estimates."""
        exact = table.drop_duplicates("samples")[["samples", "words", "metric", "exact"]]
        facts = "; ".join(
            f"{row.metric} {row.exact:.4g} over {row.words} predictions of {row.samples} samples"
            for row in exact.itertuples()
        )
        options, size = self.options, int(table["value_dim"].iloc[0])
        scope, others = table["scope"].iloc[0], table["scope"].nunique() - 1
        rest = f" ({counted(others, 'other scope')}: see {self.name}.csv)" if others else ""
        return (
            f"Split {options.split}, seed {options.seed}, sequences of {length}, "
            f"{len(self.layers)} layers, value size {size}. Exact attention: {facts}. The table "
            f"and its figure show approximate attention, scope: {scope}{rest}. Value-aware rows "
            f"are exact for r = 1 and r ≥ {size + 1}; rows marked (≤) are upper estimates of a "
            "greedy search on fewer samples (compare them with the exact value on these samples). "
            "For LSH, r counts keys per round; ± is the standard deviation over draws."
        )


def _job(scope: str, method: Approximation) -> dict[str, Any]:
    """Return the columns that identify a row."""
    found = {"scope": scope, "method": method.name, "num_kept": method.num_kept}
    return {**dict.fromkeys(_KEY), **found, **method.settings}


def cell(row: dict[str, Any]) -> str:
    """Format the value of a row, the spread of its draws, and a mark for estimates."""
    text, spread = f"{row['value']:.4g}", row.get("spread", float("nan"))
    text += f" ± {spread:.2g}" if spread == spread else ""
    return text + (f" (≤; exact {row['exact']:.4g})" if row["status"] == ESTIMATE else "")


def summary(table: pd.DataFrame) -> str:
    """Return the metric, averaged over draws, by number of keys (rows) and method (columns)."""
    frame = table[table["scope"] == table["scope"].iloc[0]].copy()
    frame["method"] = figures.labels(frame)
    cells = frame.groupby(["num_kept", "method"], sort=False).agg(
        value=("value", "mean"),
        spread=("value", "std"),
        status=("status", "first"),
        exact=("exact", "first"),
    )
    cells["text"] = [cell(row) for row in cells.to_dict("records")]
    wide = cells["text"].unstack("method").sort_index()
    wide = wide[list(dict.fromkeys(frame["method"]))].fillna("–").reset_index()
    return markdown_table(wide.rename(columns={"num_kept": "keys or features"}))
