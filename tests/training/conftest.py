"""One training that tests of several files resume, interrupt, or compare with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runs import only_version, run, stateful


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory) -> Path:
    """The run folder of `stateful`, which nothing disturbed; tests only read it."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run(stateful("fit", folder))
    return only_version(folder)
