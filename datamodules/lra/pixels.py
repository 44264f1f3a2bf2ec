"""Grey pictures as sequences of pixels: their arrays in a cache, and batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from datamodules.core.cache import Cache, CacheWriter
from datamodules.core.sequences import Ragged, Sample, TokenSplit, batch_of

__all__ = ["KeyMask", "PixelCollate", "pixel_split", "write_pictures"]

KeyMask = Literal["non_zero", "all"]


def write_pictures(
    writer: CacheWriter, name: str, pictures: Iterable[tuple[npt.NDArray[np.uint8], int]]
) -> None:
    """Add grey pictures of one size, and their classes, to a cache, one in memory at a time."""
    targets: list[int] = []
    with writer.stream(f"{name}_pixels", np.uint8) as append:
        for picture, target in pictures:
            append(picture)
            targets.append(target)
    writer.add(f"{name}_targets", np.array(targets, dtype=np.uint16))


def pixel_split(
    cache: Cache, name: str, num_pixels: int, rows: npt.NDArray[np.int64] | None = None
) -> TokenSplit:
    """Open pictures that `write_pictures` wrote; a sequence is row after row of `num_pixels`.

    `rows` are the pictures that belong to the split; None means all.
    """
    targets = np.asarray(cache.array(f"{name}_targets"))
    offsets = np.arange(len(targets) + 1, dtype=np.int64) * num_pixels
    stored = Ragged(cache.array(f"{name}_pixels"), offsets)
    return TokenSplit(stored, targets, num_pixels, rows=rows)


@dataclass(frozen=True)
class PixelCollate:
    """Make a batch of pictures of one size; ids are grey values, `key_mask` is that of `Image`."""

    key_mask: KeyMask

    def __call__(self, samples: list[Sample]) -> dict[str, Tensor]:
        """Return `inputs` and `key_mask` (B, N), `target` and `sample_ids` (B,)."""
        inputs = torch.from_numpy(np.stack([sample.values for sample in samples]))
        mask = inputs != 0 if self.key_mask == "non_zero" else torch.ones_like(inputs).bool()
        return batch_of(samples, inputs, mask)
