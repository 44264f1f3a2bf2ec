"""Ranks one after the other in this process: what each sums or gathers is there for the last."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def last_rank(
    patch: pytest.MonkeyPatch, module: str, ranks: Iterable[Callable[[], Any]], *names: str
) -> Any:
    """Call the work of every rank in turn; return the result of the last.

    All ranks call the same collectives in the same order, as processes must. The n-th collective of
    a rank returns what all ranks up to it have handed to their n-th, so that the last one sees all.

    Args:
        patch: of the test.
        module: `lit_probattn.tasks.…`, which looks the collectives up.
        ranks: the work of each rank.
        names: collectives that the module calls: `sum_over_ranks`, `gather_objects`.
    """
    handed: list[list[Any]] = []
    turn = iter(())

    def share(value: Any) -> list[Any]:
        place = next(turn)
        if place == len(handed):
            handed.append([])
        handed[place].append(value)
        return handed[place]

    collectives = {
        "sum_over_ranks": lambda values: sum(share(values.clone())),
        "gather_objects": lambda item: list(share(item)),
    }
    for name in names:
        patch.setattr(f"{module}.{name}", collectives[name])
    result = None
    for work in ranks:
        turn = iter(range(len(handed) + 100))
        result = work()
    return result
