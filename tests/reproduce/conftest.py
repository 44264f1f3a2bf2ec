"""What tests of tables and figures share."""

from __future__ import annotations

import pytest

from tests.compare.conftest import _root as _root
from tests.compare.conftest import _shipped_files_once as _shipped_files_once
from tests.compare.tiny import run_commands_here


@pytest.fixture
def without_processes(monkeypatch) -> None:
    """Run the commands of runs and studies in this process, which has imported everything."""
    run_commands_here(monkeypatch)


@pytest.fixture
def without_data(monkeypatch) -> None:
    """Say at once that no data are found, in place of a search for every result."""
    monkeypatch.setattr("lit_probattn.compare.runs.Run._own_sources", None)
