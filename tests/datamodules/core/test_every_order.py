"""What the training order of every kind of batch promises: pure, and the same for every layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest

from datamodules.core.order import FILL, MicroSteps, TrainingOrder
from datamodules.core.packed_order import PackedOrder, PackedRows
from datamodules.core.token_order import Lengths, TokenBatchOrder
from datamodules.text.fine_tuning.encoded import BucketOrder

NUM_SAMPLES, SEED = 53, 11
LENGTHS = np.random.default_rng(3).integers(2, 30, NUM_SAMPLES)
# By seed and layout. The first two drop the last samples of an epoch, too few for a batch of 12.
KINDS: dict[str, Callable[[int, MicroSteps], Any]] = {
    "samples": lambda seed, steps: TrainingOrder(NUM_SAMPLES, 12, seed, steps),
    "similar lengths": lambda seed, steps: BucketOrder(LENGTHS, 2, 12, seed, steps),
    "tokens": lambda seed, steps: TokenBatchOrder(Lengths(LENGTHS, LENGTHS), 197, seed, steps),
    "packed rows": lambda seed, steps: PackedOrder(PackedRows(LENGTHS, 31, seed), 6, steps),
}


def gather(
    kind: str, steps: int, ranks: int = 1, parts: int = 1, start: int = 0, seed: int = SEED
) -> list[list[int]]:
    """The samples of each optimiser step from `start`, over all ranks and accumulation steps."""
    layouts = [MicroSteps(rank, ranks, parts, lambda: start * parts) for rank in range(ranks)]
    streams = [list(islice(KINDS[kind](seed, layout), steps * parts)) for layout in layouts]
    found = []
    for first in range(0, steps * parts, parts):
        items = chain(*(stream[first + part] for part in range(parts) for stream in streams))
        samples = [item[0] if isinstance(item, tuple) else item for item in items]
        found.append([sample for sample in samples if sample != FILL])
    return found


def steps_per_epoch(kind: str) -> int:
    return KINDS[kind](SEED, MicroSteps()).steps_per_epoch


@pytest.mark.parametrize(("ranks", "parts"), [(1, 2), (2, 1), (2, 2), (3, 2), (1, 6)])
@pytest.mark.parametrize("kind", KINDS)
def test_global_batches_do_not_depend_on_the_layout(kind, ranks, parts):
    steps = 2 * steps_per_epoch(kind) + 3
    expected, found = gather(kind, steps), gather(kind, steps, ranks, parts)
    assert [sorted(step) for step in found] == [sorted(step) for step in expected]


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_has_every_sample_once_and_the_next_is_another_order(kind):
    per_epoch = steps_per_epoch(kind)
    steps = gather(kind, 2 * per_epoch)
    epochs = steps[:per_epoch], steps[per_epoch:]
    for epoch in epochs:
        seen = Counter(chain(*epoch))
        assert set(seen.values()) == {1}
        assert len(seen) == (48 if kind in ("samples", "similar lengths") else NUM_SAMPLES)
    assert {frozenset(step) for step in epochs[0]} != {frozenset(step) for step in epochs[1]}
    assert gather(kind, per_epoch, seed=SEED + 1) != epochs[0]


@pytest.mark.parametrize(("ranks", "parts"), [(1, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_arithmetic(kind, ranks, parts):
    steps = 2 * steps_per_epoch(kind) + 1
    walked = gather(kind, steps, ranks, parts)
    for start in (1, steps // 2, steps - 1):
        assert gather(kind, steps - start, ranks, parts, start) == walked[start:]
    assert len(gather(kind, 1, ranks, parts, 10**9)[0]) >= 1  # as quick as any other
