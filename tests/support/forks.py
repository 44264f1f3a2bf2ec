"""Commands in forked processes: processes of their own, but nothing is imported again."""

from __future__ import annotations

import gc
import io
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lit_probattn.base.processes import end_with_parent, finish

OURS = ("lit_probattn", "datamodules", "profiling")


class Forked:
    """A forked process that runs `work`, with what we use of `subprocess.Popen`.

    Args:
        work: returns the exit status.
        environment: of the process.
        log: file that it prints to; None for where this process prints to.
        has_stdin: whether it reads what is written to `stdin`.
    """

    def __init__(
        self,
        work: Callable[[], int],
        environment: Mapping[str, str],
        log: Path | None = None,
        *,
        has_stdin: bool = False,
    ) -> None:
        self.returncode: int | None = None
        read, write = os.pipe() if has_stdin else (None, None)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            if read is not None:
                os.dup2(read, 0)
                os.close(write)
                sys.stdin = os.fdopen(0)
            _become(work, environment, log)
        if read is not None:
            os.close(read)
            self.stdin = os.fdopen(write, "wb")

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        return self._status(os.WNOHANG)

    def wait(self) -> int | None:
        """Return the exit status, once it has ended."""
        return self._status(0)

    def _status(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it as the kernel would."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)


def _become(work: Callable[[], int], environment: Mapping[str, str], log: Path | None) -> NoReturn:
    end_with_parent()
    os.setsid()
    warnings.simplefilter("default")  # in these tests they are errors
    gc.callbacks.clear()  # hypothesis has one, in which an interrupt would be lost
    given = dict(environment)  # it may be os.environ itself
    os.environ.clear()
    os.environ.update(given)
    finish(work, log)


def print_utf8() -> None:
    """Print as on a terminal of UTF-8, whatever the locale: programs of users may rely on it."""
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        stream.reconfigure(encoding="utf-8")


def program(
    code: str,
    folder: Path,
    *words: str,
    environment: Mapping[str, str] | None = None,
    missing: Sequence[str] = (),
) -> list[str]:
    """Run a program in a forked process that imports this project anew; return its lines.

    Other libraries stay imported, so a program that tests what they import needs a new process.

    Args:
        code: the program.
        folder: working folder of the process.
        words: the command line.
        environment: of the process; by default that of this one.
        missing: packages that cannot be found.
    """

    def work() -> int:
        print_utf8()
        for name in list(sys.modules):
            if name.partition(".")[0] in (*OURS, *missing):
                del sys.modules[name]
        sys.modules.update(dict.fromkeys(missing))
        os.chdir(folder)
        sys.argv = ["program", *words]
        try:
            exec(compile(code, "program", "exec"), {"__name__": "__main__"})
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "printed"
        status = Forked(work, os.environ if environment is None else environment, log).wait()
        shown = log.read_text(encoding="utf-8")
    assert status == 0, shown
    return shown.splitlines()


def fork_module(monkeypatch: Any, module: str, run: Callable[[list[str]], int]) -> None:
    """Have `python -m module` forked where a subprocess would start; others start as ever."""
    popen: Any = subprocess.Popen

    def start(words: list[str], *more: Any, **options: Any) -> Any:
        if words[1:3] != ["-m", module]:
            return popen(words, *more, **options)
        log = Path(os.devnull) if options.get("stdout") == subprocess.DEVNULL else None
        has_stdin = options.get("stdin") == subprocess.PIPE
        return Forked(lambda: run(words[3:]), options["env"], log, has_stdin=has_stdin)

    monkeypatch.setattr(subprocess, "Popen", start)
