"""Images in user-provided class folders."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.core.base import SPLITS
from datamodules.core.division import Divided, divide
from datamodules.core.files import expand
from datamodules.core.new_samples import UNLABELLED, NewSamples, is_labelled
from datamodules.core.own import (
    SHOWN_SAMPLES,
    AtPath,
    by_split,
    class_lines,
    reject_overlap,
    required_path,
    split_of,
    warn_ignored,
)
from datamodules.images.files import (
    SUFFIXES,
    ImageFiles,
    image_names,
    images_of_classes,
    subfolders,
)
from datamodules.images.imagenet import ImageNet
from datamodules.images.samples import ImageSplit, open_image
from lit_probattn.base.arguments import with_defaults
from lit_probattn.base.errors import DataError
from lit_probattn.base.files import fingerprint

_log = logging.getLogger("datamodules")


@with_defaults(image_size=64, augmentation="none", mixup=0.0, cutmix=0.0)
class ImageFolder(NewSamples, AtPath, Divided, ImageNet):
    """Images in class folders: `train/CLASS/*.jpg` and so on, or `CLASS/*.jpg`.

    Split folders can have any of the usual names (train, val, valid, test, …). Splits without a
    folder are split off from the training images by a hash of each file's content, so equal files
    are in the same split. Images of any size and colour mode are read as RGB.

    `new_path` is a folder of images, or of class folders with the names of the training classes.

    Args:
        **kwargs: Arguments of NewSamples, AtPath, Divided and ImageNet.
    """

    task = "own_images"
    # Fractions and folders instead, and `check` always reads every image.
    sets = ("held_out_per_class", "ground_truth", "verify")
    classes_of = "the folders"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(held_out_per_class=0, ground_truth=None, verify=False, **kwargs)
        self.root = expand(self.given_path)
        self.select_on_test, self.published = False, {}

    def folder_of(self, path: str) -> Path | None:
        """Return the folder of the data."""
        root = required_path(path)
        if not root.is_dir():
            raise DataError(f"{root}: expected a folder with a folder for each class")
        return root

    @cached_property
    def _folders(self) -> dict[str, ImageFiles]:
        """Files of the three splits, listed and split once."""
        splits = self._split_folders()
        if splits:
            found = self._given(splits)
        else:
            found = {"train": images_of_classes(self.root, _classes(self.root))}
        for files in found.values():
            _warn_unread(files)
        return self._divided(found)

    def _split_folders(self) -> dict[str, str]:
        """Return the folder of each split; empty if `train` is itself a class folder."""
        names = subfolders(self.root)
        found = by_split(self.root, [name for name in names if subfolders(self.root / name)])
        if not found and len(names) > 1 and all(split_of(name) is not None for name in names):
            raise DataError(
                f"{self.root}: the folders {', '.join(names)} denote splits, but contain no class "
                "folders; sort their images into class folders, or rename them"
            )
        if "train" not in found:
            return {}
        for name in names:
            if name not in found.values() and split_of(name) is not None:
                raise DataError(
                    f"{self.root / name} denotes a split, but contains no class folders; sort its "
                    "images into class folders, or rename it"
                )
        warn_ignored(self.root, names, found.values())
        return found

    def _given(self, splits: dict[str, str]) -> dict[str, ImageFiles]:
        classes = _classes(self.root / splits["train"])
        for name in splits.values():
            _reject_extra(self.root / name, classes, splits["train"])
        return {
            split: images_of_classes(self.root / name, classes, split == "train")
            for split, name in splits.items()
        }

    def _divided(self, found: dict[str, ImageFiles]) -> dict[str, ImageFiles]:
        """Split off the splits without a folder; raises DataError for duplicates across splits."""
        paths = {name: [*map(files.path, range(len(files)))] for name, files in found.items()}
        digests = {name: [*map(_digest, inside)] for name, inside in paths.items()}
        self._hashes = {
            name: files.digest_of(digest.hex() for digest in digests[name])
            for name, files in found.items()
        }
        reject_overlap(digests, paths, "images", "remove them")
        shares = self.missing_shares(found)
        if not shares:
            return found
        train, result = found["train"], dict(found)
        chosen = np.array(divide(str(self.root), digests["train"], shares, self.split_seed))
        for name in ("train", *shares):
            result[name] = train.part(np.flatnonzero(chosen == name))
        lacking = set(range(len(train.classes))) - set(result["train"].targets.tolist())
        if lacking:
            name = train.classes[min(lacking)]
            raise DataError(
                f"{self.root / name}: no images of this class are left for training; add more, or "
                "create folders train, val and test"
            )
        return result

    @property
    def source_hashes(self) -> dict[str, str]:
        """SHA-256 of names and contents of the images, per split folder or of all."""
        self._folders  # noqa: B018
        return dict(self._hashes)

    def size_lines(self) -> Iterator[str]:
        """Yield lines about the splits and image sizes, and three samples."""
        for name, split in self.splits.items():
            sizes = sorted(_pixels(split.files))
            low, median, high, most = (sizes[int(q * (len(sizes) - 1))] for q in (0, 0.5, 0.95, 1))
            yield (
                f"{name}: {len(split)} images, shorter side min {low}, median {median}, p95 "
                f"{high}, max {most} pixels"
            )
            if is_labelled(split.targets):
                yield from class_lines(self.classes, split.targets)
        train = self._folders["train"]
        for index in np.linspace(0, len(train) - 1, min(SHOWN_SAMPLES, len(train))).astype(int):
            image = open_image(train.path(int(index)))
            yield (
                f"sample {index}, {train.classes[train.targets[index]]}: "
                f"{train.path(int(index))}, {image.width} x {image.height}"
            )

    def load_splits(self) -> dict[str, Any]:
        """Open the splits, including a separate test split."""
        return self.split_objects(*(self._folders[name] for name in SPLITS))

    def new_digest(self, path: Path) -> str:
        """Return the SHA-256 of the names and contents of the new images."""
        assert self.new_samples is not None
        files: ImageFiles = self.new_samples[0].files
        return files.digest_of(_digest(files.path(i)).hex() for i in range(len(files)))

    def new_split(self, path: Path) -> tuple[ImageSplit, list[str]]:
        """Return the images of a folder, or of its class folders; both are transformed alike."""
        if not path.is_dir():
            raise DataError(f"new_path: {path}: expected a folder of images or class folders")
        classes = tuple(self.classes)
        if subfolders(path):
            _reject_extra(path, classes, "the training data")
            files = images_of_classes(path, classes, every_class=False)
        else:
            names = image_names(path)
            if not len(names):
                raise DataError(f"new_path: {path}: no images ({', '.join(SUFFIXES)})")
            files = ImageFiles(path, classes, names, np.full(len(names), UNLABELLED), flat=True)
        _warn_unread(files)
        return self.evaluated(files), []


def _classes(folder: Path) -> tuple[str, ...]:
    names = subfolders(folder)
    if len(names) < 2:
        present = f"only {names[0]}" if names else "none"
        raise DataError(
            f"{folder}: expected at least two class folders with images "
            f"({', '.join(SUFFIXES)}); found {present}"
        )
    return names


def _reject_extra(folder: Path, classes: Sequence[str], train: str) -> None:
    extra = sorted(set(subfolders(folder)) - set(classes))
    if extra:
        raise DataError(
            f"{folder}: class {extra[0]} is missing from {train}, so it cannot be learned; add "
            "images of it there, or remove it here"
        )


def _warn_unread(files: ImageFiles) -> None:
    """Warn about visible files that are not read: of other formats, or in other folders."""
    read = {files.path(index) for index in range(len(files))}
    found = (path for path in files.folder.rglob("*") if path not in read and path.is_file())
    names = sorted(path.relative_to(files.folder).as_posix() for path in found)
    visible = [name for name in names if not f"/{name}".count("/.")]
    if visible:
        _log.warning(
            f"{files.folder}: {len(visible)} files are not read, such as {visible[0]}; images are "
            f"{', '.join(SUFFIXES)}, directly in the class folders"
        )


def _digest(path: Path) -> bytes:
    return fingerprint(path.read_bytes())


def _pixels(files: ImageFiles) -> Iterator[int]:
    """Yield the shorter side of each image; raises DamagedError for an unreadable one."""
    for index in range(len(files)):
        yield min(open_image(files.path(index)).size)
