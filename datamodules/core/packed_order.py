"""Which samples form which batch if whole samples are packed into rows of a fixed size.

Samples are assigned to rows by first fit, in an order that is a function of the seed alone; rows
are the same in every epoch, and their order is a function of (seed, epoch). An epoch contains every
sample once: it is divided into global batches of `rows_per_step` rows, one per optimiser step, and
the last one may be smaller. A global batch is distributed over A × W micro-batches, for A
accumulation steps and W ranks: row i goes to part i mod A·W. Parts without a row get a sample with
the id FILL. Global batches therefore do not depend on the layout, and any micro-step is computed by
arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from datamodules.core.order import FILL, ONE_RANK, MicroSteps, hashes, permutation
from lit_probattn.base.errors import DataError

_OPEN = 16  # rows that can still receive samples
_PACKING = 0x7061636B696E67  # separates the order of first fit from that of rows


def first_fit(lengths: npt.NDArray[np.integer], capacity: int) -> npt.NDArray[np.int64]:
    """Return the row of each sample, (num_samples,): the first open row with space for it.

    If no open row has space, a new one is opened; of more than 16 open rows the fullest is closed.

    Raises:
        DataError: A sample is longer than a row.
    """
    if int(lengths.max(initial=0)) > capacity:
        raise DataError(
            f"a sample of {int(lengths.max())} tokens does not fit into a row of {capacity}"
        )
    rows = np.empty(len(lengths), dtype=np.int64)
    space: list[int] = []
    numbers: list[int] = []
    count = 0
    for place, length in enumerate(lengths.tolist()):
        slot = 0
        while slot < len(space) and space[slot] < length:
            slot += 1
        if slot == len(space):
            if slot == _OPEN:
                closed = space.index(min(space))
                del space[closed], numbers[closed]
                slot -= 1
            space.append(capacity)
            numbers.append(count)
            count += 1
        space[slot] -= length
        rows[place] = numbers[slot]
    return rows


class PackedRows:
    """Rows of whole samples, assigned by first fit in an order that depends on the seed alone.

    Args:
        lengths: Number of tokens of each sample.
        capacity: Number of tokens of a row.
        seed: Seed of the order.

    Raises:
        DataError: There are no samples, or a sample is longer than a row.
    """

    def __init__(self, lengths: npt.NDArray[np.integer], capacity: int, seed: int) -> None:
        if not len(lengths):
            raise DataError("the training split has no samples to pack")
        self.capacity, self.seed = capacity, seed
        order = np.argsort(hashes(len(lengths), seed, _PACKING), kind="stable")
        rows = first_fit(lengths[order], capacity)
        self._samples = order[np.argsort(rows, kind="stable")]
        self._starts = np.concatenate([[0], np.bincount(rows).cumsum()])
        # Number of tokens of each row, (num_rows,).
        self.tokens = np.add.reduceat(lengths[self._samples], self._starts[:-1])

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> list[int]:
        """Return the samples of a row."""
        found: list[int] = self._samples[self._starts[row] : self._starts[row + 1]].tolist()
        return found

    @property
    def unused(self) -> float:
        """Fraction of the rows' capacity that contains no token."""
        return 1 - float(self.tokens.sum()) / (len(self) * self.capacity)


class PackedOrder:
    """Endless micro-batches of one rank: a batch sampler that yields the samples of its rows.

    Args:
        rows: The rows; their seed also determines their order in each epoch.
        rows_per_step: Rows per optimiser step, over all ranks and accumulation steps.
        micro_steps: Micro-steps of this rank.
        counted: Whether an item is (sample, tokens of its global batch) instead of a sample.

    Raises:
        DataError: There are fewer rows per step than micro-batches.
    """

    def __init__(
        self,
        rows: PackedRows,
        rows_per_step: int,
        micro_steps: MicroSteps = ONE_RANK,
        *,
        counted: bool = False,
    ) -> None:
        if rows_per_step < micro_steps.num_parts:
            raise DataError(
                f"an optimiser step has {rows_per_step} packed rows of {rows.capacity} tokens, "
                "expected at least one for each of world_size x accumulate_grad_batches = "
                f"{micro_steps.world_size} x {micro_steps.accumulation} micro-batches; raise "
                "batch_size or max_tokens"
            )
        self.rows, self.rows_per_step = rows, rows_per_step
        self.micro_steps, self.counted = micro_steps, counted
        self.steps_per_epoch = -(-len(rows) // rows_per_step)

    def __iter__(self) -> Iterator[list[Any]]:
        shuffled = partial(permutation, len(self.rows), self.rows.seed)
        for order, index, part in self.micro_steps.of_epochs(self.steps_per_epoch, shuffled):
            rows = order[index * self.rows_per_step : (index + 1) * self.rows_per_step]
            mine = rows[part :: self.micro_steps.num_parts].tolist()
            found = [sample for row in mine for sample in self.rows[row]] or [FILL]
            tokens = int(self.rows.tokens[rows].sum())
            yield [(sample, tokens) for sample in found] if self.counted else found
