"""What tests of comparisons share, and those of tables and of jobs."""

from __future__ import annotations

import pytest

from tests.compare.tiny import read_shipped_files_once
from tests.support.paths import ROOT


@pytest.fixture(autouse=True)
def _root(monkeypatch):
    """Run in the repository's root: tables name their configurations relative to it."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(autouse=True)
def _poll_often(monkeypatch):
    """The programs of these tests take milliseconds."""
    monkeypatch.setattr("lit_probattn.experiments.runner._POLL_SECONDS", 0.01)


@pytest.fixture(autouse=True)
def _shipped_files_once(monkeypatch):
    """Runs of one table are composed of the same few files."""
    read_shipped_files_once(monkeypatch)
