"""Image files: decoding, timm's transforms, and random draws keyed by sample.

timm's transforms use the global generators of Python, numpy and torch. Each image seeds them from
(seed, epoch, sample) and restores them afterwards, so the augmentation of a sample does not depend
on the worker, the rank or earlier samples.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from datamodules.core.order import FILL, hashes
from datamodules.images.files import ImageFiles
from lit_probattn.base.errors import DamagedError

# Pillow detects formats by content: without a list, an EPS named .JPEG would start Ghostscript.
FORMATS = ("JPEG", "PNG", "BMP", "PPM", "WEBP")

_AUGMENT = 0x1AF  # separates these draws from order and mixing


class Request(NamedTuple):
    """A request for a training sample: sample index, epoch, optimiser step."""

    sample: int
    epoch: int
    step: int


class Sample(NamedTuple):
    """One normalised image (3, S, S); `step` is 0 in evaluation."""

    image: Tensor
    target: int
    sample_id: int
    step: int


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Seed the global generators from a key, and restore them on exit."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    seed = int(hashes(1, *key)[0])
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002
    torch.default_generator.manual_seed(seed >> 1)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


def open_image(path: Path) -> Image.Image:
    """Read an image of any mode as RGB; raises DamagedError for an unreadable file."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            if image.format == "PNG":
                image.verify()  # reading the pixels does not verify the checksums
        with Image.open(path, formats=FORMATS) as image:
            image.load()
            if image.mode.startswith("I"):
                # 16 bits: a plain conversion clips everything above 255 to white.
                grey = np.asarray(image).clip(0, 0xFFFF)
                grey[grey == image.info.get("transparency")] = 0xFFFF
                return Image.fromarray((grey >> 8).astype(np.uint8)).convert("RGB")
            if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
                # Otherwise the colours of transparent pixels would become visible.
                white = Image.new("RGBA", image.size, "white")
                return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
            return image.convert("RGB")
    except UnidentifiedImageError as error:
        reason = f"unsupported image format, expected one of {', '.join(FORMATS)}"
        if path.stat().st_size == 0:
            reason = "the file is empty"
        raise DamagedError(_damaged(path, reason)) from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DamagedError(_damaged(path, str(error))) from error


def _damaged(path: Path, reason: str) -> str:
    return (
        f"{path}: unreadable image: {reason}. Replace it with an intact copy, or remove the file; "
        "for ImageNet, `lit-probattn data check imagenet --verify true` lists all such files"
    )


def posterize_to_black(transform: Any) -> Any:
    """Let the posterize operations of a timm transform keep 0 bits, which gives black.

    Magnitudes are noisy, so timm sometimes requests 0 bits. Pillow returned a black image up to
    version 12 and raises since.
    """
    for step in getattr(transform, "transforms", ()):
        policy = (op for part in getattr(step, "policy", ()) for op in part)
        for operation in getattr(step, "ops", None) or policy:
            if operation.name.startswith("Posterize"):
                operation.aug_fn = partial(_posterize, operation.aug_fn)
    return transform


def _posterize(function: Any, image: Image.Image, bits: int, **options: Any) -> Any:
    """Keep the given number of bits per colour; 0 gives black."""
    blank = bits < 1
    return Image.new(image.mode, image.size) if blank else function(image, bits, **options)


class ImageSplit:
    """The images of one split; a map-style data set.

    Args:
        transform: Maps an image to a tensor (3, image_size, image_size).
    """

    def __init__(
        self,
        files: ImageFiles,
        transform: Callable[[Image.Image], Any],
        image_size: int,
        seed: int = 0,
    ) -> None:
        self.files, self.transform = files, transform
        self.image_size, self.seed = image_size, seed

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int | Request) -> Sample:
        """Return a sample; FILL returns a black image with the id FILL."""
        request = index if isinstance(index, Request) else Request(int(index), 0, 0)
        if request.sample == FILL:
            blank = torch.zeros(3, self.image_size, self.image_size)
            return Sample(blank, 0, FILL, request.step)
        image = open_image(self.files.path(request.sample))
        with seeded(self.seed, _AUGMENT, request.epoch, request.sample):
            tensor: Tensor = self.transform(image)
        target = int(self.files.targets[request.sample])
        return Sample(tensor, target, request.sample, request.step)

    @property
    def targets(self) -> npt.NDArray[np.integer]:
        """Class of each sample, shape (num_samples,)."""
        return self.files.targets

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of pixels of each sample, shape (num_samples,)."""
        return np.full(len(self), self.image_size**2, dtype=np.int64)
