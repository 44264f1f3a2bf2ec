"""Theorems 1 and 2 on random matrices: errors, thresholds, and a figure of fits.

Source: "Low-Rank Bottleneck in Multi-head Attention Models" (Bhojanapalli et al., 2020): the
construction of theorem 1, sharper bounds, its counter-example, and with --strictness theorem 2 by
fitting. No checkpoint is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure

from lit_probattn.analysis.drawing import powers_of_two
from lit_probattn.analysis.head_size.fitting import fit_head, random_map
from lit_probattn.analysis.head_size.strictness import fit_students, theorem_target
from lit_probattn.analysis.head_size.theorem import (
    attention_map,
    counter_example,
    least_head_size,
    least_head_size_causal,
    representing_weights,
    tolerance,
    unreachable,
)
from lit_probattn.analysis.options import add_out
from lit_probattn.analysis.study import Study
from lit_probattn.records.figures import panels
from lit_probattn.records.tables import markdown_table


def conditioned_inputs(width: int, length: int, condition: float, seed: int) -> torch.Tensor:
    """Return X (d, n) with singular values from 1 down to 1 / condition, float64."""
    generator = torch.Generator().manual_seed(seed)

    def rotation(rows: int, columns: int) -> torch.Tensor:
        normal = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(normal).Q

    values = torch.logspace(0, -1, length, base=condition, dtype=torch.float64)
    return rotation(width, length) * values @ rotation(length, length).mT


def construction_table(
    lengths: Sequence[int] = (8, 16, 32, 64), conditions: Sequence[float] = (1.0, 10.0, 1e4)
) -> pd.DataFrame:
    """Return errors of theorem 1's construction with head sizes n, n (balanced) and n − 1."""
    rows = []
    for length in lengths:
        weights = random_map(length, seed=length)
        for condition in conditions:
            inputs = conditioned_inputs(2 * length, length, condition, seed=1)

            errors = []
            for size, balanced in (
                *((length, False), (length, True)),
                *((length - 1, False), (length - 2, False)),
            ):
                query, key = representing_weights(inputs, weights, size, balanced=balanced)
                errors.append(float((attention_map(query, key, inputs) - weights).abs().max()))
            names = ("error, size n", "balanced", "error, size n - 1", "error, size n - 2")
            row = {"n": length, "cond(X)": condition, **dict(zip(names, errors, strict=True))}
            rows.append({**row, "allowed": tolerance(inputs, weights)})
    return pd.DataFrame(rows)


def threshold_table(lengths: Sequence[int] = (6, 8, 10, 11, 16, 32)) -> pd.DataFrame:
    """Return smallest head sizes of random maps: rank(C log P), causal by Woerdeman's formula."""
    return pd.DataFrame(
        [
            {
                "n": n,
                "bidirectional": least_head_size(random_map(n, seed=n)),
                "n - 1": n - 1,
                "causal": least_head_size_causal(random_map(n, seed=n, is_causal=True).mT),
                "floor(n / 2)": n // 2,
            }
            for n in lengths
        ]
    )


