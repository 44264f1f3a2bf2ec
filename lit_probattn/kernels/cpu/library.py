"""The C library for CPUs: compiled at first use, cached outside the repository, loaded once.

The system's C compiler ($CC, cc, gcc or clang) needs about 12 seconds on two cores. The file name
is a hash of sources, flags, compiler and processor, and the file appears by a rename, so that many
processes may start at once. The file ends with its SHA-256, and its folder is not writable for
other users; other files are not loaded. The library includes no headers of Python or torch.
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
_HEADERS = ("philox.h", "vectors.h", "keep.h", "matrices.h", "mixing.h", "layers.h")
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
# -O3 would duplicate every loop for every switch: three times the compile time, no speed-up.
_COMMON = (
    *("-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic"),
    *("-fopenmp-simd", "-fno-signed-zeros"),
)
_SOURCES = {
    "draws.o": ("draws.c", *_COMMON, "-DDOUBLE"),
    "tiles_float.o": ("tiles.c", *_COMMON),
    "tiles_double.o": ("tiles.c", *_COMMON, "-DDOUBLE"),
    "linear_float.o": ("linear.c", *_COMMON),
    "linear_double.o": ("linear.c", *_COMMON, "-DDOUBLE"),
    "peak.o": ("peak.c", *_COMMON),
}
# Start files of -ffast-math would round the denormal numbers of the process to zero.
_LINK_FLAGS = ("-shared", "-nostartfiles")
# Vectors of 512 bits, if processor and compiler support them.
_WIDE = "-mprefer-vector-width=512"
# Limit for the compiler, which needs 18 s of CPU: on a busy machine that takes minutes.
_SECONDS = 600
# Seconds to wait for another process that compiles, which may have been stopped.
_PATIENCE = 120.0
# Age in seconds of files left by killed compilations.
_LEFT = 3600
_SEAL = b"sha256:"
_SEAL_BYTES = len(_SEAL) + 64
# Open files of this process by number.
_HANDLES = Path("/proc/self/fd")


class Library(ctypes.CDLL):
    """The loaded library and its path."""

    path: str
    # How tiles multiply heads in bfloat16: 0 not, 1 in pairs, 2 in matrix registers (AMX).
    low_products: int


def _compiler() -> list[str]:
    """Return the command of the C compiler; `$CC` may include a launcher or flags."""
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
    """Return why this machine cannot have a library ("cannot …"), or None; does not compile."""
    try:
        _compiler()
    except UnsupportedError as error:
        return str(error)
    return None


def processor() -> str:
    """Return the processor properties that `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        kind = ("flags", "model name", "cpu family", "Features", "CPU part")
        wanted = [x for x in lines if x.split(":")[0].strip() in kind]
        return "\n".join(dict.fromkeys(wanted)) or platform.processor()
    except OSError:
        return platform.processor()


def _run(command: list[str]) -> str | None:
    """Run a compiler command; return its error output if it fails."""
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
    failed = _run([*compiler, *_LINK_FLAGS, *objects, "-o", str(linked), "-lm"])
    if failed is None and not linked.is_file():
        failed = "no output was written"
    if failed is not None:
        raise UnsupportedError(f"cannot be linked by {name}: {failed.splitlines()[-1]}")
    return linked.read_bytes()


def _files() -> list[str]:
    return sorted({*_HEADERS, *(source for source, *_ in _SOURCES.values())})


def _digest(compiler: list[str]) -> str:
    texts = [(_FOLDER / name).read_text() for name in _files()]
    flags = repr((_FLAGS, _SOURCES, _LINK_FLAGS, _WIDE))
    parts = [*texts, flags, repr(compiler), processor(), platform.machine()]
    return digest("\0".join(parts), 16)


# ---- folders and files of this user --------------------------------------------------------------


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Open a folder that only this user can write; create it if it is missing.

    Raises:
        OSError: it cannot be created, is a link, or is owned by or writable for others.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(handle)
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise PermissionError(errno.EPERM, "it is owned by or writable for other users")
        yield handle
    finally:
        os.close(handle)


def _sound(folder: int, name: str) -> int | None:
    """Open a library in an open folder; None if it is missing or corrupt."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # opening a pipe would block
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
    """Allow one process at a time to compile, if the file system supports locks.

    After `_PATIENCE` seconds several may compile, with equal results.
    """
    from lit_probattn.base.locks import claim

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(claim(folder / ".lock", _PATIENCE))
        yield


def _clear(folder: Path) -> None:
    """Remove files left by killed compilations."""
    for left in (*folder.glob("build-*"), *folder.glob(".cpu-*")):
        with contextlib.suppress(OSError):
            if left.lstat().st_mtime < time.time() - _LEFT:
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def _kept(compiler: list[str], folder: Path, name: str) -> Library:
    """Load the library from a folder; compile it if it is missing.

    Raises:
        OSError: the folder cannot store it.
        UnsupportedError: the compiler failed, or its output is not the expected library.
    """
    with _opened(folder) as handle:
        found = _sound(handle, name)
        if found is None:
            with _turn(folder):
                found = _sound(handle, name)  # another process may have compiled it
                if found is None:
                    logger.info("compiling %s (once, a few seconds)", folder / name)
                    _clear(folder)
                    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as scratch:
                        content = _compiled(compiler, Path(scratch))
                    with replacing(folder / name) as file:
                        os.fchmod(file.fileno(), 0o700)
                        file.write(content + _seal(content))
                    found = _sound(handle, name)
        if found is None:
            raise OSError(errno.EIO, f"{name} is corrupt")
        return _open(found, folder / name)


def _address(handle: int, path: Path) -> str:
    """Return the path by which the loader opens exactly the verified file.

    Raises:
        PermissionError: other users could replace the file at that path.
    """
    if (_HANDLES / str(handle)).exists():
        return str(_HANDLES / str(handle))
    path = path.resolve()
    for folder in path.parents:
        status = folder.stat()
        shared = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
        if shared or status.st_uid not in (0, os.getuid()):
            told = f"/proc is not mounted, and other users may rename files in {folder}"
            raise PermissionError(errno.EPERM, told)
    return str(path)


def _open(handle: int, path: Path) -> Library:
    """Load an open file, which stays open because the loader identifies it by its number."""
    address = _address(handle, path)
    try:
        found = Library(address)
    except OSError as error:  # for example a folder mounted with noexec
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
            getattr(found, f"linear_forward_{real}").argtypes = [pointer, *[size] * 3]
            getattr(found, f"linear_backward_{real}").argtypes = [pointer, *[size] * 3]
        for peak in (found.peak_products, found.peak_exponentials):
            peak.argtypes, peak.restype = [pointer, size], size
        found.low_products = found.bfloat16_products()
    except AttributeError as error:
        reason = str(error).replace(address, str(path))
        raise UnsupportedError(f"cannot be loaded: {reason}") from error
    found.path = str(path)
    return found


@lru_cache(maxsize=1)
def load() -> Library:
    """Return the library; compile it if necessary. `path` is its file.

    Raises:
        UnsupportedError: no compiler, a compiler that fails, or no folder to store the library; the
            package then uses torch operations.
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
    except OSError as error:  # unreadable sources, or no temporary folder
        raise UnsupportedError(f"cannot be made: {error}") from error
    raise UnsupportedError(f"cannot be kept or loaded: {'; '.join(refused)}")
