"""Small pictures in the folders of ImageNet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from datamodules import ImageNet

CLASSES = ("n01", "n02", "n03")


def picture(number: int, mode: str = "RGB", size: tuple[int, int] = (40, 30)) -> Image.Image:
    """A picture of noise that depends on `number`."""
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def write_images(root: Path, train: int = 4, val: int = 2, classes=CLASSES) -> Path:
    """Write `train` and `val` with so many pictures per class; returns `root`."""
    for split, count in (("train", train), ("val", val)):
        for target, name in enumerate(classes):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                seed = 1000 * target + 10 * number + (split == "val")
                picture(seed).save(folder / f"{name}_{number}.JPEG")
    return root


def imagenet(root: Path, **options) -> ImageNet:
    """A DataModule of small pictures, set up."""
    settings = {"image_size": 16, "batch_size": 4, "cache_dir": str(root / "cache")}
    data = ImageNet(data_dir=str(root), **{**settings, **options})
    data.setup()
    return data
