"""Which samples form which batch: pure functions of (seed, epoch, step) and the layout.

Training. An epoch is a permutation of the training split, a function of (seed, epoch) alone. It is
divided into global batches of `batch_size` samples, one per optimiser step; the remainder is
dropped. A global batch is divided into A × W micro-batches of equal size, for A accumulation steps
and W ranks; micro-step m of rank r takes part (m mod A) · W + r of global batch m // A. A global
batch therefore contains the same samples for every layout and every number of loader processes,
and any micro-step is computed by arithmetic.

Evaluation. Each sample once, in order. Every rank gets the same number of batches with the same
number of rows; at the end, rows without a sample get the id FILL.

The permutation sorts samples by a hash (the finaliser of SplitMix64, applied to a counter) and
uses no library's generator, so a seed gives the same order on every platform and version.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from lit_probattn.base.errors import DataError

FILL = -1
Order = TypeVar("Order")
_ROTATION = 0x726F74617465  # separates RotatingOrder from training

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def _mix(value: int) -> int:
    value = ((value ^ value >> 30) * _MULTIPLIERS[0]) & _MASK
    value = ((value ^ value >> 27) * _MULTIPLIERS[1]) & _MASK
    return value ^ value >> 31


def hashes(count: int, *key: int) -> npt.NDArray[np.uint64]:
    """Return `count` 64-bit hashes of (key, 0), (key, 1), …; shape (count,)."""
    state = 0
    for part in key:
        state = _mix((state ^ (part & _MASK)) + _GOLDEN & _MASK)
    value = np.uint64(state) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    value = (value ^ value >> np.uint64(30)) * np.uint64(_MULTIPLIERS[0])
    value = (value ^ value >> np.uint64(27)) * np.uint64(_MULTIPLIERS[1])
    return value ^ value >> np.uint64(31)


def permutation(count: int, seed: int, epoch: int = 0) -> npt.NDArray[np.int64]:
    """Return the order of 0..count-1 in an epoch; shape (count,)."""
    return np.argsort(hashes(count, seed, epoch), kind="stable")


def choose_per_class(
    targets: npt.NDArray[np.integer], seed: int, count: Callable[[int, int], int]
) -> npt.NDArray[np.bool_]:
    """Choose samples of each class as a pure function of the seed; True for chosen samples.

    `count` maps a class and its number of samples to the number to choose.
    """
    chosen = np.zeros(len(targets), dtype=bool)
    for target in np.unique(targets).tolist():
        rows = np.flatnonzero(targets == target)
        order = permutation(len(rows), seed, target)
        chosen[rows[order[: count(target, len(rows))]]] = True
    return chosen


@dataclass(frozen=True)
class MicroSteps:
    """The endless micro-steps of one rank.

    Args:
        rank: This rank, from 0 to world_size - 1.
        world_size: Number of ranks.
        accumulation: Micro-steps per optimiser step.
        start: Returns the first micro-step; called each time the iteration starts.
    """

    rank: int = 0
    world_size: int = 1
    accumulation: int = 1
    start: Callable[[], int] = lambda: 0

    @property
    def num_parts(self) -> int:
        """Parts of a global batch, over all ranks and accumulation steps."""
        return self.world_size * self.accumulation

    def of_epochs(
        self, steps_per_epoch: int, order: Callable[[int], Order]
    ) -> Iterator[tuple[Order, int, int]]:
        """Yield the order of the epoch, the global batch in it, and this rank's part.

        Args:
            order: Returns the order of an epoch; called once when the epoch starts.
        """
        epoch = -1
        for micro_step in itertools.count(self.start()):
            step, part = divmod(micro_step, self.accumulation)
            before, (epoch, index) = epoch, divmod(step, steps_per_epoch)
            if epoch != before:
                current = order(epoch)
            yield current, index, part * self.world_size + self.rank


ONE_RANK = MicroSteps()


class TrainingOrder:
    """Endless micro-batches of one rank; a batch sampler without length.

    Args:
        batch_size: Samples per optimiser step, over all ranks and accumulation steps.
        micro_steps: Micro-steps of this rank.
        shuffle: Whether epochs are permuted; otherwise each visits the samples in order.

    Raises:
        DataError: The sizes are inconsistent; the message gives them.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        seed: int,
        micro_steps: MicroSteps = ONE_RANK,
        shuffle: bool = True,
    ) -> None:
        if batch_size > num_samples:
            raise DataError(
                f"batch_size={batch_size} is larger than the training split of {num_samples} "
                "samples; lower batch_size"
            )
        if batch_size % micro_steps.num_parts:
            raise DataError(
                "batch_size counts the samples of one optimiser step over all ranks and "
                "accumulation steps, so it must be a multiple of world_size x "
                f"accumulate_grad_batches: batch_size={batch_size}, "
                f"world_size={micro_steps.world_size}, "
                f"accumulate_grad_batches={micro_steps.accumulation}"
            )
        self.num_samples, self.batch_size, self.seed = num_samples, batch_size, seed
        self.micro_steps, self.shuffle = micro_steps, shuffle
        self.micro_batch_size = batch_size // micro_steps.num_parts
        self.steps_per_epoch = num_samples // batch_size

    def __iter__(self) -> Iterator[list[int]]:
        steps = self.micro_steps.of_epochs(self.steps_per_epoch, self._order)
        for order, index, part in steps:
            first = index * self.batch_size + part * self.micro_batch_size
            yield order[first : first + self.micro_batch_size].tolist()

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(self.num_samples)
        return permutation(self.num_samples, self.seed, epoch)


