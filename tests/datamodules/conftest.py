"""Tests of data sets keep caches in their own folder, where they look for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _caches(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LIT_PROBATTN_CACHE", str(tmp_path / ".cache"))


@pytest.fixture(autouse=True, scope="module")
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Spare `fsync`, a third of the time of making a cache: no test ends the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield
