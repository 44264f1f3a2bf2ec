"""Batches of samples of similar length, which reduce padding; a function of seed and epoch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from datamodules.core.order import TrainingOrder, permutation

__all__ = ["BucketOrder"]


class BucketOrder(TrainingOrder):
    """Global batches of samples of similar length.

    The permuted samples of an epoch are divided into buckets of `bucket` batches; the samples of a
    bucket are sorted by length and divided into batches, and the batches of the epoch are permuted.
    The distribution over ranks is that of `TrainingOrder`, which also drops the remainder of an
    epoch.

    Args:
        lengths: Number of tokens of each sample.
        bucket: Number of batches per bucket; 1 disables sorting.
        arguments: Arguments of `TrainingOrder` after the number of samples.
    """

    def __init__(self, lengths: npt.NDArray[np.integer], bucket: int, *arguments: Any) -> None:
        super().__init__(len(lengths), *arguments)
        self._lengths, self._bucket = lengths, bucket

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        order = super()._order(epoch)
        if self._bucket == 1:
            return order
        used = order[: self.steps_per_epoch * self.batch_size]
        size = self._bucket * self.batch_size
        parts = [used[first : first + size] for first in range(0, len(used), size)]
        ranked = [part[np.argsort(self._lengths[part], kind="stable")] for part in parts]
        batches = np.concatenate(ranked).reshape(self.steps_per_epoch, self.batch_size)
        return batches[permutation(self.steps_per_epoch, ~self.seed, epoch)].reshape(-1)
