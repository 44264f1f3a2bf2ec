"""Python in a new process, where nothing is imported yet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lit_probattn.base.processes import capture
from tests.support.paths import ROOT


def fresh_python(
    *words: str | Path, cwd: Path = ROOT, status: int = 0, **environment: str | None
) -> subprocess.CompletedProcess[str]:
    """Run Python with this checkout on its path; return the process, with its output as text.

    Args:
        words: the command line, as `-c` and a program.
        cwd: working folder.
        status: the exit status.
        environment: variables beside those of this process; None removes one.

    Raises:
        AssertionError: another exit status.
    """
    given = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    variables = {name: value for name, value in given.items() if value is not None}
    done = capture([sys.executable, *map(str, words)], cwd=cwd, env=variables)
    assert done.returncode == status, done.stderr[-4000:]
    return done
