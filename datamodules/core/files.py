"""Files of releases, found and read; files of our own, written whole."""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lit_probattn.base.errors import DataError, MissingDataError

__all__ = ["DAMAGED", "expand", "find_set", "not_found", "read_tar"]

# What a damaged zip makes the standard library raise; wrong bytes can look like encryption or like
# an unknown compression.
DAMAGED = (
    *(zipfile.BadZipFile, zlib.error, EOFError, KeyError, OSError),
    *(NotImplementedError, RuntimeError, UnicodeDecodeError),
)
_OPENERS: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".tgz": gzip.open,
    ".xz": lzma.open,
    ".bz2": bz2.open,
}


def expand(path: str | Path) -> Path:
    """Return a path with `~` replaced by the home folder; a DataError where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise DataError(
            f"{path}: there is no home folder of that user; give the whole path"
        ) from None


def find_set(
    title: str, folders: Iterable[Path], names: Mapping[str, str]
) -> dict[str, Path] | None:
    """Return the files `names` of the first folder that has any; None if no folder does.

    Raises:
        MissingDataError: That folder has some of them only.
    """
    for folder in folders:
        paths = {key: folder / name for key, name in names.items()}
        present = [path for path in paths.values() if path.is_file()]
        if len(present) == len(paths):
            return paths
        if present:
            absent = ", ".join(str(path) for path in paths.values() if path not in present)
            raise MissingDataError(f"{title}: found {present[0]}, but not {absent}")
    return None


def not_found(
    title: str,
    what: str,
    expected: str,
    origin: str,
    command: str,
    data_dir: Path,
    otherwise: str = "",
) -> MissingDataError:
    """Return the error for a release that is not there: where it belongs, and where it is from."""
    return MissingDataError(
        f"{title}: {what} not under {data_dir}; expected {expected}. {origin}; nothing is "
        f"downloaded. Then run `python -m datamodules prepare {command} --data_dir {data_dir}`"
        f"{otherwise}"
    )


def read_tar(path: Path, take: Callable[[tarfile.TarInfo, tarfile.TarFile], None]) -> None:
    """Read a compressed tar archive as a stream, to its end; `take` is called for each member.

    Raises:
        DataError: The archive is damaged.
    """
    try:
        with _OPENERS[path.suffix](path) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for member in archive:
                    take(member, archive)
            while stream.read(1 << 20):  # to the end: the checksum comes last
                pass
    except (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        raise DataError(f"{path}: the archive is damaged or cut off ({error})") from error
