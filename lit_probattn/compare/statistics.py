"""Statistics of a reproduced number beside the published one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
_NODES = 200


def t_quantile(probability: float, freedom: float) -> float:
    """Return the two-sided quantile of Student's t: |T| ≤ it with `probability`.

    With T = √ν tan θ the distribution is an integral of cos^(ν−1) θ, summed by Gauss and Legendre,
    and the quantile is found by bisection.

    Args:
        probability: between 0 and 1.
        freedom: degrees of freedom ν ≥ 1, whole or not.

    Raises:
        ValueError: an argument is out of range.
    """
    if not 0 < probability < 1 or not freedom >= 1:
        raise ValueError(
            f"expected 0 < probability < 1 and freedom >= 1, received {probability}, {freedom}"
        )
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    whole = math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    whole *= math.sqrt(math.pi) / 2

    def inside(angle: float) -> float:
        values = np.cos(angle * (nodes + 1) / 2) ** (freedom - 1)
        return float(angle / 2 * (weights @ values)) / whole

    low, high = 0.0, math.pi / 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < probability else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


@dataclass(frozen=True)
class Sample:
    """Results of one row over seeds.

    Args:
        values: one per seed, in the printed unit.
    """

    values: tuple[float, ...]

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

    def __str__(self) -> str:
        low, high = self.difference - self.half_width, self.difference + self.half_width
        return f"{self.difference:+.2f} [{low:+.2f}, {high:+.2f}]"


def welch(first: Sample, second: Sample) -> Interval | None:
    """Return first − second with Welch's interval; None if a sample has one value or none varies.

    Source: B. L. Welch, Biometrika 1947: unequal variances, degrees of freedom of Satterthwaite.
    """
    if first.std is None or second.std is None:
        return None
    parts = [s.std**2 / s.count for s in (first, second) if s.std is not None]
    total = sum(parts)
    if total == 0:
        return None
    below = sum(p**2 / (s.count - 1) for p, s in zip(parts, (first, second), strict=True))
    half = t_quantile(LEVEL, total**2 / below) * math.sqrt(total)
    return Interval(first.mean - second.mean, half)


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
    return Interval(ours.mean - published, t_quantile(LEVEL, ours.count - 1) * spread)


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
    """Return a note on every row's difference from the baseline of the same table."""
    notes = {}
    for name, sample in samples:
        interval = welch(sample, base)
        if sample is base:
            notes[name] = "baseline"
        elif interval is None:
            notes[name] = f"{sample.mean - base.mean:+.2f}: no interval"
        else:
            notes[name] = f"{interval}{' *' if interval.excludes_zero else ''}"
    return notes
