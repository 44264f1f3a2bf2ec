"""Kernels run in Triton's interpreter where there is no GPU; see tests/conftest.py."""

from __future__ import annotations

import pytest

from lit_probattn.kernels.dense import selftest as dense
from lit_probattn.kernels.fish import selftest as fish


@pytest.fixture(autouse=True)
def _interpreter(kernels_on_cpu) -> None:
    """Every test of this folder calls kernels."""


@pytest.fixture
def one_sample(monkeypatch) -> None:
    """Compare calls of one sample with two heads: the interpreter takes a quarter of the time."""
    for module in (dense, fish):
        monkeypatch.setattr(module, "_BATCH", 1)
        monkeypatch.setattr(module, "_HEADS", 2)
