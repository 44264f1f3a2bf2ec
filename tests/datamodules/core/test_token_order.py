"""Batches counted in tokens: pure, the same for every layout, with every pair, none too large."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise

import numpy as np
import pytest

from datamodules.core.order import FILL, MicroSteps, hashes
from datamodules.core.token_order import Lengths, TokenBatchOrder, TokenEvaluationOrder
from lit_probattn.base.errors import DataError

MOST, SEED = 97, 11
_random = np.random.default_rng(3)
SOURCE = _random.integers(2, 30, 211)
TARGET = np.clip(SOURCE + _random.integers(-5, 6, 211), 2, None)
LENGTHS = Lengths(SOURCE, TARGET)
# Of the eight pairs in `test_order_is_fixed_for_ever`, 8 tokens a batch.
CUTS = [0, 3, 5, 7, 8]
GOLDEN = [[3], [2, 7], [4, 1, 6], [0, 5]]


def order(*layout: int, **options) -> TokenBatchOrder:
    return TokenBatchOrder(LENGTHS, MOST, SEED, MicroSteps(*layout, **options))


def gather(world_size: int, accumulation: int, steps: int) -> list[list[tuple[int, int]]]:
    """Return the places of each optimiser step, over all ranks and accumulation steps."""
    orders = [order(rank, world_size, accumulation) for rank in range(world_size)]
    streams = [list(islice(stream, steps * accumulation)) for stream in orders]
    return [
        [
            place
            for part in range(accumulation)
            for stream in streams
            for place in stream[step * accumulation + part]
        ]
        for step in range(steps)
    ]


@pytest.mark.parametrize(("world_size", "accumulation"), [(1, 2), (2, 1), (2, 2), (3, 5)])
def test_every_part_has_the_tokens_of_its_global_batch(world_size: int, accumulation: int) -> None:
    steps = 2 * order().steps_per_epoch + 3
    for before, now in zip(
        gather(1, 1, steps), gather(world_size, accumulation, steps), strict=True
    ):
        assert {tokens for _, tokens in now} == {sum(TARGET[pair] for pair, _ in before)}


def test_no_batch_is_too_large_and_lengths_come_in_a_random_order() -> None:
    steps = order().steps_per_epoch
    longest = []
    for batch in gather(1, 1, 2 * steps):
        rows = [pair for pair, _ in batch]
        longest.append(max(SOURCE[rows].max(), TARGET[rows].max()))
        assert len(rows) * longest[-1] <= MOST
    assert longest[:steps] != sorted(longest[:steps])
    assert longest[:steps] != longest[steps:]


def test_parts_of_a_step_differ_by_one_pair_and_none_is_empty() -> None:
    world_size, accumulation = 2, 3
    streams = [islice(order(rank, world_size, accumulation), 300) for rank in range(world_size)]
    parts = [[len(batch) for batch in stream] for stream in streams]
    assert min(map(min, parts)) >= 1
    for first in range(0, 300, accumulation):
        sizes = [size for part in parts for size in part[first : first + accumulation]]
        assert max(sizes) - min(sizes) <= 1


def test_cuts_are_greedy() -> None:
    """One more pair, the next longer one, would not have fitted."""
    cuts = LENGTHS.cuts(MOST).tolist()
    larger = np.sort(np.maximum(SOURCE, TARGET))
    for first, end in pairwise(cuts[:-1]):
        assert (end - first + 1) * larger[end] > MOST


def test_padding_is_counted_as_batches_have_it() -> None:
    batches = gather(1, 1, order().steps_per_epoch)
    rows = [[pair for pair, _ in batch] for batch in batches]
    for lengths, share in zip((SOURCE, TARGET), LENGTHS.padding_shares(MOST), strict=True):
        padded = sum(len(row) * lengths[row].max() for row in rows)
        # Pairs of equal lengths may change places between batches, without changing the sum.
        assert share == pytest.approx(1 - lengths.sum() / padded)
        assert share < 0.2


def test_padded_lengths_are_multiples_and_count() -> None:
    lengths = Lengths(SOURCE, TARGET, pad_multiple=8, most=30)
    assert [lengths.padded(n) for n in (2, 8, 9, 25, 31)] == [8, 8, 16, 30, 31]
    cuts = lengths.cuts(MOST)
    larger = np.sort(np.maximum(SOURCE, TARGET))
    for first, end in pairwise(cuts):
        assert (end - first) * lengths.padded(larger[end - 1]) <= MOST


def test_a_far_place_of_many_pairs_is_reached_at_once() -> None:
    """Counted in sorts, not by the clock: one of the pairs and one of the batches per epoch."""
    calls: list[int] = []

    class Counted(TokenBatchOrder):
        def _sorted(self, epoch: int):
            calls.append(epoch)
            return super()._sorted(epoch)

    stream = Counted(
        LENGTHS, MOST, SEED, MicroSteps(start=lambda: 1000 * order().steps_per_epoch + 2)
    )
    list(islice(stream, 3))
    assert calls == [1000]


@pytest.mark.parametrize("accumulation", [1, 3])
def test_target_tokens_are_those_of_the_batches(accumulation: int) -> None:
    """Counted pair by pair: none, within an epoch, whole ones, beyond."""
    stream = order(accumulation=accumulation)
    epoch = stream.steps_per_epoch
    for steps in (0, 1, epoch - 1, epoch, 2 * epoch + 3):
        batches = islice(stream, steps * accumulation)
        walked = [pair for batch in batches for pair, _ in batch if pair != FILL]
        assert order(1, 2, 2).target_tokens(steps) == int(TARGET[walked].sum())


def test_data_without_pairs_are_refused() -> None:
    with pytest.raises(DataError, match="no sentence pair"):
        TokenBatchOrder(Lengths(SOURCE[:0], TARGET[:0]), MOST, SEED)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("most", [40, 97, 400])
def test_evaluation_has_every_pair_once(world_size: int, most: int) -> None:
    orders = [TokenEvaluationOrder(LENGTHS, most, rank, world_size) for rank in range(world_size)]
    batches = [list(stream) for stream in orders]
    assert {len(found) for found in batches} == {len(orders[0])}
    pairs = [pair for found in batches for batch in found for pair, _ in batch]
    assert Counter(pair for pair in pairs if pair != FILL) == Counter(range(len(LENGTHS)))
    for together in zip(*batches, strict=True):
        assert len({len(batch) for batch in together}) == 1
        rows = [pair for batch in together for pair, _ in batch if pair != FILL]
        widest = max(SOURCE[rows].max(), TARGET[rows].max())
        assert len(together[0]) * widest <= most


def test_order_is_fixed_for_ever() -> None:
    """By hand: kinds in order, pairs of a kind by the high bits of their hash."""
    source, target = np.array([3, 2, 2, 4, 2, 3, 2, 2]), np.array([2, 2, 3, 4, 2, 2, 2, 3])
    small = TokenBatchOrder(Lengths(source, target), 8, SEED)
    chance = hashes(8, SEED, 5)
    by_hand = sorted(
        range(8), key=lambda i: (max(source[i], target[i]), source[i], target[i], chance[i])
    )
    assert small._sorted(5).tolist() == by_hand
    assert TokenBatchOrder(Lengths(source[:1], target[:1]), 8, SEED)._sorted(0).tolist() == [0]
    assert Lengths(source, target).cuts(8).tolist() == CUTS
    places = [[place for place, _ in batch] for batch in islice(small, 4)]
    assert places == GOLDEN
