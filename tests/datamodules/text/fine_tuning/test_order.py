"""Batches of similar length; `core/test_every_order.py` has what every order promises."""

from __future__ import annotations

import itertools

import numpy as np

from datamodules.core.order import TrainingOrder
from datamodules.text.fine_tuning.encoded import BucketOrder

LENGTHS = np.random.default_rng(0).integers(5, 60, 53)


def steps(bucket: int) -> list[list[int]]:
    return list(itertools.islice(BucketOrder(LENGTHS, bucket, 8, 3), 14))


def test_lengths_of_a_batch_are_alike_and_come_in_a_random_order():
    found = steps(3)
    spread = [np.ptp(LENGTHS[batch]) for batch in found]
    plain = [np.ptp(LENGTHS[batch]) for batch in steps(1)]
    assert np.mean(spread) < 0.6 * np.mean(plain)
    shortest = [int(LENGTHS[batch].min()) for batch in found[:6]]
    assert shortest != sorted(shortest)


def test_one_is_the_plain_order():
    assert steps(1) == list(itertools.islice(TrainingOrder(53, 8, 3), 14))
