"""Kernels run in Triton's interpreter where there is no GPU; see tests/conftest.py."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _interpreter(kernels_on_cpu) -> None:
    """Every test of this folder calls kernels."""
