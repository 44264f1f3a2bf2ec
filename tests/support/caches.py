"""Caches and other folders of the tests: never in the user's, removed at the end."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from tests.support.paths import ROOT

_PREFIX = "lit-probattn-tests-"
# C compiled by earlier runs of the tests. Names of files depend on sources, compiler and processor.
_LIBRARIES = ROOT / "build/tests-libraries"


def keep_out_of_the_users_cache() -> None:
    """Set the folder of caches for this process and those it starts; it is removed at the end.

    Compiled C is kept for the next run.
    """
    os.environ.pop("LIT_PROBATTN_CACHE", None)
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if users.name.startswith(_PREFIX):
        return  # a parallel worker of pytest, or started by a test
    # Finding its fonts again would take Matplotlib seconds.
    os.environ.setdefault("MPLCONFIGDIR", str(users / "matplotlib"))
    caches = scratch_folder(_PREFIX)
    os.environ["XDG_CACHE_HOME"] = str(caches)
    keep_libraries(caches / "lit_probattn", _LIBRARIES)


def keep_libraries(used: Path, kept: Path) -> None:
    """Copy compiled libraries of earlier runs into a folder now, and its new ones back at the end.

    Args:
        used: new folder, where the library is looked for and compiled if it is missing.
        kept: folder that remains; it keeps the newest three.
    """
    used.mkdir(mode=0o700)
    for library in kept.glob("cpu-*.so"):
        shutil.copy2(library, used)
    atexit.register(_copy_back, used, kept)


def _copy_back(used: Path, kept: Path) -> None:
    with contextlib.suppress(OSError):  # the project's folder may be read-only
        kept.mkdir(parents=True, exist_ok=True)
        for library in used.glob("cpu-*.so"):
            if not (kept / library.name).exists():
                copied = kept / f"{library.name}.{os.getpid()}"
                shutil.copy2(library, copied)
                copied.replace(kept / library.name)
        for old in sorted(kept.glob("cpu-*.so"), key=lambda path: path.stat().st_mtime)[:-3]:
            old.unlink()


def scratch_folder(prefix: str) -> Path:
    """Return a new temporary folder, which is removed when this process ends."""
    folder = tempfile.mkdtemp(prefix=prefix)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
