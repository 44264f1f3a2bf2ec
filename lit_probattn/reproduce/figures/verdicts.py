"""Whether a sentence of a paper holds in measured cells, as far as their spread over seeds tells.

A figure that prints no values is compared by what its paper says of it. A sentence is a sign of
differences between models, each difference taken seed by seed, with a 95 % interval of Student's t
over the seeds:

    agrees           the difference has the paper's sign, and the interval excludes 0
    same direction   it has the paper's sign, within the spread, or of one seed alone
    differs          it has the other sign, and the interval excludes 0
    cannot be told   the other sign within the spread; or models that the sentence needs are missing

A printed number is judged in the same words (`against_value`): it agrees where the interval of its
deviation has 0; where it does not, or one seed gives none, the sentence that it lies above or below
its reference, as printed, is judged.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pandas as pd

from lit_probattn.compare.statistics import (
    Interval,
    Sample,
    against_published,
    paired,
    welch,
)

__all__ = [
    *("Finding", "Judge", "against_bound", "against_computed", "against_value", "at_equal"),
    *("combined", "difference", "equal", "sample_of", "sided", "trend"),
]

Verdict = Literal["agrees", "same direction", "differs", "cannot be told"]
Sign = Literal[-1, 1]
Bound = Literal["at most", "at least"]
MISSING = "models that the sentence needs are missing"


@dataclass(frozen=True)
class Finding:
    """What was measured, in words, and what it says of a sentence."""

    measured: str
    verdict: Verdict


Judge = Callable[[], Finding]


def sample_of(cells: pd.DataFrame, column: str = "perplexity") -> Sample | None:
    """Return the values of cells that differ in their seeds alone; None without any."""
    one = cells.drop_duplicates("seed").sort_values("seed")
    return Sample(tuple(one[column]), tuple(one["seed"])) if len(one) else None


@dataclass(frozen=True)
class Difference:
    """A difference of means; its interval is None where one seed, or no spread, tells none."""

    value: float
    interval: Interval | None

    @property
    def is_certain(self) -> bool:
        """Whether the interval excludes 0."""
        return self.interval is not None and self.interval.excludes_zero

    def verdict(self, sign: Sign) -> Verdict:
        """Say whether it has the sign, -1 or 1."""
        if self.value * sign > 0:
            return "agrees" if self.is_certain else "same direction"
        return "differs" if self.is_certain else "cannot be told"

    def text(self, digits: int) -> str:
        """Return it with so many digits after the point."""
        if self.interval is None:
            return f"{self.value:+.{digits}f} (no interval)"
        return self.interval.text(digits)

    def __str__(self) -> str:
        return self.text(2)


def difference(first: Sample, second: Sample) -> Difference:
    """Return first − second: seed by seed where both have the same seeds, otherwise Welch's."""
    return Difference(first.mean - second.mean, paired(first, second) or welch(first, second))


def against_value(
    ours: Sample,
    published: float,
    runs: int,
    reference: tuple[Sample, float] | None = None,
    *,
    comparable: bool = True,
) -> Verdict:
    """Judge a printed number.

    `differs` is a deviation beyond the spread without the printed order, or, where the numbers
    themselves are not compared, the other order beyond the spread.

    Args:
        ours: our results.
        published: the printed number.
        runs: runs behind it.
        reference: ours and the printed number of the row that others are compared with.
        comparable: False for another protocol: only the order is judged.
    """
    interval = against_published(ours, published, runs) if comparable else None
    if interval is not None and not interval.excludes_zero:
        return "agrees"
    found: Verdict = "cannot be told"
    if reference is not None and published != reference[1]:
        found = difference(ours, reference[0]).verdict(1 if published > reference[1] else -1)
    if found in ("agrees", "same direction"):
        return "same direction"
    return "differs" if interval is not None else found


def against_computed(
    ours: float, published: float, digits: int, bound: Bound | None = None
) -> Verdict:
    """Judge a printed number that is computed, so that nothing varies: equal as printed, or not.

    Args:
        ours: our number.
        published: the printed one.
        digits: digits after the point that it is printed with.
        bound: whether it is printed as a bound.
    """
    if bound is None:
        holds = round(ours, digits) == published
    else:
        holds = ours <= published if bound == "at most" else ours >= published
    return "agrees" if holds else "differs"


def against_bound(
    ours: Sample, published: float, bound: Bound, *, comparable: bool = True
) -> Verdict:
    """Judge a printed bound, by the difference from it; in another protocol nothing is told."""
    if not comparable:
        return "cannot be told"
    if not ours.std and ours.mean == published:
        return "agrees"
    limit = Sample((published,) * ours.count, ours.seeds)
    return difference(ours, limit).verdict(-1 if bound == "at most" else 1)


def sided(first: Sample | None, second: Sample | None, sign: Sign, words: str) -> Finding:
    """Judge a sentence that first − second has a sign; `words` name the difference."""
    if first is None or second is None:
        return Finding(MISSING, "cannot be told")
    found = difference(first, second)
    return Finding(f"{words}: {found}", found.verdict(sign))


