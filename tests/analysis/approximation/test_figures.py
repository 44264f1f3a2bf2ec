"""Figures of few points: every point is visible, and a method's settings differ in colour."""

from __future__ import annotations

import pandas as pd

from lit_probattn.analysis.approximation.compare import draw_curves
from lit_probattn.analysis.approximation.figures import draw_relative


def test_a_run_with_one_logged_step_has_a_marker():
    row = {"run": "a", "metric": "train/loss", "step": 4, "value": 1.5}
    (axis,) = draw_curves(pd.DataFrame([row]), ["train/loss"]).axes
    (line,) = axis.lines
    assert line.get_xydata().tolist() == [[4.0, 1.5]]
    assert line.get_marker() not in ("", "None", None)


def test_settings_of_one_method_with_one_size_have_different_markers():
    common = {"method": "orf", "num_kept": 16, "rounds": None}
    rows = [
        common | {"detail": "performer", "rel_error": 0.5},
        common | {"detail": "literal", "rel_error": 0.25},
    ]
    (axis,) = draw_relative(pd.DataFrame(rows)).axes
    markers = {
        float(line.get_ydata()[0]): line.get_marker()
        for line in axis.lines
        if len(line.get_xdata()) and line.get_linestyle() == "None"
    }
    assert len(markers) == len(set(markers.values())) == 2
