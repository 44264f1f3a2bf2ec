"""Random tokens with a learnable label, for tests, smoke runs and profiling."""

from __future__ import annotations

from typing import Any

import numpy as np

from datamodules.core.base import Generated, Padded, Split
from datamodules.core.order import hashes
from datamodules.core.sequences import Ragged, TokenSplit
from lit_probattn.base.arguments import Count
from lit_probattn.base.errors import DataError


class Synthetic(Generated, Padded):
    """Sequences of random tokens in which one of `num_classes` marker tokens occurs.

    The markers are the ids 1..num_classes; the target is the index of the one that occurs. It
    occupies 1 + length // 16 random positions. All other tokens are uniform on the
    remaining ids num_classes+1..vocab_size-1. Sample i of a split is a pure function of (data_seed,
    split, i). All data are generated in memory; there is no cache.

    Args:
        min_length: Smallest sequence length.
        max_length: Largest sequence length, and max_seq_len.
        vocab_size: Number of ids, padding included.
        num_classes: Number of classes.
        data_seed: Seed of the samples.
        **kwargs: Arguments of Generated (samples of the splits), Padded and DataModule.
    """

    task = "synthetic"
    vocab_size: int
    num_classes: int
    max_seq_len: int

    def __init__(
        self,
        *,
        min_length: Count = 32,
        max_length: Count = 64,
        vocab_size: Count = 32,
        num_classes: Count = 4,
        data_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if max_length < min_length:
            raise DataError(f"max_length={max_length} is below min_length={min_length}")
        if vocab_size < num_classes + 2:
            raise DataError(
                f"vocab_size must be at least num_classes + 2 = {num_classes + 2} (padding, one "
                f"marker per class, one other token), received {vocab_size}"
            )
        self._min_length, self.max_seq_len = min_length, max_length
        self.vocab_size, self.num_classes = vocab_size, num_classes
        self._data_seed = data_seed

    def load_splits(self) -> dict[str, Split]:
        """Generate the three splits."""
        return {
            name: self._draw(number, count)
            for number, (name, count) in enumerate(self.num_samples.items())
        }

    def _draw(self, number: int, count: int) -> TokenSplit:
        key = (self._data_seed, number)
        width = self.max_seq_len
        classes = hashes(count, *key, 0) % np.uint64(self.num_classes)
        span = np.uint64(width - self._min_length + 1)
        lengths = self._min_length + (hashes(count, *key, 1) % span).astype(np.int64)
        others = np.uint64(self.vocab_size - self.num_classes - 1)
        noise = hashes(count * width, *key, 2).reshape(count, width) % others
        tokens = 1 + self.num_classes + noise.astype(np.int64)
        real = np.arange(width) < lengths[:, None]
        chance = hashes(count * width, *key, 3).reshape(count, width) >> np.uint64(1)
        chance[~real] = np.iinfo(np.int64).max
        rank = chance.argsort(axis=1).argsort(axis=1)
        marked = rank < 1 + lengths[:, None] // 16
        tokens = np.where(marked, 1 + classes.astype(np.int64)[:, None], tokens)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        return TokenSplit(Ragged(tokens[real], offsets), classes.astype(np.int64), width)