class EvaluationOrder:
    """All samples once, in order; a batch sampler of the same length on every rank.

    Args:
        batch_size: Largest number of rows of one batch of one rank.
    """

    def __init__(
        self, num_samples: int, batch_size: int, rank: int = 0, world_size: int = 1
    ) -> None:
        self.num_samples, self.batch_size = num_samples, batch_size
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        return -(-self.num_samples // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        stride = self.batch_size * self.world_size
        for first in range(0, self.num_samples, stride):
            rows = -(-min(stride, self.num_samples - first) // self.world_size)
            mine = range(first + self.rank * rows, first + (self.rank + 1) * rows)
            yield [sample if sample < self.num_samples else FILL for sample in mine]


class RotatingOrder(EvaluationOrder):
    """A window that moves over an endless stream of samples by its own length.

    The first pass of the stream visits the samples in order, and each later pass in a new
    permutation. Evaluation k = 0, 1, … covers samples k · `window` to (k + 1) · `window` − 1 of the
    stream, so a window can span two passes.

    Source: `dataset.py` and `run_tasks.py` of MGK's code on the Long Range Arena.
    Departs from the source: the later permutations, which there depend on a generator's state.

    Args:
        num_stream: number of samples per pass.
        window: number of samples per evaluation.
        seed: seed of the later permutations.
        evaluation: returns k; called each time the iteration starts.
        batch_size: largest number of rows per batch of one rank.
    """

    def __init__(
        self,
        num_stream: int,
        window: int,
        seed: int,
        evaluation: Callable[[], int],
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(window, batch_size, rank, world_size)
        self.num_stream, self.seed, self.evaluation = num_stream, seed, evaluation

    def samples_at(self, number: int) -> npt.NDArray[np.int64]:
        """Return the samples of evaluation `number`, counted from 0; shape (window,)."""
        first = number * self.num_samples
        begin, end = first // self.num_stream, -(-(first + self.num_samples) // self.num_stream)
        passes = np.concatenate([self._order(number) for number in range(begin, end)])
        skipped = first - begin * self.num_stream
        return passes[skipped : skipped + self.num_samples]

    def _order(self, number: int) -> npt.NDArray[np.int64]:
        if number == 0:
            return np.arange(self.num_stream)
        return np.argsort(hashes(self.num_stream, self.seed, number, _ROTATION), kind="stable")

    def __iter__(self) -> Iterator[list[int]]:
        samples = self.samples_at(self.evaluation())
        for places in super().__iter__():
            yield [FILL if place == FILL else int(samples[place]) for place in places]
