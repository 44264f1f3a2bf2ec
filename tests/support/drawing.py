"""Figures of reports, drawn in a sixth of the time; the fixture `sketches` draws nothing at all."""

from __future__ import annotations

import pytest


def draw_once(patch: pytest.MonkeyPatch) -> None:
    """Draw every figure once, as PNG: panels are not enlarged, and nothing is drawn as SVG."""
    patch.setattr("lit_probattn.records.figures._enlarge", lambda figure: None)
    patch.setattr("lit_probattn.records.figures._svg_bytes", lambda *_: b"<svg/>")
