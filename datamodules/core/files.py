"""Finding, reading and unpacking the files of releases.

A release can exist in several layouts. Each layout has parts, such as the splits, and each part has
file-name patterns, of which the first match is used.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import shlex
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_probattn.base.errors import DataError, MissingDataError

ARCHIVES = (".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")
Form = Mapping[str, Sequence[str]]
_SHOWN = 3  # names of missing files
_ESCAPED = re.compile(r"\[([*?[])\]")  # by `glob.escape`

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
        f"downloaded. Then run `lit-probattn data prepare {command} --data_dir "
        f"{shlex.quote(str(data_dir))}`{otherwise}"
    )


@dataclass(frozen=True)
class Release:
    """The files of a release.

    Args:
        title: Name for messages.
        command: Options of `lit-probattn data prepare` that select the release.
        expected: File names for messages.
        origin: Official source.
        forms: File-name patterns of each part, for each layout.
        folders: Folders below `data_dir` to search.
        optional: Parts that can be missing.
        counts: Published sizes, by part.
        otherwise: Text appended to the message about missing files.
    """

    title: str
    command: str
    expected: str
    origin: str
    forms: Sequence[Form]
    folders: Sequence[str] = ("",)
    optional: Sequence[str] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    otherwise: str = ""

    def find(self, data_dir: Path, path: str = "") -> dict[str, list[Path]]:
        """Return the files of each part, from the first complete layout.

        Args:
            path: A folder to search instead of those below `data_dir`.

        Raises:
            MissingDataError: No layout is complete; the message lists the expected files, or the
                files missing from the most complete layout.
        """
        place = expand(path) if path else data_dir
        found = self.files_in([place] if path else [data_dir / name for name in self.folders])
        if found is not None:
            return found
        command = f"{self.command} --path {path}" if path else self.command
        places = [] if path else [name for name in self.folders if name]
        expected = f"{self.expected} in it" + (f" or in {' or '.join(places)}" if places else "")
        what = "the release is"
        raise not_found(
            self.title, what, expected, self.origin, command, place, otherwise=self.otherwise
        )

    def find_single(self, data_dir: Path, path: str = "") -> dict[str, Path]:
        """Return the file of each part, for layouts of single files; see `find`."""
        return {part: paths[0] for part, paths in self.find(data_dir, path).items()}

    def files_in(self, folders: Iterable[Path]) -> dict[str, list[Path]] | None:
        """Return `find_files` of this release."""
        return find_files(self.title, folders, self.forms, self.optional)


def find_files(
    title: str, folders: Iterable[Path], forms: Sequence[Form], optional: Sequence[str] = ()
) -> dict[str, list[Path]] | None:
    """Return the files of each part from the first folder with a complete layout.

    Returns:
        None if none of the files exists.

    Raises:
        MissingDataError: No layout is complete; the message has the most complete one.
    """
    incomplete: list[tuple[list[str], Path]] = []
    for folder in folders:
        for form in forms:
            found = _files_of(folder, form)
            absent = [part for part in form if part not in (*found, *optional)]
            if not absent:
                return found
            if found:
                first = next(iter(found.values()))[0]
                names = [_ESCAPED.sub(r"\1", form[part][0]) for part in absent]
                incomplete.append(([str(folder / name) for name in names], first))
    if not incomplete:
        return None
    names, first = min(incomplete, key=lambda entry: len(entry[0]))
    shown = ", ".join(shown_name(Path(name)) for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more files" if len(names) > _SHOWN else ""
    raise MissingDataError(f"{title}: found {shown_name(first)}, but missing {shown}{more}")


def _files_of(folder: Path, form: Form) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for part, patterns in form.items():
        for pattern in patterns:
            paths = sorted(path for path in folder.glob(pattern) if path.is_file())
            if paths:
                found[part] = paths
                break
    return found


# ---- archives ----------------------------------------------------------------------------------


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


def is_archive(path: Path) -> bool:
    """Whether a path has an archive suffix."""
    return path.name.endswith(ARCHIVES)


def shown_name(path: Path) -> str:
    """Return a file name for messages: for a file of an archive (see `extract`) both names."""
    for folder in path.parents:
        if is_archive(folder):
            return f"{folder.name}: {path.relative_to(folder)}"
    return str(path)


def extract(archive: Path, parent: Path, wanted: Callable[[str], bool]) -> Path:
    """Extract the selected files of an archive to a folder, preserving subfolders.

    Returns:
        The folder, which has the archive's name for `shown_name`.

    Raises:
        DataError: The archive is corrupt.
    """
    folder = parent / archive.name
    done = folder / ".done"
    if done.is_file():
        return folder

    def take(member: tarfile.TarInfo, tar: tarfile.TarFile) -> None:
        parts = [part for part in Path(member.name).parts if part not in (".", "/")]
        if not member.isfile() or ".." in parts or not parts or not wanted(parts[-1]):
            return
        place = folder.joinpath(*parts)
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("wb") as file:
            stream = tar.extractfile(member)
            while stream is not None and (block := stream.read(1 << 20)):
                file.write(block)

    folder.mkdir(parents=True, exist_ok=True)
    read_tar(archive, take)
    done.touch()
    return folder


# ---- text --------------------------------------------------------------------------------------


def read_utf8(path: Path) -> str:
    """Return the content of a text file with its line ends; a DataError names a wrong line."""
    try:
        raw = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise MissingDataError(f"{shown_name(path)}: {error.strerror}") from None
    if b"\0" in raw:
        line = raw.count(b"\n", 0, raw.index(b"\0")) + 1
        raise DataError(
            f"{shown_name(path)}, line {line}: contains a NUL character, so it is not UTF-8 text "
            "(perhaps UTF-16); convert the file to UTF-8"
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{shown_name(path)}, line {line}: not UTF-8 ({error.reason}); convert the file to "
            "UTF-8"
        ) from None


def read_text(path: Path) -> str:
    """Return the content of a text file as `read_utf8` does, with newlines as line ends."""
    return read_utf8(path).replace("\r\n", "\n").replace("\r", "\n")
