"""What tests of tables and figures share."""

from __future__ import annotations

import pytest

from tests.compare.tiny import read_shipped_files_once, run_commands_here
from tests.support.paths import ROOT


@pytest.fixture(autouse=True)
def _root(monkeypatch) -> None:
    """Work in the repository, to which paths of the shipped tables are relative."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(autouse=True)
def _shipped_files_once(monkeypatch) -> None:
    """Every table is composed of many files, which most tests read."""
    read_shipped_files_once(monkeypatch)


@pytest.fixture
def without_processes(monkeypatch) -> None:
    """Run the commands of runs and studies in this process, which has imported everything."""
    run_commands_here(monkeypatch)


@pytest.fixture
def without_data(monkeypatch) -> None:
    """Say at once that no data are found, in place of a search for every result."""
    monkeypatch.setattr("lit_probattn.compare.runs.Run._own_sources", None)
