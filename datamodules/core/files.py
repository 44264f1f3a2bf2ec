"""Finding and reading the files of releases."""

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

# Exceptions that the standard library raises for a corrupt zip file; corrupt bytes can look like
# encryption or an unknown compression.
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
    """Return a path with `~` expanded; raises DataError if there is no home folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise DataError(f"{path}: that user has no home folder; use an absolute path") from None


def missing(path: Path) -> MissingDataError:
    """Return the error of a path that does not exist; a relative one is named with its folder."""
    place = "" if path.is_absolute() else f" in {Path.cwd()}"
    return MissingDataError(f"{path}: no such file or folder{place}")


def find_set(
    title: str, folders: Iterable[Path], names: Mapping[str, str]
) -> dict[str, Path] | None:
    """Return the files `names` of the first folder that contains any of them, or None.

    Raises:
        MissingDataError: Some of the files are missing from that folder.
    """
    for folder in folders:
        paths = {key: folder / name for key, name in names.items()}
        present = [path for path in paths.values() if path.is_file()]
        if len(present) == len(paths):
            return paths
        if present:
            absent = ", ".join(str(path) for path in paths.values() if path not in present)
            raise MissingDataError(f"{title}: found {present[0]}, but missing {absent}")
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
    """Return the error for a missing release, with its expected location and official source."""
    return MissingDataError(
        f"{title}: {what} not under {data_dir}; expected {expected}. {origin}; nothing is "
        f"downloaded. Then run `lit-probattn data prepare {command} --data_dir {data_dir}`"
        f"{otherwise}"
    )


def read_tar(path: Path, take: Callable[[tarfile.TarInfo, tarfile.TarFile], None]) -> None:
    """Read a compressed tar archive as a stream; `take` is called for each member.

    Raises:
        DataError: The archive is corrupt.
    """
    try:
        with _OPENERS[path.suffix](path) as stream:
            with tarfile.open(fileobj=stream, mode="r|") as archive:
                for member in archive:
                    take(member, archive)
            while stream.read(1 << 20):  # to the end, where the checksum is
                pass
    except (tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        raise DataError(f"{path}: the archive is corrupt or truncated ({error})") from error
