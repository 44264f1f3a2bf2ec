"""Expectations: intervals against scipy, verdicts on numbers made by hand, one rule for each."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from lit_probattn.experiments.expectations import (
    Estimate,
    Printed,
    Reference,
    Sample,
    against_printed,
    along,
    combined,
    computed,
    difference,
    half_width_of_test_set,
    identical,
    is_comparable,
    mean_of,
    sided,
    trend,
)


def near(mean, spread=0.1, count=3):
    """Values with that mean; the first below it, the last above."""
    seeds = tuple(range(count))
    half = (count - 1) / 2
    return Sample(tuple(mean + spread * (seed - half) for seed in seeds), seeds)


BASE = Reference(near(1.0), 1.6)


def against_value(ours, published, runs, reference=None, **more):
    return against_printed(ours, Printed.exactly(published), runs, reference, **more).verdict


@pytest.mark.parametrize(
    ("ours", "published", "verdict"),
    [
        (near(3.0), 3.1, "agrees"),  # interval of the deviation: ± 0.50
        (near(3.0), 3.49, "agrees"),
        (near(3.0), 3.51, "same direction"),  # beyond, above the baseline as printed
        (near(3.0), 1.2, "differs"),  # printed below the baseline's 1.6
        (near(0.5), 2.9, "differs"),
        (near(0.5), 1.2, "same direction"),
        (near(3.0), 1.6, "differs"),  # printed as the baseline: no direction
    ],
)
def test_a_number_over_seeds(ours, published, verdict):
    assert against_value(ours, published, 1, BASE) == verdict


@pytest.mark.parametrize(
    ("value", "published", "verdict"),
    [
        (3.0, 2.9, "same direction"),
        (0.9, 1.2, "same direction"),
        (0.9, 2.9, "inconclusive"),
        (3.0, 1.6, "inconclusive"),
    ],
)
def test_a_number_of_one_seed_has_a_direction_alone(value, published, verdict):
    reference = Reference(Sample((1.0,), (0,)), 1.6)
    assert against_value(Sample((value,), (0,)), published, 1, reference) == verdict


@pytest.mark.parametrize("kind", [Estimate, Printed])
def test_a_ratio_has_the_extremes_of_both_intervals(kind):
    ours, base = kind(6.0, 5.0, 8.0), kind(3.0, 2.0, 4.0)
    ends = [one / other for one in (5.0, 8.0) for other in (2.0, 4.0)]
    assert ours.over(base) == kind(2.0, min(ends), max(ends))


def test_without_a_reference_only_the_number_is_judged():
    assert against_value(near(3.0), 3.1, 1) == "agrees"
    assert against_value(near(3.0), 5.0, 1) == "differs"
    assert against_value(Sample((3.0,), (0,)), 3.0, 1) == "inconclusive"


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        (near(3.0), "same direction"),  # its number, 3.0, is that printed
        (near(1.05, 0.001), "same direction"),
        # Seed by seed the same spread as the baseline: its differences vary by 0.9 each.
        (near(0.95, 1.0), "inconclusive"),
        (near(0.0, 0.2), "differs"),
    ],
)
def test_in_another_protocol_only_the_order_is_judged(ours, verdict):
    assert against_value(ours, 3.0, 1, BASE, comparable=False) == verdict
    assert against_value(ours, 3.0, 1, comparable=False) == "inconclusive"


@pytest.mark.parametrize(
    ("ours", "bound", "verdict"),
    [
        (near(150.0, 5), "at most", "agrees"),
        (near(150.0, 5), "at least", "differs"),
        (near(199.0, 5), "at most", "same direction"),
        (near(201.0, 5), "at most", "inconclusive"),
        (Sample((200.0,)), "at most", "same direction"),  # one seed is never certain
        (Sample((200.0, 200.0)), "at most", "agrees"),
        (Sample((199.0,)), "at most", "same direction"),
    ],
)
def test_a_bound(ours, bound, verdict):
    assert against_value(ours, 200.0, 1, bound=bound) == verdict
    assert against_value(ours, 200.0, 1, bound=bound, comparable=False) == "inconclusive"


@pytest.mark.parametrize(
    ("ours", "text", "bound", "verdict"),
    [
        (200.96, "201", None, "agrees"),
        (209.9, "201", None, "differs"),
        (37.0, "30", "at least", "agrees"),
        (29.9, "30", "at least", "differs"),
        (29.9, "30", "at most", "agrees"),
        (0.125, "0.13", None, "agrees"),  # either way of rounding a half
        (0.125, "0.12", None, "agrees"),
        (0.1349, "0.13", None, "agrees"),
        (0.1351, "0.13", None, "differs"),
    ],
)
def test_a_computed_number_is_equal_as_printed_or_differs(ours, text, bound, verdict):
    assert computed(ours, Printed.read(text), bound) == verdict


# ---- intervals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(2, 3), (5, 5), (7, 2)])
def test_welch(sizes):
    generator = np.random.default_rng(sum(sizes))
    first = generator.normal(37.0, 1.0, sizes[0])
    second = generator.normal(36.0, 2.5, sizes[1])
    expected = stats.ttest_ind(first, second, equal_var=False)
    found = difference(Sample(tuple(first)), Sample(tuple(second)))
    assert found.value == pytest.approx(first.mean() - second.mean())
    assert (found.low, found.high) == pytest.approx(expected.confidence_interval(0.95), rel=1e-5)
    assert bool(found.direction) == (expected.pvalue < 0.05)
    assert found.how == "Welch"


def test_a_printed_mean_is_assumed_to_have_our_spread():
    values = (36.1, 37.4, 36.9, 36.4)
    away = against_printed(Sample(values), Printed.exactly(37.03), 5).estimate
    spread = np.std(values, ddof=1) * math.sqrt(1 / 4 + 1 / 5)
    assert away.value == pytest.approx(np.mean(values) - 37.03)
    half = stats.t.ppf(0.975, 3) * spread
    assert (away.high - away.low) / 2 == pytest.approx(half, rel=1e-5)


def test_interval_of_a_mean():
    assert not mean_of([1.0]).is_known
    found = mean_of([1.0, 2.0, 4.0])
    expected = stats.t.interval(0.95, 2, 7 / 3, stats.sem([1.0, 2.0, 4.0]))
    assert (found.low, found.high) == pytest.approx(expected)


def test_rows_with_the_same_seeds_are_compared_seed_by_seed():
    """Seeds in another order; what the seeds share cancels."""
    base = Sample((10.0, 14.0, 12.0), (0, 1, 2))
    other = Sample((12.9, 11.2, 15.1), (2, 0, 1))
    found = difference(other, base)
    expected = stats.ttest_rel((11.2, 15.1, 12.9), base.values)
    assert found.value == pytest.approx(np.mean([1.2, 1.1, 0.9]))
    assert (found.low, found.high) == pytest.approx(expected.confidence_interval(0.95))
    unpaired = difference(Sample(other.values), Sample(base.values))
    assert found.high - found.low < (unpaired.high - unpaired.low) / 5


def test_seeds_that_one_side_lacks_say_nothing():
    base = Sample((9.0, 19.0), (0, 1))
    found = difference(Sample((10.0, 20.0, 0.0), (0, 1, 2)), base)
    assert (found.value, found.how) == (1.0, "paired")
    assert difference(Sample((10.0, 5.0), (0, 7)), base).how == "Welch"
    assert difference(Sample((10.0,), (0,)), base) == Estimate(1.0)
    assert half_width_of_test_set(36.0, 2000) == pytest.approx(196 * math.sqrt(0.36 * 0.64 / 2000))


def test_what_does_not_vary_is_certain():
    found = sided(Sample((1.0, 2.0, 3.0), (0, 1, 2)), Sample((0.0, 1.0, 2.0), (0, 1, 2)), 1, "d")
    assert found.verdict == "agrees"
    assert found.measured == "d: +1.00 [+1.00, +1.00]"


# ---- one rule ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("value", "half", "verdict", "at_bound"),
    [
        (2.0, 1.0, "agrees", "agrees"),
        (2.0, math.inf, "same direction", "same direction"),
        (-2.0, math.inf, "inconclusive", "inconclusive"),
        (-2.0, 1.0, "differs", "differs"),
        (0.0, 0.0, "differs", "agrees"),
        (1.0, 1.0, "same direction", "agrees"),
        (-1.0, 1.0, "differs", "inconclusive"),
    ],
)
def test_a_side(value, half, verdict, at_bound, sign):
    value *= sign
    found = Estimate(value, value - half, value + half)
    assert found.side(sign) == verdict
    assert found.side(sign, strict=False) == at_bound
    assert found.minus(-7.0).side(sign, 7.0) == verdict


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("values", "half", "verdict"),
    [
        ((1.0, 2.0, 3.0), 0.0, "agrees"),
        ((1.0, 2.0, 2.0), 0.0, "agrees"),
        ((1.0, 1.0, 1.0), 0.0, "differs"),
        ((1.0, 0.9, 3.0), 0.0, "differs"),
        ((1.0, 0.9, 3.0), 0.2, "same direction"),
        ((1.0, 1.1, 1.2), 0.2, "same direction"),
        ((1.0, 1.1, 0.95), 0.2, "inconclusive"),
        ((3.0, 2.9, 1.0), 0.2, "differs"),
    ],
)
def test_a_line(values, half, verdict, sign):
    steps = [Estimate(sign * d, sign * d - half, sign * d + half) for d in np.diff(values)]
    d = sign * (values[-1] - values[0])
    assert along(steps, Estimate(d, d - half, d + half), sign) == verdict


def test_models_that_are_one_are_compared_seed_by_seed():
    own = Sample((1.0, 2.0, 3.0), (0, 1, 2))
    assert identical(own, Sample((2.0, 3.0), (1, 2)), "w").verdict == "agrees"
    assert identical(Sample((1.0, 2.0), (0, 1)), Sample((1.0, 2.0), (1, 2)), "w").verdict == (
        "inconclusive"
    )


@pytest.mark.parametrize(
    ("needed", "device", "source", "expected"),
    [
        ("A100", "NVIDIA A100-SXM4-80GB", "measured", True),
        ("A100", "AMD EPYC", "measured", False),
        ("cuda", "cuda:0", "measured", True),
        ("cuda", "cuda:0", "predicted", False),
        ("cuda", "cpu", "measured", False),
        ("", "cpu", "predicted", True),
    ],
)
def test_a_device_is_judged_by_its_own_numbers(needed, device, source, expected):
    assert is_comparable(needed, device, source) == expected


def test_a_sentence_is_no_better_than_its_weakest_part():
    one = sided(near(3.0), near(1.0), 1, "one")
    both = combined([one, sided(None, near(1.0), 1, "other")], "It is so.")
    assert (both.verdict, both.says, both.estimate) == ("inconclusive", "It is so.", None)
    assert both.measured == (
        "one: +2.00 [+2.00, +2.00] (agrees); models that the claim requires are missing "
        "(inconclusive)"
    )
    assert combined([one]).estimate.value == pytest.approx(2.0)
    assert trend({}, 1, "").verdict == "inconclusive"


def test_one_seed_is_never_certain():
    one, other = Sample((2.0,), (0,)), Sample((1.0,), (0,))
    assert sided(one, other, 1, "d").verdict == "same direction"
    assert sided(one, other, -1, "d").verdict == "inconclusive"
    assert sided(one, other, -1, "d").measured == "d: +1.00 (no interval)"


def test_a_printed_number_has_half_a_unit_of_its_last_digit():
    assert computed(0.125, Printed.rounded(0.12, 2)) == "agrees"
    assert Estimate.exact(0.125).near(Printed.read("0.13")) == "agrees"


def test_equal_models_are_matched_by_seed():
    one, other = (Sample(v, (0, 1, 2)) for v in ((1.0, 1.2, 1.1), (1.05, 1.1, 1.2)))
    assert identical(one, other, "w").verdict == "inconclusive"
    assert difference(one, other).near(Printed.exactly(0.0)) == "agrees"  # another question
