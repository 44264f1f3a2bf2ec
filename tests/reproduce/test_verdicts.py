"""Verdicts on printed numbers, for results made by hand."""

from __future__ import annotations

import pytest

from lit_probattn.compare.statistics import Sample
from lit_probattn.reproduce.figures.verdicts import against_bound, against_value


def near(mean, spread=0.1, count=3):
    """Values with that mean; the first below it, the last above."""
    seeds = tuple(range(count))
    half = (count - 1) / 2
    return Sample(tuple(mean + spread * (seed - half) for seed in seeds), seeds)


BASE = near(1.0), 1.6  # ours and printed of the baseline


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
        (0.9, 2.9, "cannot be told"),
        (3.0, 1.6, "cannot be told"),
    ],
)
def test_a_number_of_one_seed_has_a_direction_alone(value, published, verdict):
    assert against_value(Sample((value,), (0,)), published, 1, (Sample((1.0,), (0,)), 1.6)) == (
        verdict
    )


def test_without_a_reference_only_the_number_is_judged():
    assert against_value(near(3.0), 3.1, 1) == "agrees"
    assert against_value(near(3.0), 5.0, 1) == "differs"
    assert against_value(Sample((3.0,), (0,)), 3.0, 1) == "cannot be told"


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        (near(3.0), "same direction"),  # its number, 3.0, is that printed
        (near(1.05, 0.001), "same direction"),
        # Seed by seed the same spread as the baseline: its differences vary by 0.9 each.
        (near(0.95, 1.0), "cannot be told"),
        (near(0.0, 0.2), "differs"),
    ],
)
def test_in_another_protocol_only_the_order_is_judged(ours, verdict):
    assert against_value(ours, 3.0, 1, BASE, comparable=False) == verdict
    assert against_value(ours, 3.0, 1, comparable=False) == "cannot be told"


@pytest.mark.parametrize(
    ("ours", "bound", "verdict"),
    [
        (near(150.0, 5), "at most", "agrees"),
        (near(150.0, 5), "at least", "differs"),
        (near(199.0, 5), "at most", "same direction"),
        (near(201.0, 5), "at most", "cannot be told"),
        (Sample((200.0,)), "at most", "agrees"),
        (Sample((199.0,)), "at most", "same direction"),
    ],
)
def test_a_bound(ours, bound, verdict):
    assert against_bound(ours, 200.0, bound) == verdict
    assert against_bound(ours, 200.0, bound, comparable=False) == "cannot be told"
