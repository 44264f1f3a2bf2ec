"""Commands and code of the pages, and a fresh folder to run them in."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

from tests.support.paths import ROOT

# A block is one of commands if a line of it begins like this.
_STARTS = r"(?:\w+=\S+ )*(?:sudo |time )?(?:python|make|bash|lit-probattn|torchrun|sbatch)\b"
_ASSIGNMENT = re.compile(r"(?:export )?\w+=[^ ]*$|\w+=\"[^\"]*\"$|export .*$")
SNIPPET = re.compile(r"^--8<--\n(.+)\n--8<--$", re.MULTILINE)  # a file that the site puts there
SECONDS = 1800.0  # a command that runs longer is killed
FOLDERS = (
    *(
        "configs",
        "datamodules",
        "docs",
        "examples",
        "lit_probattn",
        "profiling",
        "reports",
        "tests",
    ),
)


@dataclass(frozen=True)
class Command:
    """A command of a page, on one line, without its comment; or a block of Python."""

    page: str
    line: int
    text: str
    python: bool = False


@dataclass(frozen=True)
class Result:
    """What became of a command."""

    command: Command
    shown: str  # as it ran
    status: int
    seconds: float
    output: str

    @property
    def last_line(self) -> str:
        """The last line of what was printed."""
        return (self.output.strip().splitlines() or [""])[-1]


def commands(page: str) -> list[Command]:
    """Return the commands of every code block of a page, from first to last."""
    found: list[Command] = []
    for token in MarkdownIt().parse((ROOT / page).read_text(encoding="utf-8")):
        if token.type not in ("fence", "code_block"):
            continue
        first = token.map[0] + 1 + (token.type == "fence")
        if token.info == "python":
            text = SNIPPET.sub(lambda name: (ROOT / name[1]).read_text("utf-8"), token.content)
            found.append(Command(page, first, text, python=True))
        elif re.search(rf"^{_STARTS}", token.content, re.MULTILINE):
            found += _lines(page, first, token.content)
    return found


def _lines(page: str, first: int, block: str) -> list[Command]:
    found, text, begin = [], "", first
    for number, line in enumerate(block.splitlines(), first):
        text, begin = (text, begin) if text else ("", number)
        text += re.sub(r"(?:^|\s+)#.*$", "", line)
        if text.endswith("\\"):
            text = text[:-1].rstrip() + " "
            continue
        words = re.sub(r"\s+", " ", text).strip()
        found += [Command(page, begin, part) for part in words.split(" && ") if part]
        text = ""
    return found


def is_assignment(text: str) -> bool:
    """Whether a line of the shell only sets variables."""
    return _ASSIGNMENT.fullmatch(text) is not None


def copy_repository(folder: Path) -> Path:
    """Copy what git keeps, as a fresh clone has it, with the bytecode that is there."""
    ignored = shutil.ignore_patterns("*.egg-info")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in (
        "README.md",
        "Makefile",
        "pyproject.toml",
        "setup.py",
        "constraints.txt",
        "CITATION.cff",
    ):
        shutil.copy2(ROOT / name, folder / name)
    return folder


class Shell:
    """Runs commands in a folder, each in a process of its own; variables that are set stay set."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder = folder
        self._set: list[str] = []
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        given = {
            **{"PATH": path, "PYTHONPATH": str(folder), "PYTHONUNBUFFERED": "1"},
            **{"LIT_PROBATTN_CACHE": str(folder / "cache"), "LIT_PROBATTN_DATA": str(data)},
            **{"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        }
        dropped = {"TRITON_INTERPRET", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER"}
        self._environment = {k: v for k, v in os.environ.items() if k not in dropped} | given

    def run(self, command: Command, text: str) -> Result:
        """Run a command as `text`."""
        begin = time.monotonic()
        if command.python:
            words = [sys.executable, "-c", text]
        else:
            if is_assignment(text):
                self._set.append(text)
            words = ["bash", "-c", "\n".join([*self._set, text])]
        with subprocess.Popen(
            words,
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=SECONDS)
                status = process.returncode
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                output, status = process.communicate()[0], 124
        shown = "(Python) " + text.splitlines()[-1] if command.python else text
        return Result(command, shown, status, time.monotonic() - begin, output)
