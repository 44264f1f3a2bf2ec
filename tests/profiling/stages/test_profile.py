"""The stage that says on which kernels the sides of gates spend their time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from profiling.stages.place import Place
from profiling.stages.profile import profile, profile_page


def test_it_profiles_every_side_that_a_gate_names():
    (phase,) = profile(Place(Path("."), "cuda"))
    places = {unit.key.rpartition(": ")[0] for unit in phase.units}
    sides = {unit.key.rpartition(": ")[2] for unit in phase.units}
    assert len(places) == 4
    assert all(place.startswith("N = 4096, head size ") for place in places)
    assert sides == {
        *("softmax8_flash", "softmax8_reference", "mgk4_reference", "softmax8_triton"),
        *("mgk4_triton", "mgk4_hard_triton", "smgk4_triton", "hard_fish_2_of_8_triton"),
    }
    assert len(phase.units) == len(places) * len(sides)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled in this process")
def test_rows_and_page_of_a_rehearsal(tmp_path, kernels_on_cpu):
    place = Place(tmp_path, "cpu")
    (phase,) = profile(place)
    assert len(phase.units) >= 2
    rows = []
    for unit in phase.units:
        found = unit.work()
        assert 2 <= len(found) <= unit.rows
        rows += [{"unit": unit.key, "status": "ok", **row} for row in found]
    names = {"place", "side", "kernel", "microseconds", "launches", "share"}
    assert all(names <= set(row) for row in rows)
    failed = {"unit": "x: y", "status": "failed", "reason": "RuntimeError: too large"}
    page = profile_page(place, [*rows, failed])
    assert page.count("\n## ") == 1
    head = "| side | kernel | µs per call | launches | share |"
    assert page.count(head) == 1
    lines = [line for line in page.splitlines() if line.startswith("| softmax8_triton (")]
    assert len(lines) == 1, "a side is named once, with the time of its call"
    assert "- x: y: RuntimeError: too large" in page
