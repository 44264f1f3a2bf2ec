"""Sharing a list of points among processes: flags, shards, progress."""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from lit_probattn.base.errors import ConfigError

_DEATH_SIGNAL, _SIGKILL = 1, 9  # PR_SET_PDEATHSIG of prctl


def add_shard_flags(add: Callable[..., object]) -> None:
    """Add the flags of every command that runs a list of points.

    Args:
        add: `add_argument` of a parser or of one of its groups.
    """
    add("--shard", help="i/n, i from 0: every n-th point from the i-th, for array jobs")
    add("--dry-run", action="store_true", help="say what would run and what it costs")


def shard_of(options: argparse.Namespace) -> tuple[int, int]:
    """Return (index, count) that the flags ask for, or this process's share under torchrun.

    Raises:
        ConfigError: malformed.
    """
    return parse_shard(options.shard) if options.shard else torchrun_shard()


def parse_shard(text: str) -> tuple[int, int]:
    """Return (index, count) of `i/n`, i from 0 to n − 1.

    Raises:
        ConfigError: another form, or i out of range.
    """
    try:
        index, count = (int(part) for part in text.split("/"))
    except ValueError as error:
        raise ConfigError(f"--shard expects i/n, such as 0/4, received {text!r}") from error
    if not 0 <= index < count:
        raise ConfigError(f"--shard expects 0 <= i < n, received {text!r}")
    return index, count


def torchrun_shard() -> tuple[int, int]:
    """Return (rank, world size) under torchrun, else (0, 1)."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, however it ends (Linux).

    For `preexec_fn`. SLURM's warning to submitit's process, SIGUSR2, is not meant for its children.
    """
    if hasattr(signal, "SIGUSR2"):
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, _SIGKILL)


def child_options(*handles: int, session: bool = False) -> dict[str, Any]:
    """Return what `subprocess.Popen` is told of a command that ends with this process.

    Without POSIX there is none of it, and the command may outlive this process.

    Args:
        handles: what the command inherits.
        session: whether Ctrl-C reaches this process alone.
    """
    if not hasattr(os, "fork"):
        return {}
    return {
        "pass_fds": handles,
        "start_new_session": session,
        "preexec_fn": end_with_parent,
    }


def fork_context() -> Any:
    """Return the context of `multiprocessing` whose processes are forks of this one.

    Raises:
        ConfigError: this system has no forks.
    """
    if not hasattr(os, "fork"):
        raise ConfigError("this command forks processes, which this system cannot: use Linux")
    return multiprocessing.get_context("fork")


def duration(seconds: float) -> str:
    """Return a length of time for people: `40 s`, `12 min`, `3 h 10 min`, `2 d 5 h`."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


class Progress:
    """Says how many points are finished and about how long the rest will take.

    Args:
        total: number of points.
        what: what they are, such as `cells`.
        say: receives the lines; None writes them to stderr, in place on a terminal.
        every: seconds between lines that nothing new calls for.
    """

    def __init__(
        self, total: int, what: str, say: Callable[[str], None] | None = None, every: float = 10.0
    ) -> None:
        self.total, self.what, self.say, self.every = total, what, say, every
        self.begin = time.monotonic()
        self._last = self.begin

    def due(self) -> bool:
        """Whether the last line is long ago."""
        return time.monotonic() - self._last > self.every

    def show(self, done: int, left: float | None = None, note: str = "") -> None:
        """Say that `done` points are finished and the rest takes `left` seconds.

        Args:
            done: number of finished points.
            left: seconds; None if nothing is known about them.
            note: what else to say.
        """
        text = f"{done} of {self.total} {self.what} finished"
        if left is not None and done < self.total:
            text += f", about {duration(left)} left"
        text += f"; {note}" if note else ""
        if self.say is not None:
            self.say(text)
        elif sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{text}" + ("\n" if done == self.total else ""))
            sys.stderr.flush()
        elif done < self.total and not self.due():
            return
        else:
            print(text, file=sys.stderr, flush=True)
        self._last = time.monotonic()
