"""The C library of the CPU path: compiled at first use, kept outside the repository, loaded once.

The system's C compiler ($CC, cc, gcc or clang) makes it in some five seconds of two cores. Its file
is named by a hash of the sources, the flags, the compiler and the processor, and appears by a
rename, so that any number of processes may start at once. It ends with its own SHA-256, and lies in
a folder that no other user can write: nothing else is loaded. It includes no header of Python or
torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from lit_probattn.base.errors import UnsupportedError
from lit_probattn.base.files import cache_folders, digest, replacing

logger = logging.getLogger("lit_probattn")

_FOLDER = Path(__file__).parent
_HEADERS = ("philox.h", "vectors.h", "keep.h", "mixing.h", "layers.h")
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
# -O3 would write a copy of every loop for every switch: three times the time, none of the speed.
_COMMON = (
    *("-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic"),
    *("-fopenmp-simd", "-fno-signed-zeros"),
)
_SOURCES = {
    "draws.o": ("draws.c", *_COMMON, "-DDOUBLE"),
    "tiles_float.o": ("tiles.c", *_COMMON),
    "tiles_double.o": ("tiles.c", *_COMMON, "-DDOUBLE"),
    "peak.o": ("peak.c", *_COMMON),
}
# Vectors of 512 bits, where the processor has them and the compiler knows the flag.
_WIDE = "-mprefer-vector-width=512"
_SECONDS = 120
# How long to wait for another process that compiles: it may be stopped.
_PATIENCE = 60.0
# Age in seconds of what a killed compilation left.
_LEFT = 3600
_SEAL = b"sha256:"
_SEAL_BYTES = len(_SEAL) + 64
# Open files of this process by their numbers.
_HANDLES = Path("/proc/self/fd")


class Library(ctypes.CDLL):
    """The loaded library, and where it is kept."""

    path: str
    # Whether the tiles take heads in bfloat16.
    has_low: bool


def _compiler() -> list[str]:
    """Return the command of the C compiler; `$CC` may hold a launcher or flags too."""
    if platform.system() != "Linux":
        raise UnsupportedError(f"cannot be built on {platform.system()}: only Linux is supported")
    given = os.environ.get("CC", "").strip()
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise UnsupportedError(f"cannot read CC={given}: {error}") from error
    for name, *rest in [words] if words else [["cc"], ["gcc"], ["clang"]]:
        found = shutil.which(name)
        if found:
            return [found, *rest]
    if words:
        raise UnsupportedError(f"cannot find the C compiler CC={given}")
    raise UnsupportedError("cannot find a C compiler (cc, gcc or clang; CC names another)")


def obstacle() -> str | None:
    """Say why there can be no library on this machine ("cannot …"), or None; compiles nothing."""
    try:
        _compiler()
    except UnsupportedError as error:
        return str(error)
    return None


def processor() -> str:
    """Return what `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        kind = ("flags", "model name", "cpu family", "Features", "CPU part")
        wanted = [x for x in lines if x.split(":")[0].strip() in kind]
        return "\n".join(dict.fromkeys(wanted)) or platform.processor()
    except OSError:
        return platform.processor()


def _run(command: list[str]) -> str | None:
    """Run a compiler's command; return what it said if it failed."""
    try:
        done = subprocess.run(
            command, capture_output=True, errors="replace", timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr.strip() or f"status {done.returncode}")


def _compiled(compiler: list[str], scratch: Path) -> bytes:
    """Compile and link in an empty folder."""

    def compiled(made: str) -> str | None:
        source, *flags = _SOURCES[made]
        command = [*compiler, *_FLAGS, *flags, "-c", str(_FOLDER / source), "-o"]
        command.append(str(scratch / made))
        return None if _run([*command, _WIDE]) is None else _run(command)

    name, objects = shlex.join(compiler), [str(scratch / made) for made in _SOURCES]
    with ThreadPoolExecutor() as pool:
        for failed in pool.map(compiled, _SOURCES):
            if failed is not None:
                raise UnsupportedError(f"cannot be compiled by {name}: {failed.splitlines()[0]}")
    linked = scratch / "linked.so"
    failed = _run([*compiler, "-shared", *objects, "-o", str(linked), "-lm"])
    if failed is None and not linked.is_file():
        failed = "it wrote nothing"
    if failed is not None:
        raise UnsupportedError(f"cannot be linked by {name}: {failed.splitlines()[-1]}")
    return linked.read_bytes()


def _files() -> list[str]:
    """Return the names of all source files."""
    return sorted({*_HEADERS, *(source for source, *_ in _SOURCES.values())})


def _digest(compiler: list[str]) -> str:
    texts = [(_FOLDER / name).read_text() for name in _files()]
    flags = repr((_FLAGS, _SOURCES, _WIDE))
    parts = [*texts, flags, repr(compiler), processor(), platform.machine()]
    return digest("\0".join(parts), 16)


# ---- folders and files that are ours -------------------------------------------------------------


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Open a folder, made if need be, that belongs to this user alone.

    Raises:
        OSError: it cannot be made, is a link, or others own it or may write into it.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(handle)
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise PermissionError(errno.EPERM, "other users own it or may write into it")
        yield handle
    finally:
        os.close(handle)


def _sound(folder: int, name: str) -> int | None:
    """Open a library in an open folder; None if it is not there or not as it was written."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe would wait for a writer
        handle = os.open(name, flags, dir_fd=folder)
    except OSError:
        return None
    status = os.fstat(handle)
    ours = status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022
    if ours and stat.S_ISREG(status.st_mode):
        with open(handle, "rb", closefd=False) as file:
            content = file.read()
        if content[-_SEAL_BYTES:] == _seal(content[:-_SEAL_BYTES]):
            return handle
    os.close(handle)
    return None


def _seal(content: bytes) -> bytes:
    return _SEAL + digest(content).encode()


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Let one process at a time compile, where its file system can lock.

    After `_PATIENCE` seconds it is left to chance: what is compiled twice is equal.
    """
    from lit_probattn.base.locks import claim

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(claim(folder / ".lock", _PATIENCE))
        yield


def _clear(folder: Path) -> None:
    """Remove what killed compilations left."""
    for left in (*folder.glob("build-*"), *folder.glob(".cpu-*")):
        with contextlib.suppress(OSError):
            if left.lstat().st_mtime < time.time() - _LEFT:
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def _kept(compiler: list[str], folder: Path, name: str) -> Library:
    """Load the library from a folder, compiled now if it is not there.

    Raises:
        OSError: the folder cannot keep it.
        UnsupportedError: the compiler failed, or what it made is no such library.
    """
    with _opened(folder) as handle:
        found = _sound(handle, name)
        if found is None:
            with _turn(folder):
                found = _sound(handle, name)  # another process may have made it meanwhile
                if found is None:
                    logger.info("compiling %s: some seconds, once", folder / name)
                    _clear(folder)
                    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
                        content = _compiled(compiler, Path(scratch))
                    with replacing(folder / name) as file:
                        os.fchmod(file.fileno(), 0o700)
                        file.write(content + _seal(content))
                    found = _sound(handle, name)
        if found is None:
            raise OSError(errno.EIO, f"{name} is not as it was written")
        return _open(found, folder / name)


def _address(handle: int, path: Path) -> str:
    """Return the name by which the system's loader opens the file that was checked, and no other.

    Raises:
        PermissionError: that is its path, which other users can give to another file.
    """
    if (_HANDLES / str(handle)).exists():
        return str(_HANDLES / str(handle))
    path = path.resolve()
    for folder in path.parents:
        status = folder.stat()
        shared = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
        if shared or status.st_uid not in (0, os.getuid()):
            told = f"/proc is not mounted, and other users may rename what is in {folder}"
            raise PermissionError(errno.EPERM, told)
    return str(path)


def _open(handle: int, path: Path) -> Library:
    """Load an open file, which stays open: its number is the loader's name for it."""
    address = _address(handle, path)
    try:
        found = Library(address)
    except OSError as error:  # a folder whose files may not run, for one
        os.close(handle)
        raise OSError(str(error).replace(address, path.name)) from error
    pointer, size, word = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32
    try:
        found.keep_block.argtypes = [pointer, pointer, *[size] * 7, word, word, ctypes.c_int32]
        found.keep_block.restype = None
        found.noise_tile.argtypes = [pointer, *[size] * 7, word, word, word]
        found.noise_tile.restype = None
        for real in ("float", "double"):
            getattr(found, f"tiles_forward_{real}").argtypes = [pointer, size, size]
            getattr(found, f"tiles_backward_{real}").argtypes = [pointer, *[size] * 6]
        for peak in (found.peak_products, found.peak_exponentials):
            peak.argtypes, peak.restype = [pointer, size], size
        found.has_low = bool(found.has_pairs())
    except AttributeError as error:
        reason = str(error).replace(address, str(path))
        raise UnsupportedError(f"cannot be loaded: {reason}") from error
    found.path = str(path)
    return found


@lru_cache(maxsize=1)
def load() -> Library:
    """Return the library, compiled now if nobody did before; its `path` says where it is kept.

    Raises:
        UnsupportedError: no compiler, one that fails, or no folder to keep the library in; the
            package computes with torch operations then.
    """
    compiler = _compiler()
    refused = []
    try:
        name = f"cpu-{_digest(compiler)}.so"
        for folder in cache_folders():
            try:
                return _kept(compiler, folder, name)
            except OSError as error:
                refused.append(f"{folder}: {error.strerror or error}")
    except OSError as error:  # sources that cannot be read, no temporary folder at all
        raise UnsupportedError(f"cannot be made: {error}") from error
    raise UnsupportedError(f"cannot be kept or loaded: {'; '.join(refused)}")
