"""Statistics of a reproduced number beside the published one, and beside the baseline."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

LEVEL = 0.95


def _quantile(freedom: float) -> float:
    """Two-sided 95 % quantile of Student's t with so many degrees of freedom."""
    return float(stats.t.ppf((1 + LEVEL) / 2, freedom))


@dataclass(frozen=True)
class Sample:
    """Results of one row over seeds.

    Args:
        values: one per seed, in the printed unit.
        seeds: the seeds, in the order of the values; empty if they are not known.
    """

    values: tuple[float, ...]
    seeds: tuple[int, ...] = ()

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


@dataclass(frozen=True)
class Interval:
    """A difference of means with its 95 % interval."""

    difference: float
    half_width: float

    @property
    def excludes_zero(self) -> bool:
        """Whether the difference is significant at 5 %."""
        return abs(self.difference) > self.half_width

    def text(self, digits: int) -> str:
        """Return difference and interval with so many digits after the point."""
        low, high = self.difference - self.half_width, self.difference + self.half_width
        return f"{self.difference:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"

    def __str__(self) -> str:
        return self.text(2)


def welch(first: Sample, second: Sample) -> Interval | None:
    """Return first − second with Welch's interval; None if a sample has one value or none varies.

    Source: B. L. Welch, Biometrika 1947: unequal variances, degrees of freedom of Satterthwaite.
    """
    if first.std is None or second.std is None or first.std == second.std == 0:
        return None
    found = stats.ttest_ind(first.values, second.values, equal_var=False)
    low, high = found.confidence_interval(LEVEL)
    return Interval(first.mean - second.mean, float(high - low) / 2)


def interval_of_mean(values: Sequence[float]) -> Interval | None:
    """Return the mean of a sample with Student's interval; None with fewer than two values."""
    if len(values) < 2:
        return None
    spread = statistics.stdev(values) / math.sqrt(len(values))
    return Interval(statistics.fmean(values), _quantile(len(values) - 1) * spread)


def paired(first: Sample, second: Sample) -> Interval | None:
    """Return first − second with the interval of the differences seed by seed.

    Paired t: the seeds name the same initial draws and batches, so what they share cancels.

    Returns:
        None unless both have the same seeds, at least two, and differences that vary.
    """
    if first.count < 2 or not first.seeds or sorted(first.seeds) != sorted(second.seeds):
        return None
    base = dict(zip(second.seeds, second.values, strict=True))
    values = tuple(v - base[s] for s, v in zip(first.seeds, first.values, strict=True))
    interval = interval_of_mean(values)
    return interval if interval and interval.half_width else None


def against_published(ours: Sample, published: float, runs: int) -> Interval | None:
    """Return ours − published with an interval; None for one seed or values that do not vary.

    The papers print means without deviations: their runs are assumed to vary as ours do.

    Args:
        ours: our results.
        published: printed mean.
        runs: runs behind it.
    """
    if not ours.std:
        return None
    spread = ours.std * math.sqrt(1 / ours.count + 1 / runs)
    return Interval(ours.mean - published, _quantile(ours.count - 1) * spread)


def test_set_half_width(percent: float, samples: int) -> float:
    """Return the 95 % half width that a test set of so many samples alone gives an accuracy."""
    part = percent / 100
    return 100 * 1.96 * math.sqrt(part * (1 - part) / samples)


def significance(
    ours: Sample, published: float | None, runs: int, samples: int | None, *, comparable: bool
) -> str:
    """Return a note on how a reproduced number relates to the published one.

    Args:
        ours: our results.
        published: printed mean, None if there is none.
        runs: runs behind it.
        samples: size of the test set for accuracies, None for other metrics.
        comparable: False for another protocol: nothing is claimed.
    """
    if published is None:
        return "nothing published"
    if not comparable:
        return "not compared: another protocol"
    interval = against_published(ours, published, runs)
    if interval is not None:
        verdict = "differs" if interval.excludes_zero else "within the 95 % interval"
        return f"{interval}: {verdict}"
    if ours.count > 1:
        return f"{ours.mean - published:+.2f}: no spread over seeds, no interval"
    note = f"{ours.mean - published:+.2f}: one seed, no interval"
    if samples:
        note += f"; the test set alone gives ± {test_set_half_width(ours.mean, samples):.2f}"
    return note


def ranked_differences(samples: Sequence[tuple[str, Sample]], base: Sample) -> dict[str, str]:
    """Return a note on every row's difference from the baseline: paired by seed, else Welch's."""
    notes = {}
    for name, sample in samples:
        interval = paired(sample, base)
        test = "paired" if interval else "Welch"
        interval = interval or welch(sample, base)
        if sample is base:
            notes[name] = "baseline"
        elif interval is None:
            notes[name] = f"{sample.mean - base.mean:+.2f}: no interval"
        else:
            notes[name] = f"{interval} {test}{' *' if interval.excludes_zero else ''}"
    return notes
