"""Image files of ImageNet and their classes.

If all validation images are in one folder, the classes are read from the development kit or from
Kaggle's table.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from datamodules.core.files import read_utf8
from datamodules.core.tables import read_table
from lit_probattn.base.errors import DataError, MissingDataError
from lit_probattn.base.files import digest_of

SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".ppm", ".webp")

# Folders below data_dir that can contain train and val.
_ROOTS = ("", "imagenet", "ILSVRC2012", "ILSVRC/Data/CLS-LOC")
_KIT = "ILSVRC2012_validation_ground_truth.txt"
_TABLE = "LOC_val_solution.csv"
_PLACES = (
    "",
    "val",
    "devkit",
    "data",
    "devkit/data",
    "ILSVRC2012_devkit_t12/data",
    "../ILSVRC2012_devkit_t12/data",
    "../../..",
)


@dataclass(frozen=True)
class ImageFiles:
    """Image files of one split; names are stored as bytes to save memory.

    Args:
        classes: Folder name of each class, in the order of the class numbers.
        names: File names, shape (num_images,).
        targets: Class numbers, shape (num_images,).
        flat: Whether all images are directly in `folder`.
    """

    folder: Path
    classes: tuple[str, ...]
    names: npt.NDArray[np.bytes_]
    targets: npt.NDArray[np.int64]
    flat: bool = False

    def __len__(self) -> int:
        return len(self.targets)

    def path(self, index: int) -> Path:
        """Return the path of an image."""
        folder = self.folder if self.flat else self.folder / self.classes[self.targets[index]]
        return folder / os.fsdecode(bytes(self.names[index]))

    @property
    def digest(self) -> str:
        """SHA-256 of classes, names and sizes of all images, without reading them."""
        sizes = (self.path(index).stat().st_size for index in range(len(self)))
        return self.digest_of(map(str, sizes))

    def digest_of(self, facts: Iterable[str]) -> str:
        """Return a SHA-256 of the classes, the names, and one fact per image."""
        lines = (
            b"%d %s %s\n" % (target, bytes(name), fact.encode())
            for name, target, fact in zip(self.names, self.targets, facts, strict=True)
        )
        return digest_of(chain([repr(self.classes).encode("utf-8", "surrogateescape")], lines))

    def part(self, rows: npt.NDArray[np.integer]) -> ImageFiles:
        """Return a subset of the images."""
        names, targets = self.names[rows], self.targets[rows]
        return ImageFiles(self.folder, self.classes, names, targets, self.flat)


def find_root(data_dir: Path) -> Path:
    """Return the folder that contains `train` and `val`; raises MissingDataError."""
    for name in _ROOTS:
        root = data_dir / name
        if (root / "train").is_dir() and (root / "val").is_dir():
            return root
    folders = (data_dir / root / split for root in _ROOTS for split in ("train", "val"))
    present = [folder for folder in folders if folder.is_dir()]
    raise MissingDataError(
        f"ImageNet: no folder with train/ and val/; expected {data_dir / 'imagenet' / 'train'} and "
        f"{data_dir / 'imagenet' / 'val'} (or directly in {data_dir})"
        + (f"; found only {present[0]}" if present else "")
        + ". Get ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and "
        "ILSVRC2012_devkit_t12.tar.gz from https://image-net.org and unpack the first into "
        "train/<wnid>/, the second into val/"
    )


def read_train(root: Path) -> ImageFiles:
    """Read the class folders of `train`, numbered by name; raises DataError if one is empty."""
    folder = root / "train"
    classes = subfolders(folder)
    if not classes:
        archives = _files(folder, (".tar",))
        raise DataError(
            f"{folder} has no class folders"
            + (
                f"; unpack each archive into a separate folder, such as {archives[0]}"
                if archives
                else ""
            )
        )
    return images_of_classes(folder, classes)


def read_val(root: Path, classes: tuple[str, ...], ground_truth: Path | None) -> ImageFiles:
    """Read `val`: class folders, or all images in one folder and a file with their classes.

    Args:
        ground_truth: File with the classes of a flat folder. Default: search the usual locations.

    Raises:
        DataError: The classes differ from those of the training split, a folder is empty, an image
            has no class, or `ground_truth` is set beside class folders.
    """
    folder = root / "val"
    present = subfolders(folder)
    if present:
        if ground_truth is not None:
            raise DataError(
                f"{folder} has class folders, which contradicts ground_truth={ground_truth}: "
                "remove ground_truth, or move all images into one folder"
            )
        _check_classes(folder, classes, present)
        return images_of_classes(folder, classes)
    names = _files(folder, SUFFIXES)
    if not names:
        raise DataError(f"{folder} has neither class folders nor images")
    labels = _read_ground_truth(root, names, ground_truth)
    _check_classes(folder, classes, sorted(set(labels)))
    numbers = {name: number for number, name in enumerate(classes)}
    targets = np.array([numbers[label] for label in labels], dtype=np.int64)
    return ImageFiles(folder, classes, _as_bytes(names), targets, flat=True)


def _check_classes(folder: Path, expected: Sequence[str], found: Sequence[str]) -> None:
    extra, missing = sorted(set(found) - set(expected)), sorted(set(expected) - set(found))
    if not extra and not missing:
        return
    parts = [
        f"{len(names)} only in {where} ({', '.join(names[:3])}{', …' * (len(names) > 3)})"
        for names, where in ((missing, folder.parent / "train"), (extra, folder))
        if names
    ]
    raise DataError(
        f"training and validation have different classes: {'; '.join(parts)}. Both need the same "
        "class folders, otherwise class numbers differ"
    )


def images_of_classes(
    folder: Path, classes: tuple[str, ...], every_class: bool = True
) -> ImageFiles:
    """Read class folders; raises DataError if all or, with `every_class`, one of them is empty."""
    names: list[str] = []
    targets: list[int] = []
    for number, name in enumerate(classes):
        inside = _files(folder / name, SUFFIXES) if (folder / name).is_dir() else []
        if not inside and every_class:
            raise DataError(
                f"class folder {folder / name} contains no images ({', '.join(SUFFIXES)}); add "
                "some, or remove the class from train and val"
            )
        names += inside
        targets += [number] * len(inside)
    if not names:
        raise DataError(
            f"{folder}: the class folders contain no images ({', '.join(SUFFIXES)}); add some, or "
            "remove the folder"
        )
    return ImageFiles(folder, classes, _as_bytes(names), np.array(targets, dtype=np.int64))


def image_names(folder: Path) -> npt.NDArray[np.bytes_]:
    """Return the sorted names of the images directly in a folder."""
    return _as_bytes(_files(folder, SUFFIXES))


def _as_bytes(names: list[str]) -> npt.NDArray[np.bytes_]:
    return np.array([os.fsencode(name) for name in names], dtype=np.bytes_)


def subfolders(folder: Path) -> tuple[str, ...]:
    """Return the sorted names of the visible subfolders of a folder."""
    with os.scandir(folder) as entries:
        return tuple(sorted(e.name for e in entries if e.is_dir() and not e.name.startswith(".")))


def _files(folder: Path, suffixes: tuple[str, ...]) -> list[str]:
    """Return the sorted visible regular files of a folder with these suffixes."""
    with os.scandir(folder) as entries:
        found = [e.name for e in entries if e.name.lower().endswith(suffixes) and e.is_file()]
    return sorted(name for name in found if not name.startswith("."))


def _read_ground_truth(root: Path, names: Sequence[str], given: Path | None = None) -> list[str]:
    """Return the class (folder name) of each image, given the sorted file names."""
    path = _find(root) if given is None else given
    if not path.is_file():
        raise MissingDataError(f"ground-truth file not found: {path}")
    if path.suffix == ".csv":
        return _from_table(path, names)
    lines = read_utf8(path).split()
    if len(lines) != len(names):
        raise DataError(
            f"{path} has {len(lines)} lines, but {root / 'val'} has {len(names)} images: "
            "expected one line per image"
        )
    if all(line.isdecimal() for line in lines):
        classes = _class_of_number(path.with_name("meta.mat"))
        unknown = [line for line in lines if int(line) not in classes]
        if unknown:
            raise DataError(f"{path}: class number {unknown[0]} is missing from meta.mat")
        lines = [classes[int(line)] for line in lines]
    for place, name in enumerate(names, start=1):
        number = re.search(r"_(\d+)\.\w+$", name)
        if number is None or int(number[1]) != place:
            raise DataError(
                f"image {name} is at position {place} of the sorted names: expected "
                f"ILSVRC2012_val_{place:08d}; the ground-truth file is ordered by these numbers"
            )
    return lines


def _find(root: Path) -> Path:
    for place in _PLACES:
        for name in (_KIT, _TABLE):
            if (root / place / name).is_file():
                return root / place / name
    raise MissingDataError(
        f"{root / 'val'} has no class folders, so a file with the classes is required: expected "
        f"{root / _KIT} and meta.mat in the same folder (both from ILSVRC2012_devkit_t12.tar.gz), "
        f"or {root / _TABLE}, or its path as ground_truth"
    )


def _class_of_number(path: Path) -> dict[int, str]:
    """Read `meta.mat`: class number -> folder name of the 1000 leaf classes."""
    if not path.is_file():
        raise MissingDataError(
            f"{path} not found: it maps the numbers of the ground-truth file to classes"
        )
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise DataError(
            f"reading {path} needs scipy: pip install scipy, or move the images into val/<wnid>/"
        ) from error
    try:
        synsets = loadmat(path, squeeze_me=True)["synsets"]
        leaves = [s for s in synsets.ravel() if int(s["num_children"]) == 0]
        return {int(s["ILSVRC2012_ID"]): str(s["WNID"]) for s in leaves}
    except Exception as error:  # a corrupt file can raise anything
        raise DataError(
            f"{path}: not the meta.mat of the development kit, or corrupt ({error!r}); unpack "
            "ILSVRC2012_devkit_t12.tar.gz again"
        ) from None


def _from_table(path: Path, names: Sequence[str]) -> list[str]:
    table = read_table(path)
    if not {"ImageId", "PredictionString"} <= set(table.columns):
        raise DataError(f"{path}: expected columns ImageId and PredictionString")
    classes: dict[str, list[str]] = {}
    columns = table.columns["ImageId"], table.columns["PredictionString"]
    for row, (image, boxes) in enumerate(zip(*columns, strict=True)):
        found = boxes.split()[:1]
        if classes.setdefault(image, found) != found:
            raise DataError(f"{table.location(row)}: {image} has two classes; correct the table")
    missing = [name for name in names if not classes.get(name.rpartition(".")[0])]
    if missing:
        raise DataError(f"{path}: missing class of {missing[0]} ({len(missing)} such images)")
    return [classes[name.rpartition(".")[0]][0] for name in names]
