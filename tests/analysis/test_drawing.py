"""Scales that do not make noise look like an effect."""

from __future__ import annotations

import pandas as pd
import pytest

from lit_probattn.analysis.drawing import score_limits
from lit_probattn.analysis.studies.curves import has_curve


def test_scores_fill_an_axis_only_if_they_exceed_the_baselines_spread():
    untrained = [718.8, 718.5, 716.5]
    low, high = score_limits(untrained, None)
    assert high - low == pytest.approx(0.1 * 717.65)
    assert low < 716.5 < 718.8 < high
    low, high = score_limits([30.0, 30.4], 0.5)
    assert high - low == pytest.approx(5.0)
    low, high = score_limits([20.0, 40.0], 0.5)
    assert (low, high) == pytest.approx((19.0, 41.0))
    low, high = score_limits([0.0, float("nan")], float("nan"))
    assert low < 0.0 < high


def test_a_curve_needs_two_values():
    rows = [("a", "loss", 1), ("a", "loss", 2), ("a", "test", 2), ("b", "test", 2)]
    long = pd.DataFrame(rows, columns=["run", "metric", "step"])
    assert has_curve(long, "loss")
    assert not has_curve(long, "test")