def combined(findings: Sequence[Finding]) -> Finding:
    """Return one finding of the parts of a sentence: its verdict is that of the weakest part.

    Where parts have several verdicts, each is named beside its part.
    """
    ranks: list[Verdict] = ["differs", "cannot be told", "same direction", "agrees"]
    verdict = min((one.verdict for one in findings), key=ranks.index)
    several = len({one.verdict for one in findings}) > 1
    texts = [f"{one.measured} ({one.verdict})" if several else one.measured for one in findings]
    return Finding("; ".join(dict.fromkeys(texts)), verdict)


def equal(first: pd.DataFrame, second: pd.DataFrame, words: str) -> Finding:
    """Judge a sentence that two models are one: cells of one run, or of equal results."""
    one, other = sample_of(first), sample_of(second)
    if one is None or other is None:
        return Finding(MISSING, "cannot be told")
    if one == other and set(first["num_parameters"]) == set(second["num_parameters"]):
        return Finding(f"{words}: the same results, {one.mean:.2f}", "agrees")
    found = difference(one, other)
    verdict: Verdict = "differs" if found.is_certain else "cannot be told"
    return Finding(f"{words}: {found}", verdict)


def trend(series: Mapping[str, Mapping[Any, Sample]], sign: Sign, words: str) -> Finding:
    """Judge a sentence that values rise (1) or fall (-1) along every series, step by step.

    It agrees if every step does beyond the spread, and differs if one goes the other way beyond it.
    Otherwise the direction is that of all steps, or of all series from their first point to their
    last beyond the spread.

    Args:
        series: for each label the samples by position, in their order.
        sign: of each step.
        words: name what the positions are.
    """
    chains = {name: list(points.items()) for name, points in series.items() if len(points) > 1}
    if not chains:
        return Finding(MISSING, "cannot be told")
    steps, whole, told = [], [], []
    for name, points in chains.items():
        steps += [difference(b, a) for (_, a), (_, b) in pairwise(points)]
        whole.append(difference(points[-1][1], points[0][1]))
        means = " → ".join(f"{sample.mean:.2f}" for _, sample in points)
        places = ", ".join(str(place) for place, _ in points)
        told.append(f"{name + ': ' if name else ''}{words} {places}: {means}")
    measured = f"{'; '.join(told)}; {_steps(steps, sign)}"
    verdicts = [step.verdict(sign) for step in steps]
    if "differs" in verdicts:
        return Finding(measured, "differs")
    if all(verdict == "agrees" for verdict in verdicts):
        return Finding(measured, "agrees")
    along = all(step.value * sign > 0 for step in steps)
    ends = all(end.verdict(sign) == "agrees" for end in whole)
    return Finding(measured, "same direction" if along or ends else "cannot be told")


def _steps(steps: Sequence[Difference], sign: Sign) -> str:
    right = sum(step.value * sign > 0 for step in steps)
    certain = sum(step.verdict(sign) == "agrees" for step in steps)
    against = sum(step.verdict(sign) == "differs" for step in steps)
    return (
        f"{right} of {len(steps)} steps as said, {certain} of them beyond the spread, {against} "
        "the other way beyond it"
    )


def at_equal(
    models: pd.DataFrame,
    curve: Iterable[pd.DataFrame],
    column: str,
    sign: Sign,
    words: str,
    score: str = "perplexity",
) -> Finding:
    """Judge a sentence that models lie on one side of a curve at equal values of a column.

    The curve is that of the best baselines: of each group of models the one with the lowest mean
    (with sign -1, for scores of which less is better) or with the highest (1). Between groups it is
    linear in the logarithm of the column. Models whose value the curve does not reach, and its own
    first point, are left out.

    Args:
        models: cells of the models.
        curve: groups of baselines, such as those of one width; all of a group have one value.
        column: what must be equal, such as the parameters.
        sign: of models − curve.
        words: name the difference.
        score: the column that is compared.
    """
    knots: dict[float, Sample] = {}
    for group in curve:
        points = [sample_of(part, score) for _, part in group.groupby("row")]
        samples = [sample for sample in points if sample is not None]
        if samples:
            knots[float(group[column].iloc[0])] = max(samples, key=lambda s: s.mean * sign)
    places = sorted(knots)
    inside = [
        (float(value), sample)
        for value, part in models.groupby(column)
        if places and places[0] < float(value) <= places[-1]
        if (sample := sample_of(part, score)) is not None
    ]
    if len(places) < 2 or not inside:
        return Finding("no model lies within the baselines: " + MISSING, "cannot be told")
    seeds = set.intersection(*(set(s.seeds) for s in (*knots.values(), *(s for _, s in inside))))
    if not seeds:
        return Finding("models and baselines have no seed in common", "cannot be told")
    values: dict[int, list[float]] = {seed: [] for seed in sorted(seeds)}
    for seed, found in values.items():
        heights = [_of_seed(knots[place], seed) for place in places]
        for value, sample in inside:
            at = float(np.interp(np.log(value), np.log(places), heights))
            found.append(_of_seed(sample, seed) - at)
    means = Sample(tuple(statistics.fmean(v) for v in values.values()), tuple(values))
    zero = Sample((0.0,) * means.count, means.seeds)
    low, high = inside[0][0], inside[-1][0]
    span = f"{len(inside)} models with {low / 1e6:.2f} to {high / 1e6:.2f} M"
    return sided(means, zero, sign, f"{words}, mean over {span}")


def _of_seed(sample: Sample, seed: int) -> float:
    return sample.values[sample.seeds.index(seed)]
