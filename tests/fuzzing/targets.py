"""What is fuzzed: a sound input, and what must hold for every edit of it."""

from __future__ import annotations

import importlib
import math
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from lit_probattn.base.errors import DataError
from tests.fuzzing.mutations import Edit, apply, edits

_PARTS = ("text_targets", "translation_targets", "binary_targets", "command_targets")
# An example that takes longer than this hangs.
HANGS_AFTER_S = 20.0


@dataclass
class Target:
    """One reader.

    Args:
        name: on the command line.
        inputs: strategy of the examples.
        check: reads an example in an empty folder; returns `refused` or `accepted`, and fails
            where neither is right.
        answers: how often each was returned.
    """

    name: str
    inputs: st.SearchStrategy[Any]
    check: Callable[[Any, Path], str]
    answers: Counter[str] = field(default_factory=Counter)

    def run(self, max_examples: int, number: int | None = None, until: float = math.inf) -> None:
        """Check so many examples.

        Args:
            max_examples: how many.
            number: seed; None gives the same examples every time.
            until: moment of `time.monotonic` after which examples are no longer checked.
        """
        options = settings(
            max_examples=max_examples,
            derandomize=number is None,
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )

        def one(example: Any) -> None:
            if monotonic() > until:
                return
            with tempfile.TemporaryDirectory() as name, bounded(HANGS_AFTER_S):
                self.answers[self.check(example, Path(name))] += 1

        test = options(given(self.inputs)(one))
        (test if number is None else seed(number)(test))()


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Fail if the block takes longer."""

    def late(*_: object) -> None:
        raise AssertionError(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def one_line(error: Exception, path: Path) -> str:
    """`refused`, if the message is one line that says something, and names the file."""
    text = str(error)
    assert str(path) in text, text
    assert text, repr(error)
    assert "\n" not in text, text
    return "refused"


def reader(
    name: str,
    file: str,
    content: bytes,
    words: Sequence[bytes],
    read: Callable[[Path], Any],
    refuses: type[Exception] = DataError,
) -> Callable[[Callable[[Path, Any], None]], Target]:
    """Make a target of a function that is called with a path and what was read from there.

    Args:
        name: of the target.
        file: name of the file.
        content: what a sound file holds.
        words: inserted by some edits.
        read: returns what a file holds.
        refuses: the error of `read`, in one line that names the file.
    """

    def decorate(judge: Callable[[Path, Any], None]) -> Target:
        def check(changes: list[Edit], folder: Path) -> str:
            path = folder / file
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(apply(content, changes))
            try:
                found = read(path)
            except refuses as error:
                return one_line(error, path)
            judge(path, found)
            return "accepted"

        return Target(name, edits(words), check)

    return decorate


def all_targets() -> dict[str, Target]:
    """Every target, by name."""
    parts = [importlib.import_module(f"tests.fuzzing.{name}") for name in _PARTS]
    found = (value for part in parts for value in vars(part).values())
    return {target.name: target for target in found if isinstance(target, Target)}
