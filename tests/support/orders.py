"""The order of training samples, batch by batch, from the permutation alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from datamodules.core.order import permutation


def global_batch(
    num_samples: int, batch_size: int, seed: int, epoch: int, index: int
) -> npt.NDArray[np.int64]:
    """Samples of global batch `index` of an epoch, (batch_size,)."""
    return permutation(num_samples, seed, epoch)[index * batch_size : (index + 1) * batch_size]
