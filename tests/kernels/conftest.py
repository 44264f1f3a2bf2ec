"""Kernels run in Triton's interpreter where there is no GPU; see tests/conftest.py."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch) -> None:
    """Let kernels serve CPU tensors."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
