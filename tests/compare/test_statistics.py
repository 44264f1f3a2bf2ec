"""Statistics of the report against scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from lit_probattn.compare.statistics import (
    Sample,
    against_published,
    paired,
    ranked_differences,
    significance,
    test_set_half_width,
    welch,
)

test_set_half_width.__test__ = False


@pytest.mark.parametrize("sizes", [(2, 3), (5, 5), (7, 2)])
def test_welch(sizes):
    generator = np.random.default_rng(sum(sizes))
    first = generator.normal(37.0, 1.0, sizes[0])
    second = generator.normal(36.0, 2.5, sizes[1])
    expected = stats.ttest_ind(first, second, equal_var=False)
    low, high = expected.confidence_interval(0.95)
    found = welch(Sample(tuple(first)), Sample(tuple(second)))
    assert found.difference == pytest.approx(first.mean() - second.mean())
    assert found.difference - found.half_width == pytest.approx(low, rel=1e-5)
    assert found.difference + found.half_width == pytest.approx(high, rel=1e-5)
    assert found.excludes_zero == (expected.pvalue < 0.05)


def test_against_published_assumes_the_same_spread():
    values = (36.1, 37.4, 36.9, 36.4)
    found = against_published(Sample(values), 37.03, 5)
    spread = np.std(values, ddof=1) * math.sqrt(1 / 4 + 1 / 5)
    assert found.difference == pytest.approx(np.mean(values) - 37.03)
    assert found.half_width == pytest.approx(stats.t.ppf(0.975, 3) * spread, rel=1e-5)


def test_notes_are_honest():
    one, two = Sample((36.0,)), Sample((36.0, 38.0))
    assert one.std is None
    assert welch(one, two) is None
    note = significance(one, 37.03, 5, 2000, comparable=True)
    half = 196 * math.sqrt(0.36 * 0.64 / 2000)
    assert note == f"-1.03: one seed, no interval; the test set alone gives ± {half:.2f}"
    assert significance(one, None, 5, None, comparable=True) == "nothing published"
    assert "another protocol" in significance(two, 37.03, 5, None, comparable=False)
    assert "within the 95 % interval" in significance(two, 37.03, 5, None, comparable=True)
    far = Sample((50.0, 50.1, 50.2))
    assert "differs" in significance(far, 37.03, 5, None, comparable=True)
    same = Sample((37.0, 37.0))
    assert "no spread" in significance(same, 36.0, 5, None, comparable=True)


def test_differences_from_the_baseline():
    base, other, single = Sample((10.0, 10.2, 9.9)), Sample((20.0, 20.3, 19.8)), Sample((7.0,))
    notes = ranked_differences([("a", base), ("b", other), ("c", single)], base)
    assert notes["a"] == "baseline"
    assert notes["b"].endswith("] Welch *")
    assert notes["c"] == "-3.03: no interval"


def test_rows_with_the_same_seeds_are_compared_seed_by_seed():
    """Seeds in another order; what the seeds share cancels."""
    base = Sample((10.0, 14.0, 12.0), (0, 1, 2))
    other = Sample((12.9, 11.2, 15.1), (2, 0, 1))
    found = paired(other, base)
    expected = stats.ttest_rel((11.2, 15.1, 12.9), base.values)
    low, high = expected.confidence_interval(0.95)
    assert found.difference == pytest.approx(np.mean([1.2, 1.1, 0.9]))
    assert found.difference - found.half_width == pytest.approx(low)
    assert found.difference + found.half_width == pytest.approx(high)
    assert found.half_width < welch(other, base).half_width / 5
    assert ranked_differences([("b", other)], base)["b"] == f"{found} paired *"


@pytest.mark.parametrize("seeds", [(), (0, 1, 3), (0, 1)])
def test_other_seeds_are_not_paired(seeds):
    base = Sample((10.0, 14.0, 12.0), (0, 1, 2))
    other = Sample((11.0, 12.0, 13.0)[: len(seeds) or 3], seeds)
    assert paired(other, base) is None
    assert ranked_differences([("b", other)], base)["b"] == f"{welch(other, base)} Welch"
