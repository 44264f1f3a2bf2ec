"""Which sentence pairs make up which batch, where batches are counted in tokens.

A sentence alone is a pair of it with itself.

Training. Pairs are sorted by the length of their larger side, then of the source, then of the
target; pairs of equal lengths by a hash of (seed, epoch, pair). The sorted pairs are cut greedily
into global batches, one per optimiser step, of at most `max_tokens` tokens of the larger side,
padding included; the batches of an epoch come in an order that is a function of (seed, epoch) too.
Where the cuts are depends on the lengths alone, so every epoch has the same number of batches and
any micro-step is reached by arithmetic. No pair is left out. A global batch is dealt to A × W
micro-batches, for A accumulation steps and W ranks: its pair i goes to part i mod A·W, and
micro-step m of rank r takes part (m mod A) · W + r of global batch m // A. Parts without a pair get
a row with the id FILL. So global batches do not depend on the layout.

Evaluation. Each pair once, the longest first, since what does not fit into memory should show at
once; every rank gets the same number of batches with the same number of rows.

A place in a batch is (pair, target tokens of its whole global batch), the second 0 in evaluation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from datamodules.core.order import FILL, hashes, permutation
from lit_probattn.base.errors import DataError, require_at_least

__all__ = ["Lengths", "Place", "TokenBatchOrder", "TokenEvaluationOrder"]

Place = tuple[int, int]


class Lengths:
    """Lengths of sentence pairs, the end of the sentence included; they decide the cuts.

    Args:
        source: Tokens of each source sentence, (num_pairs,).
        target: Tokens of each target sentence, (num_pairs,).
        pad_multiple: Padded lengths are multiples of this, up to `most`.
        most: Largest padded length.
    """

    def __init__(
        self,
        source: npt.NDArray[np.integer],
        target: npt.NDArray[np.integer],
        pad_multiple: int = 1,
        most: int | None = None,
    ) -> None:
        self.source = source.astype(np.int64, copy=False)
        self.target = target.astype(np.int64, copy=False)
        self._pad_multiple, self._most = pad_multiple, most
        base = int(self.target.max(initial=0)) + 1
        kinds = self.source * base + self.target
        different = np.unique(kinds)
        larger = np.maximum(different // base, different % base)
        order = np.lexsort((different, larger))  # by the larger side, the source, the target
        # Place of each pair among the different lengths in order.
        self.places = np.argsort(order)[np.searchsorted(different, kinds)]
        self._larger, self._counts = larger[order], np.bincount(self.places)

    def __len__(self) -> int:
        return len(self.source)

    @property
    def longest(self) -> int:
        """Largest padded length."""
        return self.padded(int(self._larger.max(initial=0)))

    def padding_shares(self, max_tokens: int) -> tuple[float, float]:
        """Return the parts of the source and target tokens of global batches that are padding."""
        order, cuts = np.argsort(self.places, kind="stable"), self.cuts(max_tokens)
        rows = np.diff(cuts)
        shares = []
        for lengths in (self.source, self.target):
            widths = np.maximum.reduceat(lengths[order], cuts[:-1])
            padded = np.array([self.padded(width) for width in widths.tolist()]) * rows
            shares.append(1 - float(lengths.sum() / padded.sum()))
        return shares[0], shares[1]

    def padded(self, length: int) -> int:
        """Return the length to which a side is padded."""
        rounded = -(-length // self._pad_multiple) * self._pad_multiple
        return rounded if self._most is None else max(length, min(rounded, self._most))

    def cuts(self, max_tokens: int, parts: int = 1) -> npt.NDArray[np.int64]:
        """Return where batches of the sorted pairs begin, and the end; (num_batches + 1,).

        A batch has at most parts · (max_tokens // longest padded side) pairs.
        """
        cuts, rows, place = [0], 0, 0
        for larger, count in zip(self._larger.tolist(), self._counts, strict=True):
            most, left = max(1, parts * (max_tokens // self.padded(larger))), int(count)
            while left:
                if rows >= most:
                    cuts.append(place)
                    rows = 0
                taken = min(left, most - rows)
                rows, place, left = rows + taken, place + taken, left - taken
        return np.array([*cuts, place], dtype=np.int64)


class TokenBatchOrder:
    """Endless micro-batches of one rank; a batch sampler without length, of lists of places.

    Args:
        max_tokens: Most tokens of the larger side of a global batch, padding included.
        accumulation: Micro-steps per optimiser step.
        start: Returns the micro-step to begin with; asked each time the iteration begins.

    Raises:
        DataError: There is no pair.
    """

    def __init__(
        self,
        lengths: Lengths,
        max_tokens: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        accumulation: int = 1,
        start: Callable[[], int] = lambda: 0,
    ) -> None:
        require_at_least(1, max_tokens=max_tokens)
        if not len(lengths):
            raise DataError("the training split has no sentence pair")
        self.lengths, self.seed = lengths, seed
        self.rank, self.world_size, self.accumulation = rank, world_size, accumulation
        self.start = start
        self._cuts = lengths.cuts(max_tokens)
        self.steps_per_epoch = len(self._cuts) - 1

    def __iter__(self) -> Iterator[list[Place]]:
        current = -1
        pairs, batches = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        parts = self.world_size * self.accumulation
        for micro_step in itertools.count(self.start()):
            step, part = divmod(micro_step, self.accumulation)
            epoch, index = divmod(step, self.steps_per_epoch)
            if epoch != current:
                current, pairs, batches = epoch, self._sorted(epoch), self._shuffled(epoch)
            first, end = self._cuts[batches[index] : batches[index] + 2]
            rows = pairs[first:end]
            tokens = int(self.lengths.target[rows].sum())
            mine = rows[part * self.world_size + self.rank :: parts].tolist()
            yield [(pair, tokens) for pair in mine or [FILL]]

    def target_tokens(self, steps: int) -> int:
        """Return the target tokens, without padding, of the first optimiser steps of all ranks."""
        epochs, rest = divmod(steps, self.steps_per_epoch)
        lengths = self.lengths.target
        total = epochs * int(lengths.sum())
        if rest:
            pairs, batches = self._sorted(epochs), self._shuffled(epochs)[:rest]
            parts = (pairs[self._cuts[batch] : self._cuts[batch + 1]] for batch in batches)
            total += sum(int(lengths[part].sum()) for part in parts)
        return total

    def _sorted(self, epoch: int) -> npt.NDArray[np.int64]:
        # One number for place, hash and pair, no two alike, since numbers are sorted quickly.
        count, places = len(self.lengths), self.lengths.places.astype(np.uint64)
        pair_bits, place_bits = count.bit_length(), int(places.max()).bit_length()
        hash_bits = 64 - pair_bits - place_bits
        keys = hashes(count, self.seed, epoch) >> np.uint64(64 - hash_bits) << np.uint64(pair_bits)
        keys |= places << np.uint64(64 - place_bits) if place_bits else np.uint64(0)
        keys |= np.arange(count, dtype=np.uint64)
        return (np.sort(keys) & np.uint64((1 << pair_bits) - 1)).astype(np.int64)

    def _shuffled(self, epoch: int) -> npt.NDArray[np.int64]:
        return permutation(self.steps_per_epoch, ~self.seed, epoch)


def evaluation_tokens(lengths: Lengths, max_tokens: int | None, share: int, name: str) -> int:
    """Return the tokens of one evaluation batch of one rank.

    Args:
        lengths: Of the samples of a split.
        max_tokens: What is asked for. None takes `share`, or as many as the longest sample has.
        share: Tokens of a micro-batch of training.
        name: Of the split.

    Raises:
        DataError: The longest sample does not fit into what is asked for.
    """
    most = max(lengths.longest, share) if max_tokens is None else max_tokens
    if lengths.longest > most:
        raise DataError(
            f"eval_max_tokens={most} is below the longest sentence of {name}, "
            f"{lengths.longest} tokens; raise it"
        )
    return most


class TokenEvaluationOrder:
    """All pairs once; a batch sampler of the same length on every rank, of lists of places.

    Args:
        max_tokens: Most tokens of the larger side of one batch of one rank, padding included.
    """

    def __init__(
        self, lengths: Lengths, max_tokens: int, rank: int = 0, world_size: int = 1
    ) -> None:
        require_at_least(1, eval_max_tokens=max_tokens)
        self.rank, self.world_size = rank, world_size
        self._pairs = np.argsort(lengths.places, kind="stable")
        self._cuts = lengths.cuts(max_tokens, world_size)

    def __len__(self) -> int:
        return len(self._cuts) - 1

    def __iter__(self) -> Iterator[list[Place]]:
        for first, end in reversed(list(itertools.pairwise(self._cuts.tolist()))):
            rows = -(-(end - first) // self.world_size)
            mine = range(first + self.rank * rows, first + (self.rank + 1) * rows)
            yield [(int(self._pairs[place]) if place < end else FILL, 0) for place in mine]
