"""What tests of several files share: a training to compare with, and ranks that notice soon."""

from __future__ import annotations

from pathlib import Path

import pytest

from lit_probattn.training.peers import Peers
from tests.support.runs import only_version, run, stateful


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory) -> Path:
    """The run folder of `stateful`, which nothing disturbed; tests only read it."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run(stateful("fit", folder))
    return only_version(folder)


@pytest.fixture
def quick_heartbeats(monkeypatch) -> None:
    """Ranks count three times a second; at the default they wait seconds for a dead one."""
    monkeypatch.setattr(Peers.__init__, "__defaults__", (0.3,))
