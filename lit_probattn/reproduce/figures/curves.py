"""Logged curves of runs, and values per seed for sentences about curves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from lit_probattn.analysis.studies.curves import by_step, grows, read_run
from lit_probattn.compare.runs import Run
from lit_probattn.training.logs import FILE_NAME

# Share of the logged steps at the end over which a settled curve hardly changes.
_LAST = 0.1

# Seed -> value by step.
Curves = dict[int, pd.Series]


def curve_of(run: Run, result: Mapping[str, Any], metric: str) -> pd.Series | None:
    """Return a logged metric of a finished run by step; None if it was not logged."""
    folder = run.folder_of(result)
    if not (folder / FILE_NAME).is_file():
        return None
    found = by_step(read_run(folder), metric)
    return found if len(found) else None


def smoothed(curve: pd.Series, metric: str) -> pd.Series:
    """Return a training metric as means over 1/40 of its steps; other metrics unchanged."""
    if not metric.startswith("train/"):
        return curve
    return curve.rolling(max(1, len(curve) // 40), min_periods=1).mean()


def best(curve: pd.Series, metric: str) -> float:
    """Return the best value."""
    return float(curve.max() if grows(metric) else curve.min())


def settling(curve: pd.Series) -> float:
    """Return the share of a curve's total change in the last tenth of its steps."""
    start = curve.index[-1] - _LAST * (curve.index[-1] - curve.index[0])
    before = curve[curve.index <= start].iloc[-1]
    whole = float(curve.max() - curve.min())
    return abs(float(curve.iloc[-1] - before)) / whole if whole else 0.0


def first_reaching(curve: pd.Series, target: float, metric: str) -> float:
    """Return the first step at which a curve reaches a value; the last step if it never does."""
    there = curve[curve >= target] if grows(metric) else curve[curve <= target]
    return float(there.index[0] if len(there) else curve.index[-1])


def common_steps(*curves: Curves) -> pd.Index:
    """Return the steps that all curves have."""
    every = [curve.index for seeds in curves for curve in seeds.values()]
    steps = every[0]
    for other in every[1:]:
        steps = steps.intersection(other)
    return steps
