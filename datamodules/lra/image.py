"""Image of the Long Range Arena: CIFAR-10 in grey, read pixel by pixel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from datamodules.core.base import Published, Split
from datamodules.core.cache import Cache, CacheWriter
from datamodules.lra import cifar
from datamodules.lra.arena import ArenaPixels, pixel_split, write_images
from lit_probattn.base.errors import DataError
from lit_probattn.base.progress import progress

_NUM_IMAGES = 60000  # in the release; for the progress bar
_LUMA = np.array([0.2989, 0.5870, 0.1140], dtype=np.float32)


def to_grey(images: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Luma of red, green and blue, cast to an integer: (n, 3, S, S) -> (n, S, S).

    Source: both published pipelines use TensorFlow's conversion of 8-bit images,
        grey = floor(255.5 · (0.2989 r + 0.587 g + 0.114 b) / 255),   in float32.
    """
    scaled = images.astype(np.float32) * np.float32(1 / 255)
    luma = np.einsum("ncyx,c->nyx", scaled, _LUMA)
    return (luma * np.float32(255.5)).astype(np.uint8)


class Image(ArenaPixels):
    """CIFAR-10 in grey: 1024 pixels in row-major order, ten classes.

    Ids: the grey value 0..255. The first 90 % of the training images, in file order, are the
    training split, the last 10 % the validation split.

    Source: Long Range Arena, Image. Departs from the source: the training images are in the order
    of the release; the published pipelines read a reordered copy, so their last 10 % are other
    images.

    Args:
        **kwargs: Arguments of ArenaPixels, ArenaData and DataModule.
    """

    task = "image"
    num_classes = cifar.NUM_CLASSES
    max_seq_len = cifar.SIDE**2

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.published = {
            "train": Published(45000),
            "val": Published(5000),
            "train+val": Published(50000, per_class=5000),
            "test": Published(10000, per_class=1000),
        }

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the content of the cache; the release is fixed."""
        return {"source": "cifar-10-python", "grey": "luma, floor(255.5 y / 255)"}

    def sources(self) -> list[Path]:
        """Return the archive or the files of the folder."""
        return list(cifar.RELEASE.find_single(self.data_dir).values())

    def build(self, writer: CacheWriter) -> None:
        """Read the release."""
        release = cifar.RELEASE.find_single(self.data_dir)
        with progress("Image: reading the release", _NUM_IMAGES, "images") as advance:
            batches = cifar.read_release(release, advance)
        for split, names in cifar.SPLIT_FILES.items():
            write_images(
                writer,
                split,
                (
                    (image, int(label))
                    for images, labels in (batches[name] for name in names)
                    for image, label in zip(to_grey(images), labels, strict=True)
                ),
            )

    def splits_of(self, cache: Cache) -> dict[str, Split]:
        """Open the splits; validation is the end of the training images."""
        count = len(cache.array("train_targets"))
        first = count * 9 // 10
        if not 0 < first < count:
            raise DataError(f"Image: {count} training images leave training or validation empty")
        rows = {"train": np.arange(first), "val": np.arange(first, count)}
        splits: dict[str, Split] = {
            name: pixel_split(cache, "train", self.max_seq_len, part) for name, part in rows.items()
        }
        return splits | {"test": pixel_split(cache, "test", self.max_seq_len)}
