"""Checks of the GPU plan: an error that loses the GPU is not merely a wrong kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from profiling.stages import checks
from profiling.stages.place import Place


def test_a_self_test_that_loses_the_gpu_ends_its_process(monkeypatch):
    """Its text is a row, but what comes after it needs a fresh process."""
    said = "failed its self-test: relative error 1"
    monkeypatch.setattr(checks.selftest, "run", lambda *given: said)
    work = checks._self_test
    place = Place(Path("."), "cpu")
    (row,) = work(place, "dense/mgk", torch.float32, 16)
    assert (row["status"], row["reason"]) == ("failed", said)
    said = "failed its self-test: CUDA error: an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match=said):
        work(place, "dense/mgk", torch.float32, 16)
