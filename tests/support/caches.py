"""Caches and other folders of the tests: never in the user's, removed at the end."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "lit-probattn-tests-"


def keep_out_of_the_users_cache() -> None:
    """Set the folder of caches for this process and those it starts; it is removed at the end."""
    os.environ.pop("LIT_PROBATTN_CACHE", None)
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if users.name.startswith(_PREFIX):
        return  # a parallel worker of pytest, or started by a test
    # Finding its fonts again would take Matplotlib seconds.
    os.environ.setdefault("MPLCONFIGDIR", str(users / "matplotlib"))
    os.environ["XDG_CACHE_HOME"] = str(scratch_folder(_PREFIX))


def scratch_folder(prefix: str) -> Path:
    """Return a new temporary folder, which is removed when this process ends."""
    folder = tempfile.mkdtemp(prefix=prefix)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
