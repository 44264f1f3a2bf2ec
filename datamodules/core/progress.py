"""Progress of long preparations: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["progress"]

# Seconds before and between plain lines; short jobs stay silent.
_QUIET_SECONDS = 5.0


@contextmanager
def progress(title: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Show progress on the standard error; yields the function that adds to the count."""
    if not sys.stderr.isatty():
        yield _lines(title, total, unit)
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TextColumn(unit))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        job = bar.add_task(title, total=total)
        yield lambda count: bar.advance(job, count)


def _lines(title: str, total: int, unit: str) -> Callable[[int], None]:
    done, shown = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, shown
        done += count
        now = time.monotonic()
        if now - shown >= _QUIET_SECONDS:
            shown = now
            print(f"{title}: {done} of {total} {unit}", file=sys.stderr, flush=True)

    return advance
