"""Memory-mapped caches: a folder `<task>-<settings hash>` of .npy files and a meta.json.

A cache is written to a temporary folder next to its destination and renamed, so a folder with the
final name is always complete. meta.json is written last and stores the size and SHA-256 of every
file, so later corruption is detected when the cache is opened. A file lock ensures that concurrent
processes build a cache once; the next process that acquires the lock removes leftovers of an
interrupted build.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from datamodules.core.files import expand
from lit_probattn.base.errors import DamagedError, DataError, MissingDataError
from lit_probattn.base.files import digest, file_digest, replace_text, sync
from lit_probattn.base.locks import claim

FORMAT_VERSION = 3
_META = "meta.json"
_FACTS = "facts"
_log = logging.getLogger("datamodules")


def default_root(data_dir: Path) -> Path:
    """Return the default cache folder of a data folder, in the user's cache folder.

    Each data folder has a separate cache folder, since two releases can share a cache name.
    """
    place = data_dir.resolve()
    caches = expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return caches / "lit_probattn" / f"{place.name}-{digest(os.fsencode(place), 8)}"


@dataclass(frozen=True)
class CacheSpec:
    """Identity of a cache.

    Args:
        settings: Everything that determines the content; plain JSON values.
        sources: Returns the existing files and folders from which the cache is built; changing one
            makes the cache stale. Not part of the name.
    """

    task: str
    settings: dict[str, Any]
    sources: Callable[[], list[Path]] = field(default=list)

    @property
    def name(self) -> str:
        """Name of the folder."""
        text = json.dumps(self.settings, sort_keys=True)
        return f"{self.task}-{digest(text, 16)}"


@dataclass(frozen=True)
class Cache:
    """An opened, verified cache."""

    folder: Path
    meta: dict[str, Any]

    def array(self, name: str) -> npt.NDArray[Any]:
        """Open one array, memory-mapped and read-only."""
        return np.load(self.folder / f"{name}.npy", mmap_mode="r")

    def text(self, name: str) -> str:
        """Return a text stored by `CacheWriter.add_text`."""
        return np.asarray(self.array(name)).tobytes().decode("utf-8", "surrogatepass")

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the content, stored by `CacheWriter.add_facts`."""
        facts: dict[str, Any] = json.loads(self.text(_FACTS))
        return facts


class _MappedFile(NamedTuple):
    """Replaces a memory-mapped array while its owner is pickled."""

    path: str


