"""The distributed Large Movie Review Dataset: the folder aclImdb, or its archive.

Labelled reviews are aclImdb/{train,test}/{neg,pos}/*.txt; everything else is ignored. An archive is
read as a stream; nothing is extracted. Reviews are read as bytes regardless of their encoding.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from datamodules.core.files import not_found, read_tar
from lit_probattn.base.errors import DataError

# Index in CLASSES is the target.
CLASSES = ("neg", "pos")
SPLITS = ("train", "test")

# The longest review of the release has about 14 kB.
MOST_REVIEW_BYTES = 16 << 20

# split -> [(class, file name, bytes)], sorted by class, then by name.
Reviews = dict[str, list[tuple[int, str, bytes]]]

_MEMBER = re.compile(r"(?:\./)?aclImdb/(train|test)/(neg|pos)/([^/]+\.txt)")
_ARCHIVES = ("aclImdb*.tar.gz", "aclImdb*.tgz", "aclImdb*.tar.xz", "aclImdb*.tar.bz2")


def find_release(data_dir: Path) -> Path:
    """Return the folder that contains train and test, else the archive; raises DataError."""
    for folder in (data_dir / "aclImdb", data_dir):
        if all((folder / split / name).is_dir() for split in SPLITS for name in CLASSES):
            return folder
    archives = sorted(path for pattern in _ARCHIVES for path in data_dir.glob(pattern))
    official = [path for path in archives if path.name == "aclImdb_v1.tar.gz"]
    if not archives:
        raise not_found(
            "Text",
            "the IMDB reviews are",
            f"the folder {data_dir / 'aclImdb'}/{{train,test}}/{{pos,neg}}/*.txt or the archive "
            f"{data_dir / 'aclImdb_v1.tar.gz'} (any aclImdb*.tar.gz, .tar.xz or .tar.bz2 of the "
            "same layout)",
            "Official source: Large Movie Review Dataset, ai.stanford.edu/~amaas/data/sentiment",
            "text",
            data_dir,
        )
    if len(archives) > 1 and not official:
        names = ", ".join(path.name for path in archives)
        raise DataError(f"Text: several archives in {data_dir} ({names}); keep only one")
    return (official or archives)[0]


def read_folder(folder: Path, advance: Callable[[int], None]) -> Reviews:
    """Read the reviews in sorted order, calling `advance` for each; empty ones raise DataError."""
    reviews: Reviews = {split: [] for split in SPLITS}
    for split in SPLITS:
        for target, name in enumerate(CLASSES):
            for path in filter(Path.is_file, (folder / split / name).glob("*.txt")):
                _reject_size(path, path.stat().st_size)
                reviews[split].append((target, path.name, path.read_bytes()))
                advance(1)
    return _sorted(reviews, folder)


def read_archive(path: Path, advance: Callable[[int], None]) -> Reviews:
    """Read the reviews in an archive in any order of its members.

    Raises:
        DataError: A member escapes the archive's folder or is a link; the archive is corrupt,
            truncated or empty; a review or a class is empty; a review is too long.
    """
    reviews: Reviews = {split: [] for split in SPLITS}

    def take(member: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
        _reject_escape(path, member)
        match = _MEMBER.fullmatch(member.name)
        if match and member.isfile():
            _reject_size(f"{path}: {member.name}", member.size)
            file = archive.extractfile(member)
            assert file is not None
            reviews[match[1]].append((CLASSES.index(match[2]), match[3], file.read()))
            advance(1)

    read_tar(path, take)
    return _sorted(reviews, path)


def _reject_size(location: object, num_bytes: int) -> None:
    if num_bytes > MOST_REVIEW_BYTES:
        raise DataError(f"{location} has {num_bytes} bytes; expected at most {MOST_REVIEW_BYTES}")


def _reject_escape(path: Path, member: tarfile.TarInfo) -> None:
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts or "\\" in member.name:
        raise DataError(f"{path}: member {member.name!r} is outside the archive's folder")
    if not (member.isfile() or member.isdir()):
        raise DataError(f"{path}: member {member.name!r} is not a regular file or folder")


def _sorted(reviews: Reviews, location: Path) -> Reviews:
    """Sort by class and name; raises DataError for empty or duplicate reviews."""
    for split, entries in reviews.items():
        entries.sort(key=lambda entry: entry[:2])
        for target, name in enumerate(CLASSES):
            names = [entry[1] for entry in entries if entry[0] == target]
            if not names:
                raise DataError(f"{location}: no reviews in {split}/{name}")
            if len(set(names)) != len(names):
                raise DataError(f"{location}: duplicate file name in {split}/{name}")
        for target, name, text in entries:
            if not text:
                raise DataError(f"{location}: {split}/{CLASSES[target]}/{name} is empty")
    return reviews
