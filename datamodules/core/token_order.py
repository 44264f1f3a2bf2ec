"""Which sentence pairs form which batch if batches are counted in tokens.

A single sentence is treated as a pair of itself.

Training. Pairs are sorted by the length of the longer side, then of the source, then of the
target; pairs of equal lengths by a hash of (seed, epoch, pair). The sorted pairs are divided
greedily into global batches, one per optimiser step, of at most `max_tokens` tokens of the longer
side, padding included; the order of the batches in an epoch is also a function of (seed, epoch).
The boundaries depend on the lengths alone, so every epoch has the same number of batches and any
micro-step is computed by arithmetic. No pair is dropped. A global batch is distributed over A × W
micro-batches, for A accumulation steps and W ranks: pair i goes to part i mod A·W, and micro-step m
of rank r takes part (m mod A) · W + r of global batch m // A. Parts without a pair get a row with
the id FILL. Global batches therefore do not depend on the layout.

Evaluation. Each pair once, the longest first, so that out-of-memory errors occur immediately; every
rank gets the same number of batches with the same number of rows.

An item of a batch is (pair, target tokens of its global batch); the latter is 0 in evaluation.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from datamodules.core.order import FILL, ONE_RANK, MicroSteps, hashes, permutation
from lit_probattn.base.errors import DataError

Place = tuple[int, int]


class Lengths:
    """Lengths of sentence pairs, end-of-sentence token included; they determine the batches.

    Args:
        source: Number of tokens of each source sentence, (num_pairs,).
        target: Number of tokens of each target sentence, (num_pairs,).
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
        # Rank of each pair among the distinct lengths.
        self.places = np.argsort(order)[np.searchsorted(different, kinds)]
        self._larger, self._counts = larger[order], np.bincount(self.places)

    def __len__(self) -> int:
        return len(self.source)

    @property
    def longest(self) -> int:
        """Largest padded length."""
        return self.padded(int(self._larger.max(initial=0)))

    def padding_shares(self, max_tokens: int) -> tuple[float, float]:
        """Return the fractions of source and target tokens of global batches that are padding."""
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
        """Return the starts of the batches of the sorted pairs, and the end; (num_batches + 1,).

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
    """Endless micro-batches of one rank; a batch sampler without length that yields items.

    Args:
        max_tokens: Maximum number of tokens of the longer side of a global batch with padding.
        micro_steps: Micro-steps of this rank.

    Raises:
        DataError: There are no pairs.
    """

    def __init__(
        self,
        lengths: Lengths,
        max_tokens: int,
        seed: int,
        micro_steps: MicroSteps = ONE_RANK,
    ) -> None:
        if not len(lengths):
            raise DataError("the training split has no sentence pair")
        self.lengths, self.seed, self.micro_steps = lengths, seed, micro_steps
        self._cuts = lengths.cuts(max_tokens)
        self.steps_per_epoch = len(self._cuts) - 1

    def __iter__(self) -> Iterator[list[Place]]:
        steps = self.micro_steps.of_epochs(
            self.steps_per_epoch, lambda epoch: (self._sorted(epoch), self._shuffled(epoch))
        )
        for (pairs, batches), index, part in steps:
            first, end = self._cuts[batches[index] : batches[index] + 2]
            rows = pairs[first:end]
            tokens = int(self.lengths.target[rows].sum())
            mine = rows[part :: self.micro_steps.num_parts].tolist()
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
        # Rank, hash and pair are packed into one unique integer, since integers sort fast.
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
    """Return the maximum number of tokens of one evaluation batch of one rank.

    Args:
        lengths: Lengths of the samples of a split.
        max_tokens: Requested maximum. Default: the larger of `share` and the longest sample.
        share: Number of tokens of a training micro-batch.
        name: Name of the split.

    Raises:
        DataError: The longest sample exceeds `max_tokens`.
    """
    most = max(lengths.longest, share) if max_tokens is None else max_tokens
    if lengths.longest > most:
        raise DataError(
            f"eval_max_tokens={most} is below the longest sentence of {name}, "
            f"{lengths.longest} tokens; raise it"
        )
    return most


class TokenEvaluationOrder:
    """All pairs once; a batch sampler of the same length on every rank that yields items.

    Args:
        max_tokens: Maximum number of tokens of the longer side of a batch of one rank with padding.
    """

    def __init__(
        self, lengths: Lengths, max_tokens: int, rank: int = 0, world_size: int = 1
    ) -> None:
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
