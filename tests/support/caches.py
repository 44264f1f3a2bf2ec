"""Caches of the tests: in a folder of their own, never in the user's."""

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
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix=_PREFIX)
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)


def kept_folder() -> Path:
    """Return a new folder beside the caches, which is there until the tests end."""
    return Path(tempfile.mkdtemp(dir=os.environ["XDG_CACHE_HOME"]))
