"""The error budget of kernels whose layers have parameters of a few numbers."""

from __future__ import annotations

from collections.abc import Sequence

from profiling.kernels.cases import Case
from profiling.kernels.parity import BUDGET, ParityRow

INPUTS = ("out", "query", "key", "value")


def draws_noise(case: Case) -> bool:
    """Whether a case has noise scales: parameters of so few numbers that many calls are needed."""
    return "noise_scale" in case.options and case.options.get("noise") != "none"


def check_budget(rows: Sequence[ParityRow]) -> None:
    """Hold output and input gradients to the budget each, and parameters of a layer together.

    A noise scale has two numbers: the root mean square error over six calls is itself uncertain by
    a fifth, on both sides of the ratio. Over all parameters it is not.
    """
    squares = []
    for row in rows:
        if row.tensor in INPUTS:
            assert row.ratio <= BUDGET, row
        else:
            squares.append(row.ratio**2)
    if squares:
        together = (sum(squares) / len(squares)) ** 0.5
        assert together <= BUDGET, rows
