"""The order of samples: pure, the same for every layout, exact in evaluation."""

from __future__ import annotations

from itertools import islice

import pytest

from datamodules.core.order import (
    FILL,
    EvaluationOrder,
    MicroSteps,
    TrainingOrder,
    hashes,
    permutation,
)
from lit_probattn.base.errors import DataError
from tests.support.orders import global_batch

NUM_SAMPLES, BATCH_SIZE, SEED = 53, 8, 11
GOLDEN_ORDER = [0, 7, 8, 2, 5, 9, 4, 10, 6, 3, 1]
# The first outputs of Vigna's splitmix64.c for the state 0.
SPLITMIX64 = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
STEPS = 15  # 6 steps are an epoch: into the third one


def test_global_batches_are_parts_of_the_permutations() -> None:
    steps = list(islice(TrainingOrder(NUM_SAMPLES, BATCH_SIZE, SEED), STEPS))
    for step, batch in enumerate(steps):
        expected = global_batch(NUM_SAMPLES, BATCH_SIZE, SEED, *divmod(step, 6))
        assert batch == expected.tolist()
    assert sorted(permutation(NUM_SAMPLES, SEED, 3)) == list(range(NUM_SAMPLES))


def test_seed_and_epoch_are_told_apart() -> None:
    orders = {
        tuple(permutation(20, seed, epoch)) for seed in (0, 1, -1, 2**40) for epoch in range(5)
    }
    assert len(orders) == 20


def test_permutation_is_fixed_for_ever() -> None:
    assert permutation(11, seed=0, epoch=0).tolist() == GOLDEN_ORDER


def test_hashes_without_a_key_are_splitmix64_bit_for_bit() -> None:
    assert hashes(4).tolist() == SPLITMIX64


def test_first_places_are_uniform() -> None:
    counts = [0] * 5
    for seed in range(2000):
        counts[permutation(5, seed)[0]] += 1
    assert max(abs(count - 400) for count in counts) < 4 * (2000 * 0.2 * 0.8) ** 0.5


@pytest.mark.parametrize("start", [0, 1, 5, 23, 24, 100, 10**9])
def test_resume_is_arithmetic(start: int) -> None:
    """Starting at a micro-step gives what walking there gives; a far one is as quick."""
    stream = TrainingOrder(NUM_SAMPLES, BATCH_SIZE, SEED, MicroSteps(1, 2, 2, lambda: start))
    begun = list(islice(stream, 4))
    for micro_step, ids in enumerate(begun, start=start):
        step, part = divmod(micro_step, 2)
        batch = global_batch(NUM_SAMPLES, BATCH_SIZE, SEED, *divmod(step, 6)).tolist()
        assert ids == batch[4 * part + 2 : 4 * part + 4]


def test_sizes_that_do_not_fit_are_named() -> None:
    with pytest.raises(DataError, match=r"batch_size=8, world_size=3, accumulate_grad_batches=2"):
        TrainingOrder(NUM_SAMPLES, 8, SEED, MicroSteps(0, 3, 2))
    with pytest.raises(DataError, match=r"batch_size=54 is larger than .* 53 samples"):
        TrainingOrder(NUM_SAMPLES, 54, SEED)


def test_one_step_can_contain_the_whole_training_split() -> None:
    order = TrainingOrder(NUM_SAMPLES, NUM_SAMPLES, SEED)
    assert order.steps_per_epoch == 1
    assert sorted(next(iter(order))) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 21, 30])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_sees_each_sample_once(world_size: int, rows: int) -> None:
    ranks = [list(EvaluationOrder(21, rows, rank, world_size)) for rank in range(world_size)]
    assert {len(batches) for batches in ranks} == {len(EvaluationOrder(21, rows, 0, world_size))}
    for same_step in zip(*ranks, strict=True):
        assert len({len(batch) for batch in same_step}) == 1
        assert 1 <= len(same_step[0]) <= rows
    seen = [sample for batches in ranks for batch in batches for sample in batch]
    assert sorted(sample for sample in seen if sample != FILL) == list(range(21))
    assert seen.count(FILL) < world_size
