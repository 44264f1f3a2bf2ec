"""File locks that the system releases when the holding process exits or is killed."""

from __future__ import annotations

import errno
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from lit_probattn.base.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_POLL_SECONDS = 0.1
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)  # not on Windows
# Error numbers of file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_held: dict[Path, int] = {}


@contextmanager
def claim(path: Path, patience: float = 0.0) -> Iterator[int | None]:
    """Lock a file; yields its handle, or None if another process holds the lock.

    If the system or the file system does not support locks, it warns and continues without one.
    Child processes that inherit the handle keep the lock.

    Args:
        path: the file; created if missing.
        patience: seconds to wait, since children of a killed process take a moment to exit.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = _open(path, 0o644)
    try:
        yield handle if _locked(handle, time.monotonic() + patience) else None
    finally:
        os.close(handle)


def _open(path: Path, mode: int) -> int:
    """Open a file for locking, and create it if it is missing.

    Raises:
        ConfigError: the file is a link, which is not followed.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | _NO_LINKS, mode)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ConfigError(f"{path} is a link, which is not followed: remove it") from None


def _locked(handle: int, end: float) -> bool:
    """Lock a handle; where the system or the file system has no locks, warn that there is none."""
    while fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(_POLL_SECONDS)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            break
    warnings.warn(
        "no file locks here: run only one command at a time in a folder of runs", stacklevel=2
    )
    return True


def hold(path: Path) -> str | None:
    """Lock a file until `release` or exit; if another process holds it, return its description.

    Forked processes do not inherit the lock. Without support, as `claim`.
    """
    if path in _held:
        return None
    handle = _open(path, 0o666)
    try:
        if not _locked(handle, 0.0):
            told = os.read(handle, 500).decode(errors="replace")
            os.close(handle)
            return told or "another process"
    except OSError:
        os.close(handle)
        raise
    since = datetime.now(UTC).isoformat(timespec="seconds")
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()} since {since}".encode())
    _held[path] = handle
    return None


def release(path: Path) -> None:
    """Release a lock of `hold`, if it is held."""
    handle = _held.pop(path, None)
    if handle is not None:
        os.close(handle)


def _leave_to_the_parent() -> None:
    for path in list(_held):
        release(path)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)
