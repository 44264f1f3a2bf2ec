"""Tests of data sets keep caches in their own folder, where they look for them."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _caches(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LIT_PROBATTN_CACHE", str(tmp_path / ".cache"))
