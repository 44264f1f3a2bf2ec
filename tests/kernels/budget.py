"""The error budget of kernels whose layers have parameters of a few numbers."""

from __future__ import annotations

from collections.abc import Sequence

from profiling.kernels.cases import Case
from profiling.kernels.parity import ParityRow, over_budget


def draws_noise(case: Case) -> bool:
    """Whether a case has noise scales: parameters of so few numbers that many calls are needed."""
    return "noise_scale" in case.options and case.options.get("noise") != "none"


def check_budget(rows: Sequence[ParityRow]) -> None:
    """Hold output and input gradients to the budget each, and parameters of a layer together."""
    assert over_budget(rows) == []
