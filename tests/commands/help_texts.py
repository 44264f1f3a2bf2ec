"""Stored texts of `lit-probattn COMMAND --help`.

python -m tests.commands.help_texts    # write them as the parsers print them today
"""

from __future__ import annotations

import contextlib
import io
import os
import platform
import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from unittest import mock

from lit_probattn.__main__ import COMMANDS, RUN
from tests.support.paths import ROOT

FOLDER = ROOT / "lit_probattn/commands/help"
NAMES = [name for name in (*RUN, *COMMANDS) if name != "list"]  # which is quick without
PROFILING = "profiling"  # `python -m profiling`
WIDTH = "100"  # columns


def made_with() -> str:
    """What decides the words and the form of a help, beside this package."""
    python = ".".join(platform.python_version_tuple()[:2])
    parts = (f"{name} {version(name)}" for name in ("lightning", "jsonargparse"))
    return ", ".join([f"python {python}", *parts])


def printed(name: str) -> str:
    """What a command's parser prints; that of a run, which lists the classes it knows, alone."""
    if name in RUN and sys.modules.get("pytest"):
        words = [sys.executable, "-c", f"from {__name__} import printed; print(printed('{name}'))"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout[:-1]
    out = io.StringIO()
    with (
        mock.patch.dict(os.environ, {"COLUMNS": WIDTH}),
        mock.patch.object(sys, "argv", ["lit-probattn"]),
        contextlib.redirect_stdout(out),
        contextlib.suppress(SystemExit),
    ):
        if name in RUN:
            import_module("lit_probattn.cli.app").main([name, "--help"])
        else:
            module, words, _ = COMMANDS.get(name, ("profiling.cli", (), ""))
            import_module(module).main([*words, "--help"])
    lines = (line.rstrip() for line in out.getvalue().splitlines())
    return "\n".join(lines) + "\n"


def write(folder: Path = FOLDER) -> None:
    """Write every text, and what it was made with."""
    for name in (*NAMES, PROFILING):  # those of a run first
        (folder / f"{name}.txt").write_text(printed(name), encoding="utf-8")
    (folder / "made_with.txt").write_text(made_with() + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
