"""Every door runs its grid in shards, goes on where it was interrupted, runs nothing twice."""

from __future__ import annotations

import pytest

from tests.compare.doors import DOORS, go


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", DOORS)
def test_door(name, tmp_path):
    pytest.importorskip("submitit")
    if name == "uea":
        pytest.importorskip("aeon")
    found = go(name, tmp_path)
    # Four sizes of two variants, each counted and timed.
    assert found["points"] == (16 if name == "sweep" else 2)
    assert found["resumed from"] > 0
    assert found["kept"]
    assert found["run again"] == 0
    assert found["report"]
    if name != "sweep":
        assert found["starts"] == [1, 2]
