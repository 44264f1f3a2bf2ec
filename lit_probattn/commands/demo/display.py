"""Progress of the demo: live curves on a terminal, otherwise a line per evaluation."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, TextIO

from lit_probattn.commands.demo.training import Side

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

_WIDTH = 40  # characters per curve
# Levels of a curve; completed and remaining progress; a missing value.
_MARKS = (" ▁▂▃▄▅▆▇█", "━╌", "–")
_ASCII = (" .:-=+*#@", "#-", "-")


def marks(encoding: str) -> tuple[str, str, str]:
    """Return the characters that a terminal with this encoding supports."""
    try:
        "".join(_MARKS).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return _ASCII
    return _MARKS


def spark(shares: Sequence[float], levels: str = _MARKS[0]) -> str:
    """Return numbers from 0 to 1 as a sparkline, the newest at the end."""
    if len(shares) > _WIDTH:
        chosen = [shares[index * len(shares) // _WIDTH] for index in range(_WIDTH - 1)]
        shares = [*chosen, shares[-1]]
    return "".join(levels[round(min(max(x, 0.0), 1.0) * (len(levels) - 1))] for x in shares)


def line(sides: Sequence[Side]) -> str:
    """Return the state of all models in one line."""
    parts = [f"{side.name}: {100 * side.accuracy[-1][1]:.1f} % right" for side in sides]
    return f"step {len(sides[0].losses)}  " + "   ".join(parts)


def table(sides: Sequence[Side], done: float, encoding: str = "utf-8") -> Table:
    """Return the state of all models as a table with a curve for each."""
    from rich.table import Table

    levels, bars, missing = marks(encoding)
    filled = round(done * _WIDTH)
    bar = bars[0] * filled + bars[1] * (_WIDTH - filled)
    shown = Table(box=None, pad_edge=False, title_justify="left", caption_justify="left")
    shown.caption = f"{bar} {100 * done:.0f} %   step {len(sides[0].losses)}   Ctrl-C: finish now"
    for column in ("model", "right on unseen expressions", "", "loss"):
        shown.add_column(column)
    for side in sides:
        shares = [share for _, share in side.accuracy]
        loss = f"{side.losses[-1]:.3f}" if side.losses else missing
        shown.add_row(side.name, spark(shares, levels), f"{100 * shares[-1]:5.1f} %", loss)
    return shown


class Display:
    """Context manager that displays models during training; without rich, lines only."""

    def __init__(self, sides: Sequence[Side], file: TextIO | None = None) -> None:
        self.sides = sides
        self.file = sys.stdout if file is None else file
        self.console = _console(self.file)
        self._stack = ExitStack()
        self._live: Live | None = None

    def __enter__(self) -> Display:
        if self.console is not None and self.console.is_terminal:
            from rich.live import Live

            self._live = self._stack.enter_context(Live(console=self.console, auto_refresh=False))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def __call__(self, done: float) -> None:
        """Display the state; `done` is the completed fraction."""
        if self._live is not None:
            shown = table(self.sides, done, self._live.console.encoding)
            self._live.update(shown, refresh=True)
        else:
            print(line(self.sides), file=self.file, flush=True)


def _console(file: TextIO) -> Console | None:
    """Return rich's console; None, with a line on a terminal, if rich is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        if file.isatty():
            print("curves require the package rich: pip install 'lit-probattn[demo]'", file=file)
        return None
    return Console(file=file)
