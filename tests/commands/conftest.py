"""Restored models that the tests of a command share."""

from __future__ import annotations

import pytest

from tests.analysis import made


@pytest.fixture
def open_once(monkeypatch):
    """Restore the model and the data of a checkpoint once."""
    made.open_once(monkeypatch)
