"""Verdicts on printed numbers, claims and trends from estimates with intervals.

A reproduced result is an `Estimate`, a value with an interval:

    counted or computed            the value, since it does not vary
    several seeds                  95 % interval of Student's t, paired by seed, otherwise Welch's
    repeats of a time              20 % and 80 % quantiles
    one seed                       unknown: infinite

`side` judges whether it lies on one side of a bound:

    agrees           the whole interval lies on this side
    same direction   the value does, but the interval includes the bound or is unknown
    inconclusive     the value does not, but the interval includes the bound; or data are missing
    differs          the whole interval lies on the other side

`near` judges whether it equals a printed number. It *agrees* if its interval includes a value that
rounds to the printed one. Otherwise the printed order is judged by `side`, with *same direction* as
the best verdict. A sentence with several parts has the verdict of its weakest part, and values that
depend on a device are judged only on that device (`is_comparable`).
"""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

import scipy  # its modules are imported when they are first used

if TYPE_CHECKING:
    import pandas as pd

Verdict = Literal["differs", "inconclusive", "same direction", "agrees"]
Sign = Literal[-1, 1]
Bound = Literal["at most", "at least"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)  # weakest first
LEGEND = (
    "Verdicts: *agrees*: the claimed direction beyond the spread, or the printed number within "
    "it; *same direction*: the claimed direction within the spread or with one seed, or a "
    "different number in the printed order; *differs*: the opposite direction beyond the "
    "spread, or a different number not in the printed order; *inconclusive*: everything else, "
    "including times and memory that were not measured on a device like the paper's. The spread "
    "is the 95 % interval over common seeds, or the 20 % and 80 % quantiles of repeated time "
    "measurements; counts have no spread."
)
MISSING = "models that the claim requires are missing"
LEVEL = 0.95
NO_INTERVAL = "(no interval)"  # after a value
_IDENTICAL = 1e-6  # relative difference between two runs of one model


