"""Terminal output: tables, progress, durations, replacement of unprintable characters."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager

_ON_A_TERMINAL = 0.2  # seconds between updates of the line


def leave_closed_output() -> int:
    """Return the status after a BrokenPipeError; output of the flush at exit is discarded."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141  # 128 + SIGPIPE, as shells report it


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Return rows as lines with aligned columns, those of the numbers `right` to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def duration(seconds: float) -> str:
    """Format a duration: `40 s`, `12 min`, `3 h 10 min`, `2 d 5 h`."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


class Progress:
    """Prints the number of finished points and the estimated remaining time.

    Args:
        total: number of points.
        what: plural noun for the points, such as `runs`.
        say: receives the lines; None writes them to stderr, on a terminal as one updated line.
        every: seconds between lines without news.
    """

    def __init__(
        self, total: int, what: str, say: Callable[[str], None] | None = None, every: float = 10.0
    ) -> None:
        self.total, self.what, self.say, self.every = total, what, say, every
        self.begin = time.monotonic()
        self._last = self.begin

    def due(self) -> bool:
        """Return whether a new line is due."""
        return time.monotonic() - self._last > self.every

    def show(self, done: int, left: float | None = None, note: str = "") -> None:
        """Print that `done` points are finished and `left` seconds remain.

        Args:
            done: number of finished points.
            left: remaining seconds; None if unknown.
            note: additional text.
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


@contextmanager
def progress(title: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Show the progress of a preparation on stderr; yields a function that adds to the count.

    Without a terminal, short ones print nothing.
    """
    shown = Progress(total, unit, every=_ON_A_TERMINAL if sys.stderr.isatty() else 5.0)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if done and (shown.due() or (done == total and sys.stderr.isatty())):
            passed = time.monotonic() - shown.begin
            shown.show(done, passed / done * (total - done), title)

    yield advance


def prepare_streams() -> None:
    """Make stdout and stderr print `?` for characters that they cannot encode.

    Streams that are closed from the start are opened on the null device: Python sets them to None,
    and the next file that is opened would receive what libraries print.
    """
    if None in (sys.stdin, sys.stdout, sys.stderr):
        while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
            os.set_inheritable(opened, True)
        os.close(opened)
        sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
        sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
        sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