def divergence_table(
    lengths: Sequence[int] = (16, 32), num_maps: int = 2, steps: int = 300
) -> pd.DataFrame:
    """Return the divergence of fitted heads from random maps over the head size."""
    rows = []
    for length in lengths:
        for is_causal in (False, True):
            limit = length // 2 if is_causal else length - 1
            step = max(1, limit // 8)
            sizes = sorted({1, 2, *range(step, limit - 1, step), limit - 1, limit, limit + 1})
            for size in sizes:
                found = [
                    fit_head(
                        random_map(length, seed, is_causal=is_causal),
                        size,
                        is_causal=is_causal,
                        # No truncation is exact at the causal threshold: fits need more steps.
                        steps=8 * steps if is_causal and size >= limit - 1 else steps,
                    )
                    for seed in range(num_maps)
                ]
                truncated, fitted = (sum(x) / num_maps for x in zip(*found, strict=True))
                row = {"n": length, "is_causal": is_causal, "head_size": size, "limit": limit}
                rows.append({**row, "truncated_kl": truncated, "fitted_kl": fitted})
    return pd.DataFrame(rows)


def strictness_table(steps: int) -> pd.DataFrame:
    """Return held-out errors of students by head size, for d = 8, h = 4, d_p = 4, n = 6."""
    target = theorem_target(8, 4, 4, torch.Generator().manual_seed(0))
    rows = []
    for size in (1, 2, 3, 4):
        errors = fit_students(target, size, steps)
        rows.append({"head_size": size, "best": min(errors), "worst": max(errors)})
        print(f"students of head size {size}: {min(errors):.2e} … {max(errors):.2e}", flush=True)
    return pd.DataFrame(rows)


def divergence_claim(table: pd.DataFrame) -> str:
    """Return the largest divergence of truncated factors below the exact threshold, and from it."""
    free = table[~table["is_causal"]]
    below = free[free["head_size"] < free["limit"]]["truncated_kl"].max()
    from_limit = free[free["head_size"] >= free["limit"]]["truncated_kl"].max()
    return (
        f"Without a mask the divergence is at most {from_limit:.0e} nats from head size n − 1, and "
        f"up to {below:.2g} below"
    )


def draw_divergence(table: pd.DataFrame) -> Figure:
    """Draw divergence over head size, bidirectional and causal, with the exact thresholds."""
    figure, (axes,) = panels(1, 2, 4.2, 3.6, sharey=True)
    for axis, is_causal in zip(axes, (False, True), strict=True):
        name = "⌊n / 2⌋" if is_causal else "n − 1"
        for number, length in enumerate(sorted(table["n"].unique())):
            part = table[(table["n"] == length) & (table["is_causal"] == is_causal)]
            limit, sizes = int(part["limit"].iloc[0]), part["head_size"]
            floor = part[["truncated_kl", "fitted_kl"]].clip(lower=1e-13)
            style: Any = {"color": f"C{number}"}
            axis.plot(sizes, floor["fitted_kl"], "o-", ms=4, label=f"n = {length}, fitted", **style)
            axis.plot(sizes, floor["truncated_kl"], ":", label="truncated", **style)
            axis.axvline(limit, lw=0.8, ls="--", label=f"{name} = {limit}", **style)
        powers_of_two(axis)
        axis.set_yscale("log")
        axis.set_xlabel("head size")
        axis.set_title("causal" if is_causal else "bidirectional", fontsize=10)
        axis.grid(color="0.9", lw=0.6)
        axis.legend(fontsize=7, frameon=False)
    axes[0].set_ylabel("mean KL divergence (nats)")
    return figure


class Theory(Study):
    """Theorem 1, its sharper bounds and its counter-example; theorem 2 by fitting."""

    name, title = "theory", "Fixed head size: what a head can represent"

    @staticmethod
    def _add_options(parser: argparse.ArgumentParser) -> None:
        add_out(parser)
        add = parser.add_argument
        add("--strictness", action="store_true", help="also fit students for theorem 2 (minutes)")
        add("--steps", type=int, default=4000, help="steps of the fits")

    def _compute(self) -> str:
        results, steps = self.results, self.options.steps
        construction, thresholds = construction_table(), threshold_table()
        divergence = divergence_table()
        results.table(construction, "theorem1")
        results.table(thresholds, "thresholds")
        results.table(divergence)
        results.figure(draw_divergence(divergence), divergence_claim(divergence))
        inputs, weights, column = counter_example()
        scan = torch.linspace(-30, 30, 601, dtype=torch.float64)
        one = torch.ones(1, 1, dtype=torch.float64)
        errors = [float((attention_map(w * one, one, inputs) - weights).abs().max()) for w in scan]
        parts = [
            "Theorem 1, constructed in float64 (P: softmax of 3 · N(0, 1), X of width 2n): largest "
            "error of an entry of the map. Head size n − 1 suffices; the paper requires n.",
            markdown_table(construction, digits=2),
            "Smallest head size of random maps: the rank of C log P without a mask, and the "
            "smallest rank of a completion with a causal mask. The paper's rule is n.",
            markdown_table(thresholds),
            f"Counter-example (d = 1, n = 2): the second column is ({column[0]}, {column[1]}) "
            f"for every weight, and the error is at least {min(errors):.2f} over {len(scan)} "
            f"weights; certificate ‖C (log P) U‖ = {unreachable(inputs, weights):.3f}.",
            "Mean divergence of fitted heads from random maps (figure): zero from n − 1, where the "
            "truncated factors are exact; at the causal threshold it is the residual of L-BFGS.",
            markdown_table(divergence, digits=2),
        ]
        if self.options.strictness:
            strict = strictness_table(steps)
            results.table(strict, "theorem2")
            parts += [
                "Theorem 2: relative squared errors of layers with 4 heads of several sizes, "
                f"fitted to one with d = 8, d_p = 4 ({steps} steps, 3 seeds). Size 2 = d / h is "
                "the standard layer. The errors are limited by the optimiser and prove nothing.",
                markdown_table(strict, digits=2),
            ]
        return "\n\n".join(parts)
