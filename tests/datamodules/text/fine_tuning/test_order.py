"""Batches of similar length: the same for every layout, and all samples once an epoch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from datamodules.core.order import MicroSteps, TrainingOrder
from datamodules.text.fine_tuning.encoded import BucketOrder

LENGTHS = np.random.default_rng(0).integers(5, 60, 53)


def steps(bucket, count=14, **layout):
    """Global batches, of micro-batches of all ranks and accumulation steps."""
    ranks, parts = layout.get("ranks", 1), layout.get("parts", 1)
    orders = [
        iter(BucketOrder(LENGTHS, bucket, 8, 3, MicroSteps(r, ranks, parts))) for r in range(ranks)
    ]
    found = []
    for _ in range(count):
        micro = [[next(order) for order in orders] for _ in range(parts)]
        found.append([sample for row in micro for part in row for sample in part])
    return found


@pytest.mark.parametrize("bucket", [1, 2, 100])
def test_every_sample_once_an_epoch(bucket):
    for first in (0, 6):
        epoch = list(itertools.chain(*steps(bucket)[first : first + 6]))
        assert len(set(epoch)) == 48


@pytest.mark.parametrize("layout", [{"ranks": 2}, {"parts": 2}, {"ranks": 2, "parts": 4}])
def test_layouts_see_the_same_batches(layout):
    assert steps(3, **layout) == steps(3)


def test_epochs_differ_and_lengths_are_alike():
    found = steps(3)
    assert found[:6] != found[6:12]
    spread = [np.ptp(LENGTHS[batch]) for batch in found]
    plain = [np.ptp(LENGTHS[batch]) for batch in steps(1)]
    assert np.mean(spread) < 0.6 * np.mean(plain)
    shortest = [int(LENGTHS[batch].min()) for batch in found[:6]]
    assert shortest != sorted(shortest)


def test_one_is_the_plain_order():
    plain = iter(TrainingOrder(53, 8, 3))
    assert steps(1) == [next(plain) for _ in range(14)]


def test_an_order_goes_on_where_it_was():
    later = iter(BucketOrder(LENGTHS, 3, 8, 3, MicroSteps(start=lambda: 9)))
    assert next(later) == steps(3)[9]
