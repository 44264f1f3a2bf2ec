"""Batches of samples of similar length: less padding, and still a function of seed and epoch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from datamodules.core.order import TrainingOrder, permutation

__all__ = ["BucketOrder"]


class BucketOrder(TrainingOrder):
    """Global batches whose samples are of similar length.

    The permuted samples of an epoch are cut into buckets of so many batches; the samples of a
    bucket are sorted by length and cut into batches, and the batches of the epoch are permuted.
    What `TrainingOrder` says of layouts holds; what its permutation leaves over at the end of an
    epoch is left out too.

    Args:
        lengths: Tokens of each sample.
        bucket: Batches of a bucket; 1 is the plain order.
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
