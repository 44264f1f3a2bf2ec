"""The C library of the CPU path: compiled at first use, kept outside the repository, loaded once.

The system's C compiler ($CC, cc, gcc or clang) makes it in a second or two. Its file is named by a
hash of the sources, the flags, the compiler and the processor, and appears by a rename, so that any
number of processes may start at once. It includes no header of Python or torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

logger = logging.getLogger("lit_probattn")

_FOLDER = Path(__file__).parent
_HEADERS = ("philox.h", "rows.h")
_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
# -ffast-math only where it is compiled, never where it is linked: linked with it, a library sets
# flush-to-zero for the whole process.
_SOURCES = {
    "rows.c": ("-fopenmp-simd", "-fno-signed-zeros"),
    "noise.c": ("-ffast-math",),
}
# Vectors of 512 bits, where the processor has them and the compiler knows the flag.
_WIDE = "-mprefer-vector-width=512"
_SECONDS = 120


class Unavailable(Exception):
    """There is no library; the message says why, as "cannot …"."""


def cache_folders() -> list[Path]:
    """Return where the library may be kept, best first: the user's cache, else a temporary one."""
    root = os.environ.get("XDG_CACHE_HOME") or ""
    base = Path(root) if os.path.isabs(root) else Path(os.path.expanduser("~/.cache"))
    user = os.getuid() if hasattr(os, "getuid") else "user"
    return [base / "lit_probattn", Path(tempfile.gettempdir()) / f"lit_probattn-{user}"]


def _compiler() -> str:
    if platform.system() != "Linux":
        raise Unavailable(f"cannot be built on {platform.system()}: only Linux is supported")
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        found = shutil.which(name) if name else None
        if name == os.environ.get("CC") and name and found is None:
            raise Unavailable(f"cannot find the C compiler CC={name}")
        if found:
            return found
    raise Unavailable("cannot find a C compiler (cc, gcc or clang; CC names another)")


def obstacle() -> str | None:
    """Say why there can be no library on this machine ("cannot …"), or None; compiles nothing."""
    try:
        _compiler()
    except Unavailable as error:
        return str(error)
    return None


def _processor() -> str:
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
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr.strip() or f"status {done.returncode}")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let one process at a time build in a folder, where its file system can lock."""
    import fcntl

    with open(folder / ".lock", "w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(compiler: str, target: Path) -> None:
    """Compile and link to `target`, which appears complete or not at all."""
    with _alone(target.parent), tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        if target.is_file():
            return
        objects = []
        for source, flags in _SOURCES.items():
            made = Path(scratch) / f"{source}.o"
            command = [compiler, *_FLAGS, *flags, "-c", str(_FOLDER / source), "-o", str(made)]
            if _run([*command, _WIDE]) is not None:
                failed = _run(command)
                if failed is not None:
                    first = failed.splitlines()[0]
                    raise Unavailable(f"cannot be compiled by {compiler}: {first}")
            objects.append(str(made))
        linked = Path(scratch) / "linked.so"
        failed = _run([compiler, "-shared", *objects, "-o", str(linked), "-lm"])
        if failed is not None:
            raise Unavailable(f"cannot be linked by {compiler}: {failed.splitlines()[-1]}")
        linked.replace(target)


def _digest(compiler: str) -> str:
    texts = [(_FOLDER / name).read_text() for name in (*_HEADERS, *_SOURCES)]
    parts = [*texts, repr((_FLAGS, _SOURCES, _WIDE)), compiler, _processor(), platform.machine()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _own(folder: Path) -> bool:
    """Make the folder if need be; whether it is ours alone and can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
    except OSError:
        return False
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        return False
    return os.access(folder, os.W_OK)


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """Return the library, compiled now if nobody did before.

    Raises:
        Unavailable: no compiler, or no folder to keep the library in; the package computes with
            torch operations then.
    """
    compiler = _compiler()
    name = f"cpu-{_digest(compiler)}.so"
    folders = cache_folders()
    for folder in folders:
        path = folder / name
        if path.is_file() and path.stat().st_uid in (0, os.getuid()):
            return _open(path)
    for folder in folders:
        if _own(folder):
            logger.info("compiling %s", folder / name)
            _build(compiler, folder / name)
            return _open(folder / name)
    places = " or ".join(str(folder) for folder in folders)
    raise Unavailable(f"cannot be kept: {places} cannot be written")


def _open(path: Path) -> ctypes.CDLL:
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        raise Unavailable(f"cannot be loaded: {error}") from error
    pointer, size, word = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32
    for real in ("float", "double"):
        forward, backward = found[f"rows_forward_{real}"], found[f"rows_backward_{real}"]
        forward.argtypes = [pointer, pointer, pointer, size, size]
        backward.argtypes = [pointer] * 8 + [size, size]
        setattr(found, f"rows_forward_{real}", forward)
        setattr(found, f"rows_backward_{real}", backward)
    found.keep_block.argtypes = [pointer, pointer, *[size] * 7, word, word, ctypes.c_int32]
    found.keep_block.restype = None
    found.noise_block.argtypes = [pointer, *[size] * 5, word, word, word]
    found.noise_block.restype = None
    return found
