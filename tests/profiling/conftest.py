"""What several tests of sweeps share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from profiling.sweep.points import failed_rows
from tests.profiling.helpers import count_once


@pytest.fixture(autouse=True, scope="package")
def _count_once() -> Iterator[None]:
    """Count the points of small sweeps once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        count_once(patch)
        yield


@pytest.fixture
def uncounted(monkeypatch) -> None:
    """Spare the counting of points, where which of them run is asked: rows without numbers."""
    monkeypatch.setattr(
        "profiling.sweep.run.measure_point",
        lambda point: failed_rows(point, "made up", status="ok"),
    )


@pytest.fixture
def sketches(sketches, monkeypatch) -> None:
    """Spare the drawing of heat maps, too, by which Seaborn asks whether labels overlap."""
    monkeypatch.setattr("seaborn.matrix._draw_figure", lambda figure: None)
