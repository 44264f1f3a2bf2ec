"""Figures 1, 3 and 4 of the paper on fixed head sizes: language models of sentences.

Source: "Low-Rank Bottleneck in Multi-head Attention Models" (Bhojanapalli et al., ICML 2020).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lit_probattn.compare.runs import Run
from lit_probattn.experiments.expectations import (
    MISSING,
    Finding,
    Printed,
    Sample,
    Sign,
    combined,
    computed,
    identical,
    missing,
    sided,
    trend,
)
from lit_probattn.records.figures import panels
from lit_probattn.reproduce.figures.report import FigureReport, Judge
from lit_probattn.reproduce.head_size.curves import (
    Series,
    draw_curves,
    in_millions,
    limits_of,
    series_by,
)
from lit_probattn.reproduce.head_size.experiment import point_columns

__all__ = ["AgainstHeadSize", "AgainstHeads", "AgainstParameters"]


class _LowRank(FigureReport):
    """A figure whose runs are points of a grid of head sizes."""

    has_reduced_runs = True

    def columns(self, run: Run, result: dict[str, Any]) -> dict[str, Any]:
        """Return rule and sizes of a point, and its parameters without the token embedding."""
        return point_columns(run, result)

    def of(self, *rules: str) -> pd.DataFrame:
        """Return the runs of the given rules."""
        return self.rows[self.rows["rule"].isin(rules)]


class AgainstParameters(_LowRank):
    """Figures 1 and 4: perplexity against parameters and embedding size; baselines of all widths.

    The baselines have the rule `width` (several numbers of heads) or `width_and_heads` (the number
    of heads that results from the fixed size).
    """

    def draw(self) -> Figure:
        """Draw both panels."""
        figure, [[left, right]] = panels(1, 2, 4.6, 3.8, sharey=True)
        fixed, limits = self.of("fixed"), limits_of(self.rows)
        own = {_fixed_words(fixed): fixed} if len(fixed) else {}
        draw_curves(left, {**own, **self._baselines()}, "num_parameters", limits)
        in_millions(left)
        left.set_xlabel("parameters")
        draw_curves(right, self._baselines(), "embed_dim", limits, first=len(own))
        _draw_heads(right, fixed)
        right.set_xscale("linear")
        right.set_xlabel("embedding size")
        return figure

    def _baselines(self) -> Series:
        of_heads = series_by(self.of("width"), "num_heads", "d / h, {} heads")
        of_size = series_by(self.of("width_and_heads"), "head_dim", "d / h = {}")
        return {**of_heads, **of_size}

    def judges(self) -> Mapping[str, Judge]:
        """Return the function that judges each claim."""
        return {
            "equal_parameters": self._equal_parameters,
            "smaller_width": self._smaller_width,
            "too_many_heads": self._too_many_heads,
        }

    def _widths(self) -> list[pd.DataFrame]:
        baselines = self.of("width", "width_and_heads")
        return [part for _, part in baselines.groupby("embed_dim")]

    def _equal_parameters(self) -> Finding:
        words = "fixed − best baseline at equal parameters"
        return at_equal(self.of("fixed"), self._widths(), "num_parameters", -1, words)

    def _smaller_width(self) -> Finding:
        """Compare the fixed model with most heads and the best baseline of the largest width."""
        fixed, widths = self.of("fixed"), self._widths()
        if fixed.empty or not widths:
            return missing()
        most = fixed[fixed["num_heads"] == fixed["num_heads"].max()]
        heads, best = _best(widths[-1], "num_heads")
        d, d_fixed = (int(part["embed_dim"].iloc[0]) for part in (widths[-1], fixed))
        words = (
            f"width {d_fixed} with {int(most['num_heads'].iloc[0])} heads − width {d} with {heads}"
        )
        return sided(Sample.of(most, "perplexity"), best, -1, words)

    def _too_many_heads(self) -> Finding:
        """Compare the largest number of heads and half of it, at the smallest width."""
        narrow = self._widths()[:1]
        heads = sorted(set(narrow[0]["num_heads"])) if narrow else []
        if len(heads) < 2:
            return missing()
        few, many = (
            Sample.of(narrow[0][narrow[0]["num_heads"] == h], "perplexity") for h in heads[-2:]
        )
        d = int(narrow[0]["embed_dim"].iloc[0])
        return sided(many, few, 1, f"width {d}: {heads[-1]} heads − {heads[-2]} heads")


class AgainstHeads(_LowRank):
    """Figure 3 (a): perplexity against the number of heads; the baseline has a wider MLP (M1)."""

    def draw(self) -> Figure:
        """Draw the panel."""
        figure, [[axis]] = panels(1, 1, 5.2, 3.9)
        fixed, baseline = self.of("fixed"), self.of("matched_mlp")
        words = {_fixed_words(fixed): fixed, "d / h, wider MLP": baseline}
        series = {name: part for name, part in words.items() if len(part)}
        draw_curves(axis, series, "num_heads", limits_of(self.rows))
        axis.set_xlabel("heads")
        return figure

    def judges(self) -> Mapping[str, Judge]:
        """Return the function that judges each claim."""
        return {
            "coincide": self._coincide,
            "turn": self._turn,
            "fixed_falls": lambda: trend({"": self._by_heads("fixed")}, -1, "heads"),
            "below": self._below,
        }

    def _by_heads(self, rule: str) -> dict[Any, Sample]:
        return _samples(self.of(rule), "num_heads")

    def _meeting(self) -> int:
        """Return the number of heads at which d / h is the fixed size."""
        fixed = self.of("fixed")
        return 0 if fixed.empty else int(fixed["embed_dim"].iloc[0] // fixed["head_dim"].iloc[0])

    def _coincide(self) -> Finding:
        heads = self._meeting()
        fixed, baseline = (
            part[part["num_heads"] == heads] for part in (self.of("fixed"), self.of("matched_mlp"))
        )
        return equal(fixed, baseline, f"both models with {heads} heads")

    def _turn(self) -> Finding:
        """Compare the baseline with its most heads and with twice the heads at which both meet."""
        baseline, heads = self._by_heads("matched_mlp"), 2 * self._meeting()
        most = max(baseline, default=0)
        known = baseline.get(heads) if most > heads else None
        return sided(baseline.get(most), known, 1, f"baseline: {most} heads − {heads} heads")

    def _below(self) -> Finding:
        """Compare both at the largest common number of heads."""
        fixed, baseline = self._by_heads("fixed"), self._by_heads("matched_mlp")
        both = [heads for heads in fixed if heads in baseline and heads > self._meeting()]
        heads = max(both, default=0)
        words = f"fixed − baseline of equal parameters with {heads} heads"
        return sided(fixed.get(heads), baseline.get(heads), -1, words)


class AgainstHeadSize(_LowRank):
    """Figure 3 (b): perplexity against the head size for several numbers of heads."""

    def draw(self) -> Figure:
        """Draw the panel."""
        figure, [[axis]] = panels(1, 1, 5.2, 3.9)
        draw_curves(
            axis, series_by(self.rows, "num_heads", "{} heads"), "head_dim", limits_of(self.rows)
        )
        axis.set_xlabel("head size")
        return figure

    def judges(self) -> Mapping[str, Judge]:
        """Return the function that judges each claim."""
        return {
            "larger_heads": lambda: trend(
                _chains(self.rows, "num_heads", "head_dim", "{} heads"), -1, "size"
            ),
            "more_heads": lambda: trend(
                _chains(self.rows, "head_dim", "num_heads", "size {}"), -1, "heads"
            ),
        }


def equal(first: pd.DataFrame, second: pd.DataFrame, words: str) -> Finding:
    """Judge the claim that two models are identical: one shared run, or equal results."""
    one, other = Sample.of(first, "perplexity"), Sample.of(second, "perplexity")
    if one is None or other is None:
        return missing()
    found = identical(one, other, words)
    sizes = [float(part["num_parameters"].iloc[0]) for part in (first, second)]
    same = computed(sizes[0], Printed.exactly(sizes[1]))
    if same == "agrees":
        return found
    return combined([found, Finding("their numbers of parameters", same)])


def at_equal(
    models: pd.DataFrame,
    curve: Iterable[pd.DataFrame],
    column: str,
    sign: Sign,
    words: str,
    score: str = "perplexity",
) -> Finding:
    """Judge the claim that models lie on one side of a curve at equal values of a column.

    The curve consists of the best baselines: of each group the model with the lowest mean (sign -1,
    for scores where lower is better) or the highest mean (1). Between groups it is linear in the
    logarithm of the column. Models outside its range, and its first point, are excluded.

    Args:
        models: runs of the models.
        curve: groups of baselines with a common value, such as one width.
        column: column with equal values, such as the parameters.
        sign: sign of models − curve.
        words: name of the difference.
        score: compared column.
    """
    knots: dict[float, Sample] = {}
    for group in curve:
        points = [Sample.of(part, score) for _, part in group.groupby("row")]
        samples = [sample for sample in points if sample is not None]
        if samples:
            knots[float(group[column].iloc[0])] = max(samples, key=lambda s: s.mean * sign)
    places = sorted(knots)
    inside = [
        (float(value), sample)
        for value, part in models.groupby(column)
        if places and places[0] < float(value) <= places[-1]
        if (sample := Sample.of(part, score)) is not None
    ]
    if len(places) < 2 or not inside:
        return missing(f"no model lies within the range of the baselines: {MISSING}")
    seeds = set.intersection(*(set(s.seeds) for s in (*knots.values(), *(s for _, s in inside))))
    if not seeds:
        return missing("models and baselines have no common seed")
    values: dict[int, list[float]] = {seed: [] for seed in sorted(seeds)}
    for seed, found in values.items():
        heights = [knots[place].by_seed[seed] for place in places]
        for value, sample in inside:
            at = float(np.interp(np.log(value), np.log(places), heights))
            found.append(sample.by_seed[seed] - at)
    means = Sample(tuple(statistics.fmean(v) for v in values.values()), tuple(values))
    low, high = inside[0][0], inside[-1][0]
    span = f"{len(inside)} models with {low / 1e6:.2f} to {high / 1e6:.2f} M"
    return sided(means, means.constant(0.0), sign, f"{words}, mean over {span}")


def _samples(runs: pd.DataFrame, column: str) -> dict[Any, Sample]:
    found = {int(v): Sample.of(part, "perplexity") for v, part in runs.groupby(column)}
    return {value: sample for value, sample in found.items() if sample is not None}


def _chains(runs: pd.DataFrame, by: str, along: str, words: str) -> dict[str, dict[Any, Sample]]:
    return {name: _samples(part, along) for name, part in series_by(runs, by, words).items()}


def _best(runs: pd.DataFrame, column: str) -> tuple[int, Sample]:
    samples = _samples(runs, column)
    best = min(samples, key=lambda value: samples[value].mean)
    return best, samples[best]


def _fixed_words(fixed: pd.DataFrame) -> str:
    if fixed.empty:
        return "fixed head size"
    return f"d = {fixed['embed_dim'].iloc[0]}, head size {fixed['head_dim'].iloc[0]}"


def _draw_heads(axis: Axes, fixed: pd.DataFrame) -> None:
    """Draw the fixed models of one width, labelled by their number of heads."""
    means = fixed.groupby("num_heads")["perplexity"].mean().sort_values()
    for index, heads in enumerate(means.index):
        part = fixed[fixed["num_heads"] == heads]
        side, offset = (("left", 6), ("right", -6))[index % 2]  # alternate to avoid overlap
        place = part["embed_dim"].iloc[0], part["perplexity"].mean()
        spread = part["perplexity"].std()
        bar = None if pd.isna(spread) else [spread]
        x, y = [place[0]], [place[1]]
        axis.errorbar(x, y, yerr=bar, marker="o", ms=4, capsize=2, color="C0")
        text: dict[str, Any] = {"ha": side, "fontsize": 7}
        axis.annotate(f"{heads}", place, xytext=(offset, -3), textcoords="offset points", **text)
