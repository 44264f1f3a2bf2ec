"""What tests of tables and figures share."""

from __future__ import annotations

import pytest

from tests.support import forks
from tests.support.paths import ROOT


@pytest.fixture(autouse=True)
def _root(monkeypatch) -> None:
    """Work in the repository, to which paths of the shipped tables are relative."""
    monkeypatch.chdir(ROOT)


@pytest.fixture
def forked(monkeypatch) -> None:
    """Fork the commands of runs and studies from this process, which has imported everything."""
    monkeypatch.setattr("lit_probattn.experiments.runner.start", forks.start)
