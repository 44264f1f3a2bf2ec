"""Packed rows: first fit, every sample once, the same global batches for every layout."""

from __future__ import annotations

from collections import Counter
from itertools import chain, islice

import numpy as np
import pytest

from datamodules.core.order import FILL, MicroSteps
from datamodules.core.packed_order import PackedOrder, PackedRows, first_fit
from lit_probattn.base.errors import DataError

CAPACITY, ROWS_PER_STEP, SEED = 29, 6, 11
LENGTHS = np.random.default_rng(3).integers(1, CAPACITY + 1, 223)
ROWS = PackedRows(LENGTHS, CAPACITY, SEED)


def order(*layout: int, start=lambda: 0, **options) -> PackedOrder:
    return PackedOrder(ROWS, ROWS_PER_STEP, MicroSteps(*layout, start=start), **options)


def test_first_fit_takes_the_first_open_row_with_space():
    assert first_fit(np.array([6, 5, 4, 5, 1, 9]), 10).tolist() == [0, 1, 0, 1, 2, 2]
    # As many rows as are open at a time; the next closes the fullest.
    lengths = np.array([8, 9, *np.full(14, 8), 3, 1, 1, 1])
    assert first_fit(lengths, 10).tolist() == [*range(16), 16, 0, 0, 2]
    with pytest.raises(DataError, match="a sample of 11 tokens does not fit into a row of 10"):
        first_fit(np.array([3, 11]), 10)


def test_rows_hold_every_sample_once_and_not_more_than_fits():
    assert Counter(chain(*ROWS)) == Counter(range(len(LENGTHS)))
    sizes = [int(LENGTHS[row].sum()) for row in ROWS]
    assert sizes == ROWS.tokens.tolist()
    assert max(sizes) <= CAPACITY
    assert ROWS.unused == pytest.approx(1 - LENGTHS.sum() / (CAPACITY * len(ROWS)))
    assert ROWS.unused < 0.15
    assert [*PackedRows(LENGTHS, CAPACITY, SEED + 1)] != [*ROWS]


def test_items_carry_the_tokens_of_their_global_batch():
    steps = order().steps_per_epoch
    streams = [islice(order(rank, 2, counted=True), steps) for rank in range(2)]
    for parts in zip(*streams, strict=True):
        items = [item for part in parts for item in part]
        total = sum(int(LENGTHS[sample]) for sample, _ in items if sample != FILL)
        assert {tokens for _, tokens in items} == {total}


def test_parts_without_a_row_have_a_filler_and_steps_have_a_row_for_every_part():
    few = PackedRows(np.array([5, 5, 5, 5]), 5, SEED)  # four rows, three a step
    streams = [list(islice(PackedOrder(few, 3, MicroSteps(rank, 3)), 2)) for rank in range(3)]
    assert [len(stream[1]) for stream in streams] == [1, 1, 1]
    assert [stream[1][0] for stream in streams].count(FILL) == 2
    with pytest.raises(DataError, match="3 packed rows of 5 tokens, expected at least one for"):
        PackedOrder(few, 3, MicroSteps(0, 2, 2))
    with pytest.raises(DataError, match="no samples"):
        PackedRows(np.zeros(0, dtype=np.int64), 5, SEED)