@dataclass(frozen=True)
class Sample:
    """Results of one row over seeds.

    Args:
        values: values in the printed unit, one per seed.
        seeds: the seeds in the order of the values; empty if unknown.
    """

    values: tuple[float, ...]
    seeds: tuple[int, ...] = ()

    @classmethod
    def of(cls, runs: pd.DataFrame, column: str) -> Sample | None:
        """Return a column of runs that differ only in their seeds; None if there are no runs."""
        if not len(runs):
            return None
        one = runs.drop_duplicates("seed").sort_values("seed")
        return cls(tuple(one[column]), tuple(one["seed"]))

    @property
    def count(self) -> int:
        """Number of seeds."""
        return len(self.values)

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return statistics.fmean(self.values)

    @property
    def std(self) -> float | None:
        """Standard deviation of a sample (n − 1); None for one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def by_seed(self) -> dict[int, float]:
        """The values by seed; empty if the seeds are unknown."""
        return dict(zip(self.seeds, self.values, strict=bool(self.seeds)))

    def constant(self, value: float) -> Sample:
        """Return a sample with the same value for each of these seeds."""
        return Sample((float(value),) * self.count, self.seeds)


@dataclass(frozen=True)
class Printed:
    """A printed number and the interval of values that round to it."""

    value: float
    low: float
    high: float

    @classmethod
    def read(cls, text: str) -> Printed:
        """Parse a number such as `58.00`, which represents 57.995 to 58.005."""
        value = Decimal(text)
        half = Decimal(1).scaleb(-digits_of(text)) / 2
        return cls(float(value), float(value - half), float(value + half))

    @classmethod
    def rounded(cls, value: float, digits: int) -> Printed:
        """Return a number that is printed with this number of decimals."""
        return cls.read(f"{value:.{digits}f}")

    @classmethod
    def exactly(cls, value: float) -> Printed:
        """Return a number with unknown rounding, which represents only itself."""
        return cls(value, value, value)

    def over(self, other: Printed) -> Printed:
        """Return the ratio of two positive numbers, with the interval of possible values."""
        return Printed(self.value / other.value, self.low / other.high, self.high / other.low)


def digits_of(text: str) -> int:
    """Return the number of decimals."""
    return len(text.partition(".")[2])


@dataclass(frozen=True)
class Estimate:
    """A reproduced result and its interval.

    Args:
        value: the value.
        low, high: ends of the interval; infinite if unknown.
        how: name of the interval in tables.
    """

    value: float
    low: float = -math.inf
    high: float = math.inf
    how: str = ""

    @classmethod
    def exact(cls, value: float) -> Estimate:
        """Return a value that does not vary."""
        return cls(value, value, value)

    @property
    def is_known(self) -> bool:
        """Whether the interval is known."""
        return math.isfinite(self.high - self.low)

    @property
    def direction(self) -> int:
        """1 if the interval is above zero, −1 if below, 0 if it includes zero."""
        return int(self.low > 0) - int(self.high < 0)

    def minus(self, value: float) -> Estimate:
        """Return the estimate minus a number."""
        return Estimate(self.value - value, self.low - value, self.high - value, self.how)

    def over(self, other: Estimate) -> Estimate:
        """Return the ratio of two positive estimates, with the extremes of both intervals."""
        return Estimate(self.value / other.value, self.low / other.high, self.high / other.low)

    def side(self, sign: Sign, of: float = 0.0, *, strict: bool = True) -> Verdict:
        """Judge whether the estimate is above (1) or below (-1) a bound, or equal if not strict."""
        inside = operator.gt if strict else operator.ge
        value, *ends = ((number - of) * sign for number in (self.value, self.low, self.high))
        if inside(value, 0):
            return "agrees" if inside(min(ends), 0) else "same direction"
        return "inconclusive" if inside(max(ends), 0) else "differs"

    def near(self, printed: Printed, order: Verdict | None = None) -> Verdict:
        """Judge whether the estimate equals a printed number.

        Args:
            printed: the number.
            order: the verdict on the printed order; None if no order is printed.
        """
        if self.is_known and self.low <= printed.high and self.high >= printed.low:
            return "agrees"
        if order is None:
            return "differs" if self.is_known else "inconclusive"
        return "same direction" if order == "agrees" else order

    def text(self, digits: int = 2, sign: Literal["+", ""] = "+") -> str:
        """Return value and interval with this number of decimals; "" omits plus signs."""
        told, low, high = (f"{x:{sign}.{digits}f}" for x in (self.value, self.low, self.high))
        return f"{told} [{low}, {high}]" if self.is_known else f"{told} {NO_INTERVAL}"

    def __str__(self) -> str:
        return self.text()


def mean_of(values: Sequence[float], how: str = "", *, beside: int | None = None) -> Estimate:
    """Return a mean with Student's interval, which is unknown for one value.

    Args:
        values: the values.
        how: name of the interval.
        beside: if set, the interval is for the mean of this number of further values with the same
            variance, instead of for the true mean.
    """
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return Estimate(mean, how=how)
    share = 1 / count + (1 / beside if beside else 0.0)
    quantile = float(scipy.stats.t.ppf((1 + LEVEL) / 2, count - 1))
    half = quantile * statistics.stdev(values) * math.sqrt(share)
    return Estimate(mean, mean - half, mean + half, how)


def difference(first: Sample, second: Sample) -> Estimate:
    """Return first − second: paired if they share at least two seeds, otherwise Welch's.

    Equal seeds mean equal initial weights and batches, whose effect cancels in pairs; seeds of only
    one sample are ignored then.
    """
    one, other = first.by_seed, second.by_seed
    both = [value - other[seed] for seed, value in one.items() if seed in other]
    if len(both) > 1:
        return mean_of(both, "paired")
    away = first.mean - second.mean
    if first.std is None or second.std is None:
        return Estimate(both[0] if both else away)
    if first.std == second.std == 0:
        return Estimate.exact(away)
    found = scipy.stats.ttest_ind(first.values, second.values, equal_var=False)
    low, high = map(float, found.confidence_interval(LEVEL))
    return Estimate(away, low, high, "Welch")


def half_width_of_test_set(percent: float, samples: int) -> float:
    """Return the 95 % half width of an accuracy due to the size of the test set."""
    part = percent / 100
    return 100 * 1.96 * math.sqrt(part * (1 - part) / samples)


# ---- findings ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """A result in words, and its verdict on a sentence or a printed number.

    Args:
        measured: the result.
        verdict: the verdict.
        says: the sentence, if there is one.
        estimate: the judged number, if it is one number.
    """

    measured: str
    verdict: Verdict
    says: str = ""
    estimate: Estimate | None = None


def missing(words: str = MISSING) -> Finding:
    """Return a finding without a verdict, with the reason."""
    return Finding(words, "inconclusive")


def weakest(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the weakest verdict."""
    return min(verdicts, key=VERDICTS.index)


def combined(parts: Sequence[Finding], says: str = "") -> Finding:
    """Combine the parts of a sentence; different verdicts are listed."""
    several = len({one.verdict for one in parts}) > 1
    texts = [f"{one.measured} ({one.verdict})" if several else one.measured for one in parts]
    estimate = parts[0].estimate if len(parts) == 1 else None
    verdict = weakest([one.verdict for one in parts])
    return Finding("; ".join(dict.fromkeys(texts)), verdict, says, estimate)


def sided(first: Sample | None, second: Sample | None, sign: Sign, words: str) -> Finding:
    """Judge the sign of first − second; `words` names the difference."""
    if first is None or second is None:
        return missing()
    found = difference(first, second)
    return Finding(f"{words}: {found}", found.side(sign), estimate=found)


