"""The Python version of CIFAR-10: the folder cifar-10-batches-py, or its archive.

Six files of pickled arrays (`data_batch_1` … `data_batch_5`, `test_batch`), written by Python 2.
Unpickling can run arbitrary code, so the unpickler used here resolves only the three names that the
files need and rejects all others. The archive is read as a stream; nothing is extracted.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from datamodules.core.files import Release, read_tar
from lit_probattn.base.errors import DataError

NUM_CLASSES = 10
SIDE = 32
_NUM_VALUES = 3 * SIDE * SIDE
FOLDER, ARCHIVE = "cifar-10-batches-py", "cifar-10-python.tar.gz"
SPLIT_FILES = {
    "train": tuple(f"data_batch_{number}" for number in range(1, 6)),
    "test": ("test_batch",),
}
_FILES = tuple(name for names in SPLIT_FILES.values() for name in names)
RELEASE = Release(
    "Image",
    "image",
    f"{', '.join(_FILES)}, or the archive {ARCHIVE}",
    "Official source: CIFAR-10, the Python version, www.cs.toronto.edu/~kriz/cifar.html",
    ({name: (name,) for name in _FILES}, {ARCHIVE: (ARCHIVE,)}),
    (FOLDER, ""),
)
# A file of the release has 31 MB; larger files are rejected.
_MAX_BYTES = 64 << 20

# Images (n, 3, SIDE, SIDE) and labels (n,) of one file.
Batch = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]
# Names in the pickles of NumPy arrays, as the files spell them.
_KNOWN_NAMES: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


def read_release(files: Mapping[str, Path], advance: Callable[[int], None]) -> dict[str, Batch]:
    """Read the files or the archive of `RELEASE`; return images and labels by file name.

    `advance` is called with the number of images read.

    Raises:
        DataError: A file is missing, corrupt, too large, not in the expected format, or needs a
            forbidden name; or the archive is corrupt. The message names the file.
    """
    batches: dict[str, Batch] = {}

    def take(name: str, location: str, file: IO[bytes] | None) -> None:
        if name in batches or file is None:
            raise DataError(f"{location} is a duplicate or not a regular file")
        batch = _parse(location, _bounded(location, file))
        for other, (images, _) in batches.items():
            if np.array_equal(images, batch[0]):
                raise DataError(f"{location}: the images duplicate those of {other}")
        batches[name] = batch
        advance(len(batches[name][1]))

    def take_member(member: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
        folder, _, name = member.name.removeprefix("./").rpartition("/")
        if folder == FOLDER and name in _FILES:
            file = archive.extractfile(member) if member.isfile() else None
            take(name, f"{files[ARCHIVE]}: {member.name}", file)

    if ARCHIVE not in files:
        for name, path in files.items():
            take(name, str(path), path.open("rb"))
        return batches
    read_tar(files[ARCHIVE], take_member)
    absent = [name for name in _FILES if name not in batches]
    if absent:
        raise DataError(f"{files[ARCHIVE]}: missing from the archive: {FOLDER}/{', '.join(absent)}")
    return batches


def _bounded(location: str, file: IO[bytes]) -> bytes:
    with file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise DataError(f"{location} is larger than {_MAX_BYTES} bytes: not a file of CIFAR-10")
    return content


class _Unpickler(pickle.Unpickler):
    """Resolves only the names in `_KNOWN_NAMES`.

    Args:
        location: name of the file for messages.
        content: content of the file.
    """

    def __init__(self, location: str, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")
        self.location = location

    def find_class(self, module: str, name: str) -> Any:
        """Resolve a name in the pickle; raises DataError for names not in `_KNOWN_NAMES`."""
        try:
            return _KNOWN_NAMES[module, name]
        except KeyError:
            raise DataError(
                f"{self.location}: the file references {module}.{name}, which CIFAR-10 does not "
                "need and which could run code; it was not loaded. Use the official archive"
            ) from None


def _check_opcodes(content: bytes) -> None:
    """Raise ValueError for a memo index beyond the file size: Python would allocate up to it."""
    for opcode, argument, _ in pickletools.genops(content):
        is_place = opcode.name in ("PUT", "BINPUT", "LONG_BINPUT")
        if is_place and not 0 <= int(argument or 0) < len(content):
            raise ValueError(f"memo index {argument}")


def _parse(location: str, content: bytes) -> Batch:
    """Parse and validate one file."""
    try:
        _check_opcodes(content)
        batch = _Unpickler(location, content).load()
    except DataError:
        raise
    except Exception as error:  # a corrupt pickle can raise anything
        raise DataError(f"{location}: the file is corrupt or truncated ({error!r})") from None
    try:
        if not isinstance(batch, dict):
            raise TypeError(type(batch).__name__)
        data, labels = batch[b"data"], batch[b"labels"]
        valid = data.dtype == np.uint8 and data.ndim == 2 and len(labels) == len(data) > 0
        shape = f"{data.dtype} {data.shape} with {len(labels)} labels"
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{location}: expected a dict with data and labels ({error!r})") from None
    if not valid or data.shape[1] != _NUM_VALUES:
        raise DataError(
            f"{location}: expected images of 3 x {SIDE} x {SIDE} values, uint8 (n, {_NUM_VALUES}) "
            f"with n labels, received {shape}"
        )
    for row, label in enumerate(labels):
        if type(label) is not int or not 0 <= label < NUM_CLASSES:
            raise DataError(
                f"{location}: label of image {row}: expected 0..{NUM_CLASSES - 1}, "
                f"received {label!r}"
            )
    return data.reshape(-1, 3, SIDE, SIDE), np.array(labels, dtype=np.uint8)
