"""Pathfinder in the format of the Long Range Arena release.

`pathfinder<side>/<difficulty folder>/metadata/*.npy` are plain text with one image per line:
folder, file name, index, label and parameters of the generator, separated by spaces. Images are
grey 8-bit PNG files at `<difficulty folder>/<folder>/<file name>`. Some released images are empty
files; they are skipped, as in the published pipelines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image as PilImage

from datamodules.core.files import not_found
from datamodules.lra.arena import RELEASE, RELEASE_FOLDERS
from lit_probattn.base.errors import DataError, MissingDataError, prefixed

# Folder of each difficulty.
FOLDERS = {
    "easy": "curv_baseline",
    "intermediate": "curv_contour_length_9",
    "hard": "curv_contour_length_14",
}
_LEAST_WORDS = 4


class Entry(NamedTuple):
    """One line of the metadata: location for messages, image file, 1 if the markers connect."""

    location: str
    path: Path
    label: int


def find_release(data_dir: Path, side: int, difficulty: str) -> Path:
    """Return the folder of a difficulty; raises MissingDataError."""
    name = f"pathfinder{side}"
    candidates = [
        data_dir / parent / name / FOLDERS[difficulty] for parent in ("", *RELEASE_FOLDERS)
    ]
    if data_dir.name == name:
        candidates.append(data_dir / FOLDERS[difficulty])
    for folder in candidates:
        if (folder / "metadata").is_dir():
            return folder
    raise not_found(
        "Pathfinder",
        f"the folder {name}/{FOLDERS[difficulty]} ({difficulty}) with imgs and metadata is",
        f"at {candidates[0]} or below its {' or '.join(RELEASE_FOLDERS)}",
        f"It is part of {RELEASE}",
        f"pathfinder --difficulty {difficulty} --resolution {side}",
        data_dir,
        ", or use --source generated",
    )


def list_metadata(folder: Path) -> list[Path]:
    """Return the metadata files of a difficulty, sorted by number; raises MissingDataError."""
    paths = sorted((folder / "metadata").glob("*.npy"), key=_number)
    if not paths:
        raise MissingDataError(f"Pathfinder: no metadata/*.npy in {folder}")
    return paths


def _number(path: Path) -> tuple[int, str]:
    digits = re.sub(r"\D", "", path.stem)
    return int(digits) if digits else -1, path.name


def read_entries(folder: Path, paths: list[Path]) -> list[Entry]:
    """Read the metadata of a difficulty; a DataError gives file, line and reason."""
    entries = [entry for path in paths for entry in _read_file(folder, path)]
    if not entries:
        raise DataError(f"{folder / 'metadata'}: the files contain no lines")
    return entries


def _read_file(folder: Path, path: Path) -> Iterator[Entry]:
    content = path.read_bytes()
    if not content:
        raise DataError(f"{path}: the file is empty; expected metadata of images")
    if content.startswith(b"\x93NUMPY"):
        raise DataError(
            f"{path}: expected plain text with one image per line (folder, file name, index, "
            "label), received a NumPy array"
        )
    for number, line in enumerate(content.splitlines(), start=1):
        with prefixed(f"{path}:{number}", ValueError, to=DataError):
            name, label = _parse(line.decode("utf-8", "backslashreplace"))
        yield Entry(f"{path}:{number}", folder / name, label)


def _parse(line: str) -> tuple[str, int]:
    """Return path and label of a line; raises ValueError with the reason."""
    words = line.split()
    if len(words) < _LEAST_WORDS:
        raise ValueError(
            f"expected at least {_LEAST_WORDS} words (folder, file name, index, label), "
            f"received {len(words)}"
        )
    name = PurePosixPath(words[0], words[1])
    if name.is_absolute() or ".." in name.parts:
        raise ValueError(f"the image {str(name)!r} is outside the release")
    if words[3] not in ("0", "1"):
        raise ValueError(f"the label must be 0 or 1, received {words[3][:40]!r}")
    return str(name), int(words[3])


def _read_image(entry: Entry, side: int) -> npt.NDArray[np.uint8] | None:
    """Return the grey values (side, side) of an image; None if the file is empty."""
    try:
        if not entry.path.stat().st_size and entry.path.is_file():
            return None
        if not entry.path.is_file():
            raise OSError("it is not a regular file")
        with PilImage.open(entry.path, formats=["PNG"]) as image:
            image.verify()  # reading the pixels does not verify the checksums
        with PilImage.open(entry.path, formats=["PNG"]) as image:
            if image.size != (side, side) or image.mode != "L":
                width, height = image.size
                raise DataError(
                    f"{entry.location}: expected a grey image (mode L) of {side} x {side} pixels, "
                    f"{entry.path} has mode {image.mode} and {width} x {height}"
                )
            return np.asarray(image)
    except FileNotFoundError:
        raise DataError(f"{entry.location}: the image {entry.path} is missing") from None
    except (OSError, SyntaxError, ValueError, PilImage.DecompressionBombError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{entry.location}: the image {entry.path} is corrupt ({error})") from None


def images(
    entries: list[Entry], side: int, advance: Callable[[int], None]
) -> Iterator[tuple[npt.NDArray[np.uint8], int]]:
    """Yield pixels and label of each non-empty image; `advance` is called for each line."""
    for entry in entries:
        image = _read_image(entry, side)
        advance(1)
        if image is not None:
            yield image, entry.label