def identical(first: Sample, second: Sample, words: str) -> Finding:
    """Judge whether two models are identical: equal results for all common seeds."""
    one, other = first.by_seed, second.by_seed
    both = [(value, other[seed]) for seed, value in one.items() if seed in other]
    found = difference(first, second)
    if both and all(math.isclose(a, b, rel_tol=_IDENTICAL) for a, b in both):
        return Finding(f"{words}: identical results, {first.mean:.2f}", "agrees", estimate=found)
    verdict: Verdict = "differs" if found.direction else "inconclusive"
    return Finding(f"{words}: {found}", verdict, estimate=found)


def along(steps: Sequence[Estimate], whole: Estimate, sign: Sign) -> Verdict:
    """Judge whether values rise (1) or fall (-1) step by step along a line.

    It *differs* if a step or the whole line has the opposite sign beyond the spread; it *agrees* if
    the whole line and every nonzero step have the sign beyond the spread.

    Args:
        steps: changes between consecutive points.
        whole: change from the first to the last point.
        sign: sign of the changes.
    """
    found, ends = [step.side(sign, strict=False) for step in steps], whole.side(sign)
    if "differs" in (ends, *found):
        return "differs"
    if weakest([ends, *found]) == "agrees":
        return "agrees"
    towards = all(step.value * sign >= 0 for step in steps) and whole.value * sign > 0
    return "same direction" if towards or ends == "agrees" else "inconclusive"


def trend(series: Mapping[str, Mapping[Any, Sample]], sign: Sign, words: str) -> Finding:
    """Judge whether samples rise (1) or fall (-1) along every series.

    Args:
        series: samples by label and position, in order.
        sign: sign of each step.
        words: name of the positions.
    """
    chains = {name: list(points.items()) for name, points in series.items() if len(points) > 1}
    if not chains:
        return missing()
    told, every, verdicts = [], [], []
    for name, points in chains.items():
        samples = [sample for _, sample in points]
        steps = [difference(b, a) for a, b in pairwise(samples)]
        verdicts.append(along(steps, difference(samples[-1], samples[0]), sign))
        every += [(step.value * sign > 0, step.side(sign)) for step in steps]
        means = " → ".join(f"{sample.mean:.2f}" for sample in samples)
        places = ", ".join(str(place) for place, _ in points)
        told.append(f"{name + ': ' if name else ''}{words} {places}: {means}")
    right, beyond = sum(so for so, _ in every), [verdict for _, verdict in every]
    counted = (
        f"{right} of {len(every)} steps in the claimed direction, {beyond.count('agrees')} of them "
        f"beyond the spread; {beyond.count('differs')} in the opposite direction beyond the spread"
    )
    return Finding(f"{'; '.join(told)}; {counted}", weakest(verdicts))


@dataclass(frozen=True)
class Reference:
    """A baseline or neutral value, reproduced and printed, that defines the printed order."""

    ours: Sample
    printed: float


def against_printed(
    ours: Sample,
    printed: Printed,
    runs: int,
    reference: Reference | None = None,
    *,
    bound: Bound | None = None,
    comparable: bool = True,
    digits: int = 2,
) -> Finding:
    """Judge a printed number by the difference of the reproduced result from it.

    The papers print means without deviations; their runs are assumed to have the same variance.

    Args:
        ours: reproduced results.
        printed: the number.
        runs: number of published runs.
        reference: reference of the printed order, which alone is judged if not `comparable`.
        bound: set if the number is printed as a bound.
        comparable: False for another protocol.
        digits: number of decimals of the difference.
    """
    order = None
    if reference is not None and printed.value != reference.printed:
        sign: Sign = 1 if printed.value > reference.printed else -1
        order = difference(ours, reference.ours).side(sign)
    if not comparable:
        verdict = Estimate(ours.mean).near(printed, order) if bound is None else "inconclusive"
        return Finding("not compared: different protocol", verdict)
    found = mean_of(ours.values, beside=None if bound else runs)
    away = found.minus(printed.value)
    told = away.text(digits)
    if not found.is_known:
        told = f"{away.value:+.{digits}f}: one seed, no interval"
    if bound is None:
        return Finding(told, found.near(printed, order), estimate=away)
    sign = -1 if bound == "at most" else 1
    return Finding(told, found.side(sign, printed.value, strict=False), estimate=away)


def computed(ours: float, printed: Printed, bound: Bound | None = None) -> Verdict:
    """Judge a printed number by a computed value, which does not vary."""
    found = Estimate.exact(ours)
    if bound is None:
        return found.near(printed)
    return found.side(-1 if bound == "at most" else 1, printed.value, strict=False)


def is_comparable(needed: str, device: str, source: str) -> bool:
    """Return whether a value can be compared with a published value of a device.

    Time and peak memory are valid only for the device on which they were measured; counts are
    independent of devices.

    Args:
        needed: device of the published value, such as `cuda` or `A100`; empty for a count.
        device: device of the value, such as `cuda:0` or `NVIDIA A100-SXM4-80GB`.
        source: origin of the value: `measured`, `predicted` or `analytic`.
    """
    return not needed or (source == "measured" and needed.lower() in device.lower())
