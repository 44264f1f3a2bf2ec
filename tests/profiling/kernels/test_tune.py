"""The search for launch configurations, with calls, clocks and the GPU as fakes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lit_probattn.kernels import runtime
from lit_probattn.kernels.runtime import (
    Launch,
    Shape,
    choose_launch,
    default_launch,
    recording,
    write_tuned,
)
from lit_probattn.measure import timing
from profiling.kernels import compile as compiling
from profiling.kernels.compile import candidates, tune

SHAPE = Shape("softmax_forward", 64, 1, 2)


class FakeCalls:
    """A call with one kernel; its seconds are those of the launch that it had when it was made."""

    def __init__(self, monkeypatch, error=None):
        self.error = error
        self.best = list(candidates(SHAPE))[5]
        self.stored = {}
        self.timed = []
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(timing, "device_lock_name", lambda device: "a-gpu.lock")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(compiling, "device_name", lambda device: "a GPU")
        monkeypatch.setattr(compiling, "tuned_call", lambda *given: self.run)
        monkeypatch.setattr(compiling, "replayed", self.replayed)
        monkeypatch.setattr(compiling, "time_once", self.time_once)
        self.launch = None

    def run(self):
        self.launch = choose_launch(SHAPE, torch.device("cpu"))
        if self.launch == self.best and self.error is not None:
            raise self.error

    def replayed(self, function, device):
        function()
        launch = self.launch

        def replay():
            return launch

        return replay

    def time_once(self, function, device):
        launch = function()
        self.timed.append(launch)
        return 1e-3 if launch == self.best else 2e-3


@pytest.fixture(autouse=True)
def no_tables(monkeypatch, tmp_path):
    monkeypatch.setattr(runtime, "TUNED", tmp_path)
    runtime._tuned.cache_clear()
    yield
    runtime._tuned.cache_clear()


def test_replays_are_timed_and_the_fastest_is_stored(monkeypatch, tmp_path):
    """Calls from Python would hide differences: `time_once` gets what replays a graph."""
    fake = FakeCalls(monkeypatch)
    path, (line,) = tune([64], [torch.bfloat16], ["a case"])
    assert Path(path) == tmp_path / "sm_90.json"
    assert (line["kernel"], line["best"]) == (SHAPE.key, str(fake.best))
    assert line["candidates"] == len(set(fake.timed)) == len(list(candidates(SHAPE)))
    assert None not in fake.timed
    assert runtime._tuned(90) == {SHAPE.key: fake.best}


def test_a_candidate_that_cannot_run_is_passed_over(monkeypatch):
    fake = FakeCalls(monkeypatch, RuntimeError("out of resource: shared memory"))
    _, (line,) = tune([64], [torch.bfloat16], ["a case"])
    assert line["candidates"] == len(list(candidates(SHAPE))) - 1
    assert line["best"] != str(fake.best)


def test_a_lost_gpu_ends_the_search(monkeypatch, tmp_path):
    """Every later candidate would fail, and the best of the few before would be stored."""
    text = "CUDA error: an illegal memory access was encountered"
    FakeCalls(monkeypatch, RuntimeError(text))
    with pytest.raises(RuntimeError, match=text):
        tune([64], [torch.bfloat16], ["a case"])
    assert not list(tmp_path.iterdir())


def test_what_is_recorded_has_the_tuned_table_of_its_gpu():
    """Compiled ahead must be what is launched later; other GPUs have their own table."""
    found = Launch(64, 32, 8, 3)
    write_tuned(90, {SHAPE.key: found}, "a GPU")
    other = Shape("softmax_forward", 128, 1, 2)
    for capability, expected in ((90, found), (80, default_launch(SHAPE))):
        with recording(capability):
            assert choose_launch(SHAPE, torch.device("cpu")) == expected
            assert choose_launch(other, torch.device("cpu")) == default_launch(other)
    assert choose_launch(SHAPE, torch.device("cpu")) == Launch(32, 32)  # the interpreter
