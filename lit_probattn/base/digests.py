"""Digests: the names of runs, caches and files, and the shares that samples fall into."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path


def digest(content: str | bytes, length: int = 64) -> str:
    """Return the first hexadecimal digits of the SHA-256; what is not Unicode keeps its bytes."""
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()[:length]


def digest_of(parts: Iterable[bytes]) -> str:
    """Return the SHA-256 of parts that follow one another, in hexadecimal digits."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(content: bytes, size: int = 16, salt: bytes = b"") -> bytes:
    """Return a quick digest of some bytes (BLAKE2b), by which samples are told apart."""
    return hashlib.blake2b(content, digest_size=size, salt=salt).digest()