class Mapped:
    """Base of classes that hold cached arrays: unpickling maps the arrays again."""

    def __getstate__(self) -> dict[str, Any]:
        return {
            name: _MappedFile(str(value.filename)) if isinstance(value, np.memmap) else value
            for name, value in vars(self).items()
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            is_mapped = isinstance(value, _MappedFile)
            vars(self)[name] = np.load(value.path, mmap_mode="r") if is_mapped else value


class CacheWriter:
    """Collects the arrays of a new cache in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, dict[str, Any]] = {}

    def add(self, name: str, array: npt.NDArray[Any]) -> None:
        """Write a non-empty array as `<name>.npy`."""
        path, whole = self.folder / f"{name}.npy", np.ascontiguousarray(array)
        with path.open("wb") as file:
            _write_header(file, whole.dtype, whole.shape)
            file.write(whole.data)  # unlike NumPy's writer, sets errno on failure
            sync(file)
        self.files[path.name] = _describe(path)

    def add_text(self, name: str, text: str) -> None:
        """Write a non-empty text as an array of bytes."""
        self.add(name, np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8))

    def add_facts(self, facts: dict[str, Any]) -> None:
        """Write facts about the content; plain JSON values."""
        self.add_text(_FACTS, json.dumps(facts))

    @contextmanager
    def stream(self, name: str, dtype: npt.DTypeLike) -> Iterator[Callable[[npt.ArrayLike], None]]:
        """Write a one-dimensional array piece by piece; yields the function that appends one."""
        path, kind, length = self.folder / f"{name}.npy", np.dtype(dtype), 0
        with path.open("wb") as file:
            _write_header(file, kind, (0,))
            start = file.tell()

            def append(piece: npt.ArrayLike) -> None:
                nonlocal length
                array = np.asarray(piece, dtype=kind)
                file.write(array.tobytes())
                length += array.size

            yield append
            file.seek(0)
            _write_header(file, kind, (length,))  # NumPy pads it for a longer size
            if file.tell() != start:
                raise RuntimeError(f"{path}: the header of {length} elements has another size")
            sync(file)
        self.files[path.name] = _describe(path)

    def finish(self, spec: CacheSpec, sources: dict[str, dict[str, Any]]) -> None:
        """Write meta.json, which completes the cache. `sources` describes the source files."""
        meta = {
            "format_version": FORMAT_VERSION,
            "task": spec.task,
            "settings": spec.settings,
            "files": self.files,
            "sources": sources,
        }
        replace_text(self.folder / _META, json.dumps(meta, indent=1, sort_keys=True), durable=True)


def _write_header(file: BinaryIO, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def open_cache(root: Path, spec: CacheSpec) -> Cache:
    """Open and verify a cache: format version, settings, sizes, checksums and source files.

    Raises:
        MissingDataError: The cache is missing.
        DataError: The cache is corrupt or stale; the message names the file.
    """
    folder = root / spec.name
    if not folder.is_dir():
        raise MissingDataError(f"no cache of {spec.task} with these settings at {folder}")
    try:
        meta = json.loads((folder / _META).read_text())
        version, files, sources = meta["format_version"], meta["files"], meta["sources"]
        settings = meta["settings"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"cache {folder}: {_META} is missing or unreadable ({error})") from None
    if version != FORMAT_VERSION:
        raise DamagedError(f"cache {folder}: format {version}, expected {FORMAT_VERSION}")
    if settings != spec.settings:
        raise DamagedError(f"cache {folder}: built with other settings: {settings}")
    try:
        for name, expected in files.items():
            _verify(folder / name, expected)
        missed = {path.name for path in folder.glob("*.npy")} - set(files)
        if missed or not files:
            listed = ", ".join(sorted(missed)) or "any array"
            raise DamagedError(f"cache {folder}: {_META} does not list {listed}")
        changed = _changed(_keyed(spec.sources()), sources)
        if changed is not None:
            raise DamagedError(f"cache {folder}: {changed} has changed since the cache was built")
    except (AttributeError, KeyError, TypeError) as error:
        raise DamagedError(f"cache {folder}: {_META} is unreadable ({error!r})") from None
    return Cache(folder, meta)


def hash_sources(root: Path, spec: CacheSpec) -> dict[str, str] | None:
    """Return the current SHA-256 of every source, by name, without reading the cache's arrays.

    A source is read only if its size or times differ from those in the cache. If all sources are
    missing, return the hashes in the cache; None if there is no cache either.
    """
    noted: dict[str, Any] = {}
    try:
        found = json.loads((root / spec.name / _META).read_text())["sources"]
        noted = {key: known for key, known in found.items() if "sha256" in known}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    present = _keyed(spec.sources())
    if not present:
        return {key: str(known["sha256"]) for key, known in noted.items()} or None
    return {
        key: str(noted[key]["sha256"])
        if key in noted and not _has_changed(path, noted[key])
        else str(_describe(path)["sha256"])
        for key, path in present.items()
    }


def ensure_cache(root: Path, spec: CacheSpec, build: Callable[[CacheWriter], None]) -> Cache:
    """Open a cache, building it if it is missing, corrupt or stale.

    `root`, the folder of all caches, is created if necessary, and not written to if the cache is
    valid. `build` adds the arrays; if it fails or is interrupted, no cache is left.

    Raises:
        DataError: `root` is not writable, or `build` raised it.
    """
    try:
        return open_cache(root, spec)
    except DataError:
        pass
    builder = root / f".{spec.name}.builder"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for path, is_folder in ((root / spec.name, True), (builder, False)):
            if path.exists() and path.is_dir() != is_folder:
                raise DataError(f"{path} blocks the path of a cache; remove or rename it")
        lock = root / f".{spec.name}.lock"
        held = ExitStack()
        if held.enter_context(claim(lock)) is None:
            who = builder.read_text() if builder.is_file() else "another process"
            _log.warning("%s is being built by %s; waiting for it", root / spec.name, who)
            held.enter_context(claim(lock, math.inf))
    except OSError as error:
        raise DataError(
            f"the cache folder {root} is not writable ({error.strerror or error}); set cache_dir "
            "or the environment variable LIT_PROBATTN_CACHE to a writable folder"
        ) from error
    with held:
        since = datetime.now(UTC).isoformat(timespec="seconds")
        replace_text(
            builder, f"process {os.getpid()} on {socket.gethostname()} since {since}", durable=True
        )
        try:
            return _open_or_build(root, spec, build)
        finally:
            builder.unlink(missing_ok=True)


def _open_or_build(root: Path, spec: CacheSpec, build: Callable[[CacheWriter], None]) -> Cache:
    """Build under the lock, unless another process has done so."""
    damage = ""
    try:
        return open_cache(root, spec)
    except DamagedError as error:
        damage = str(error)
        _log.warning("%s; rebuilding it", damage)
    except MissingDataError:
        pass
    for left in root.glob(f".{spec.name}.tmp-*"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink()
    temporary, old = (root / f".{spec.name}.tmp-{part}" for part in ("new", "old"))
    try:
        temporary.mkdir()
        writer = CacheWriter(temporary)
        # Described before they are read, so that a change during the build is detected.
        # `build` reports missing sources.
        found = {key: path for key, path in _keyed(spec.sources()).items() if path.exists()}
        sources = {key: _describe(path) for key, path in found.items()}
        build(writer)
        changed = _changed(_keyed(spec.sources()), sources)
        if changed is not None:
            raise DataError(
                f"{changed} changed while it was being read, so no cache was written; wait until "
                "it is completely written or copied, then start again"
            )
        writer.finish(spec, sources)
        if damage:
            (root / spec.name).rename(old)
        temporary.rename(root / spec.name)
    except MissingDataError as error:
        if damage:
            raise MissingDataError(f"{damage}; it cannot be rebuilt: {error}") from None
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise DataError(
            f"cache folder {root}: {(error.strerror or 'full').lower()}; free some space, or set "
            "cache_dir or the environment variable LIT_PROBATTN_CACHE to a folder on a larger disk"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    return open_cache(root, spec)


def _verify(path: Path, expected: dict[str, Any]) -> None:
    try:
        size = path.stat().st_size
    except OSError:
        raise DamagedError(f"cache {path.parent}: {path.name} is missing") from None
    if size != expected["bytes"]:
        raise DamagedError(
            f"cache {path.parent}: {path.name} has {size} bytes, expected {expected['bytes']}"
        )
    if file_digest(path) != expected["sha256"]:
        raise DamagedError(f"cache {path.parent}: {path.name} does not match its checksum")
    try:
        np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, SyntaxError) as error:
        raise DamagedError(
            f"cache {path.parent}: {path.name} is not an array of numbers ({error})"
        ) from None


def _keyed(sources: list[Path]) -> dict[str, Path]:
    """Key each source by its file name, or by its relative path if names repeat."""
    if len({path.name for path in sources}) == len(sources):
        return {path.name: path for path in sources}
    root = os.path.commonpath([path.absolute() for path in sources])
    return {path.absolute().relative_to(root).as_posix(): path for path in sources}


def _changed(present: dict[str, Path], known: dict[str, dict[str, Any]]) -> str | None:
    """Return a source that differs from its description; losing all sources is no change."""
    for key, path in present.items():
        if key not in known or _has_changed(path, known[key]):
            return str(path)
    gone = sorted(known.keys() - present.keys())
    return gone[0] if gone and present else None


def _has_changed(path: Path, known: dict[str, Any]) -> bool:
    """Compare a source with its description; its content is read only if the times differ."""
    if not path.exists():
        return True
    if path.is_dir():
        _, listing = _listing(path)
        return listing != known["listing"] and _describe(path)["sha256"] != known["sha256"]
    state = path.stat()
    if state.st_size != known["bytes"]:
        return True
    # Copying can preserve mtime, but not ctime.
    same = state.st_mtime_ns == known["mtime_ns"] and state.st_ctime_ns == known["ctime_ns"]
    return not same and file_digest(path) != known["sha256"]


def _describe(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        state = path.stat()
        times = {"mtime_ns": state.st_mtime_ns, "ctime_ns": state.st_ctime_ns}
        return {"bytes": state.st_size, **times, "sha256": file_digest(path)}
    files, listing = _listing(path)
    contents = "".join(f"{name} {file_digest(path / name)}\n" for name in files)
    return {"bytes": sum(files.values()), "listing": listing, "sha256": digest(contents)}


def _listing(folder: Path) -> tuple[dict[str, int], str]:
    """Return the files in a folder with their sizes, and a hash of names, sizes and times."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    states = {path.relative_to(folder).as_posix(): path.stat() for path in paths}
    lines = "".join(
        f"{name} {s.st_size} {s.st_mtime_ns} {s.st_ctime_ns}\n" for name, s in states.items()
    )
    return {name: state.st_size for name, state in states.items()}, digest(lines)
