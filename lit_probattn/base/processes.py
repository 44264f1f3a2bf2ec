"""Processes that this one starts, and that end with it."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lit_probattn.base.errors import ConfigError

_DEATH_SIGNAL, _SIGKILL = 1, 9  # PR_SET_PDEATHSIG of prctl


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, however it ends (Linux).

    For `preexec_fn`. SLURM's warning to submitit's process, SIGUSR2, is not meant for its children.
    """
    if hasattr(signal, "SIGUSR2"):
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, _SIGKILL)


def start(
    words: Sequence[str], *handles: int, session: bool = False, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a command that ends with this process, even if that is killed.

    Without POSIX it may outlive this process.

    Args:
        words: the command.
        handles: what it inherits.
        session: whether Ctrl-C reaches this process alone.
        options: of `subprocess.Popen`.
    """
    if hasattr(os, "fork"):
        options |= {"pass_fds": handles, "start_new_session": session}
        options["preexec_fn"] = end_with_parent
    return subprocess.Popen(words, **options)


def capture(words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; return its exit status and what it printed, as text."""
    return subprocess.run(words, capture_output=True, text=True, check=False, **options)


def with_our_code() -> dict[str, str]:
    """Return this environment, in which commands find the packages that run here."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def fork_context() -> Any:
    """Return the context of `multiprocessing` whose processes are forks of this one.

    Raises:
        ConfigError: this system has no forks.
    """
    if not hasattr(os, "fork"):
        raise ConfigError("this command forks processes, which this system cannot: use Linux")
    return multiprocessing.get_context("fork")


def num_useful(given: int | None, most: int) -> int:
    """Return how many processes to start: as many as given, or one per CPU up to `most`."""
    if given is not None:
        return given
    available = getattr(os, "sched_getaffinity", None)
    return min(len(available(0)) if available else os.cpu_count() or 1, most)


@contextmanager
def workers(module: str, count: int, *job: Any) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run `serve` of a module in `count` processes, each of which writes to a pipe; kill them last.

    Args:
        job: What `job_of_worker` returns there, after rank and count; plain JSON values.
    """
    command = [sys.executable, "-c", f"from {module} import serve; serve()"]
    started = [
        start(
            [*command, json.dumps([rank, count, *job])],
            stdout=subprocess.PIPE,
            env=with_our_code(),
        )
        for rank in range(count)
    ]
    try:
        yield started
    finally:
        for worker in started:
            worker.kill()
        for worker in started:
            worker.communicate()


def job_of_worker() -> list[Any]:
    """Return rank, count and job in a process that `workers` started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides when to stop
    job: list[Any] = json.loads(sys.argv[1])
    return job
