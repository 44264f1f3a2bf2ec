"""What tests of jobs share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _poll_often(monkeypatch) -> None:
    """The programs of these tests end sooner than the runner asks them."""
    monkeypatch.setattr("lit_probattn.experiments.runner._POLL_SECONDS", 0.01)
