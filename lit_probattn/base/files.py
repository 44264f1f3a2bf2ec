"""Atomic writes, durable appends, protection of unrelated files, digests."""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from lit_probattn.base.errors import ConfigError


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Write atomically: a temporary file, renamed to `path` if the block succeeds.

    Otherwise an existing file is unchanged; the temporary file has a random new name.

    Args:
        path: the file, whose folder is created if needed.
        durable: whether to sync file and folder to disk before returning.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    file = temporary.open("x+b")  # fails if the name exists, also as a link
    try:
        with file:
            yield file
            if durable:
                sync(file)
        temporary.replace(path)
        if durable:
            _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Write a text atomically by a temporary file and a rename."""
    with replacing(path, durable=durable) as file:
        file.write(text.encode("utf-8"))


def as_unicode(name: str) -> str:
    r"""Return a file name with `\xe4` for each byte that is not UTF-8, as files of text require."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def cache_folders() -> list[Path]:
    """Return the user's cache folder, and a temporary folder in case it is not writable."""
    root = os.environ.get("XDG_CACHE_HOME") or ""
    base = Path(root) if os.path.isabs(root) else Path(os.path.expanduser("~/.cache"))
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return [base / "lit_probattn", Path(tempfile.gettempdir()) / f"lit_probattn-{user}"]


# Markers in the first lines of files written by commands: reports, pages, settings of a sweep. All
# strings of one marker must occur.
GENERATOR = '<meta name="generator" content="lit_probattn">'
MADE_BY = "# Made by `lit-probattn"
_SIGNATURES = (("command: `", "revision"), (GENERATOR,), (MADE_BY,), ('"point_timeout_s":',))
_HEAD_BYTES = 1 << 16


def refuse_to_replace(paths: Iterable[Path], *beside: Path) -> None:
    """Reject output files that exist and were not written by a command of this package.

    Args:
        paths: files to be written.
        beside: texts written with them that contain the marker; tables cannot contain it.

    Raises:
        ConfigError: such a file exists; the message names it.
    """
    known = any(_is_ours(path) or _is_ours(_unfinished(path)) for path in beside)
    for path in paths:
        if (path.exists() or path.is_symlink()) and not known and not _is_ours(path):
            raise ConfigError(
                f"{path} exists, and no command of this package wrote it: choose another path, or "
                "remove it"
            )


def begin_output(text: Path) -> None:
    """Mark the files beside a text as a command's until `end_output`: it may be interrupted."""
    replace_text(_unfinished(text), MADE_BY)


def end_output(text: Path) -> None:
    """Remove the mark of `begin_output`; the text has a marker itself."""
    _unfinished(text).unlink(missing_ok=True)


def _unfinished(text: Path) -> Path:
    return text.with_name(f".{text.stem}.unfinished")


def _is_ours(path: Path) -> bool:
    """Return whether the first lines of a file contain a marker of this package's commands."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES).decode("utf-8", errors="replace").lower()
    return any(all(part.lower() in head for part in signature) for signature in _SIGNATURES)


def sync(file: Any) -> None:
    """Flush a file to disk."""
    file.flush()
    os.fsync(file.fileno())


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append lines in one write and sync them to disk."""
    block = "".join(f"{line}\n" for line in lines).encode()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        view = memoryview(block)
        while view:
            view = view[os.write(handle, view) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_folder(folder: Path) -> None:
    """Sync a folder, which makes a rename durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- digests -------------------------------------------------------------------------------------


def digest(content: str | bytes, length: int = 64) -> str:
    """Return the first hexadecimal digits of the SHA-256; text is UTF-8 with surrogateescape."""
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()[:length]


def digest_of(parts: Iterable[bytes]) -> str:
    """Return the SHA-256 of concatenated parts, in hexadecimal digits."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(content: bytes | Iterable[bytes], size: int = 16, salt: bytes = b"") -> bytes:
    """Return a fast digest of bytes or of concatenated parts (BLAKE2b), to identify samples."""
    state = hashlib.blake2b(digest_size=size, salt=salt)
    for part in [content] if isinstance(content, bytes) else content:
        state.update(part)
    return state.digest()
