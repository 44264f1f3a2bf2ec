"""What a terminal shows: progress, lengths of time, and only characters that it can show."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_ON_A_TERMINAL = 0.2  # seconds between two lines that replace each other


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


@contextmanager
def progress(title: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Show the progress of a preparation on standard error; yields what adds to the count.

    Short ones stay silent where there is no terminal.
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


def replace_unprintable() -> None:
    """Have stdout and stderr print `?` for characters that their encoding does not have."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
