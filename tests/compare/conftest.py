"""The working folder of tests of comparisons."""

from __future__ import annotations

import pytest

from tests.support.paths import ROOT


@pytest.fixture(autouse=True)
def _root(monkeypatch):
    """Run in the repository's root: tables name their configurations relative to it."""
    monkeypatch.chdir(ROOT)


@pytest.fixture(autouse=True)
def _poll_often(monkeypatch):
    """The stand-in for training takes milliseconds."""
    monkeypatch.setattr("lit_probattn.experiments.runner._POLL_SECONDS", 0.01)
