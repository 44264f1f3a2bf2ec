"""What of a test runs every time, and what with `make test-full` only."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
# Parameters of a test that goes through combinations; see `some_of`.
SHARES = ["a sixth", pytest.param("all", marks=pytest.mark.slow)]
FEWER = ["a twelfth", SHARES[1]]
PARTS = {"a sixth": 6, "a twelfth": 12}


def mostly_slow(cases: Iterable[Any], fast: Iterable[Any]) -> list[Any]:
    """Return the cases as parameters of a test, those that are not in `fast` marked slow.

    Args:
        cases: values, or tuples of values where the test has several parameters. A value is known
            by its `name`, or else by itself.
        fast: names or values, tuples of them, as the cases are known.

    Raises:
        ValueError: `fast` names no case, so that a test would lose it unseen.
    """
    chosen, parameters = set(fast), []
    found = set()
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        known = tuple(getattr(value, "name", value) for value in values)
        key = known if isinstance(case, tuple) else known[0]
        found |= {key} & chosen
        label = "-".join(str(value).removeprefix("torch.") for value in known)
        marks = [] if key in chosen else [pytest.mark.slow]
        parameters.append(pytest.param(*values, id=label, marks=marks))
    if found != chosen:
        raise ValueError(f"no case {chosen - found}")
    return parameters


def every_nth(n: int, parameters: Sequence[Any]) -> list[Any]:
    """Return the parameters (of `pytest.param`, with ids), all but every n-th marked slow."""
    return [
        pytest.param(*p.values, id=p.id, marks=[*p.marks, *[pytest.mark.slow] * (number % n > 0)])
        for number, p in enumerate(parameters)
    ]


def taking_turns(kinds: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Return all pairs as parameters of a test; of each kind every other case, in turn, is slow."""
    cases = list(cases)
    return [
        pytest.param(kind, case, marks=[pytest.mark.slow] * ((turn + number) % 2))
        for turn, kind in enumerate(kinds)
        for number, case in enumerate(cases)
    ]


def some_of(combinations: Sequence[T], share: str, *case: object) -> list[T]:
    """Return all combinations, or a share of them, chosen by the case.

    So cases together go through all of them every time, and each case through all with
    `make test-full`.
    """
    if share == "all":
        return list(combinations)
    choice = random.Random(zlib.crc32(repr(case).encode()))
    return choice.sample(list(combinations), -(-len(combinations) // PARTS[share]))
