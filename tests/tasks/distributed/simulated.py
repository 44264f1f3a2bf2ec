"""Ranks one after the other in this process: what each sums or gathers is there for the last."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def last_rank(patch: pytest.MonkeyPatch, ranks: Iterable[Callable[[], Any]], *places: str) -> Any:
    """Call the work of every rank in turn; return the result of the last.

    All ranks call the same collectives in the same order, as processes must. The n-th collective of
    a rank returns what all ranks up to it have handed to their n-th, so that the last one sees all.

    Args:
        patch: of the test.
        ranks: the work of each rank.
        places: collectives, `sum_over_ranks` or `gather_objects`, after the modules of
            `lit_probattn.tasks` that call them: `base.sum_over_ranks`.
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
    for place in places:
        name = place.rpartition(".")[2]
        patch.setattr(f"lit_probattn.tasks.{place}", collectives[name])
    result = None
    for work in ranks:
        turn = iter(range(len(handed) + 100))
        result = work()
    return result
