"""Errors that lose the GPU, and graphs that cannot be had; CUDA is a fake."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from lit_probattn.base.errors import UnsupportedError
from lit_probattn.base.files import cache_folders
from lit_probattn.base.locks import claim
from lit_probattn.measure.timing import (
    alone_on,
    captured,
    device_lock_name,
    lost_gpu,
    replayed,
    time_sides,
)

CUDA = torch.device("cuda")
LOST = "CUDA error: an illegal memory access was encountered"
ADVICE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)


@pytest.mark.parametrize(
    "text",
    [
        LOST,
        LOST + ADVICE,
        "CUDA error: device-side assert triggered" + ADVICE,
        "Triton Error [CUDA]: an illegal memory access was encountered",
        "Triton Error [CUDA]: misaligned address",
        "CUDA error: unspecified launch failure",
        "CUDA error: uncorrectable ECC error encountered",
    ],
)
def test_errors_that_end_all_work_of_a_process(text):
    assert lost_gpu(RuntimeError(text))
    assert lost_gpu(f"a side: {text}")


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "CUDA error: out of memory" + ADVICE,
        "CUDA error: operation not permitted when stream is capturing" + ADVICE,
        "CUDA error: operation failed due to a previous error during capture" + ADVICE,
        "Triton Error [CUDA]: invalid argument",
        "no kernel takes heads of 256 entries",
        "",
    ],
)
def test_errors_after_which_a_process_goes_on(text):
    assert not lost_gpu(RuntimeError(text))


@pytest.fixture
def fake_graphs(monkeypatch):
    """Streams and graphs that do nothing; returns the graphs that were replayed."""
    replays = []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    graph = SimpleNamespace(replay=lambda: replays.append("replay"))
    for name, value in {
        "current_stream": lambda device: stream,
        "Stream": lambda device: stream,
        "stream": lambda given: nullcontext(),
        "CUDAGraph": lambda: graph,
        "graph": lambda given: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return replays


def raising(text):
    def function():
        raise RuntimeError(text)

    return function


def test_a_lost_gpu_is_not_taken_for_a_call_that_cannot_be_captured(fake_graphs):
    with pytest.raises(UnsupportedError, match="stream is capturing"):
        captured(raising("CUDA error: not permitted when stream is capturing"), CUDA)
    with pytest.raises(RuntimeError, match="illegal memory access") as error:
        captured(raising(LOST), CUDA)
    assert not isinstance(error.value, UnsupportedError)


def test_a_call_is_replayed_where_it_can_be(fake_graphs):
    calls = []
    replay = replayed(lambda: calls.append("call"), CUDA)
    assert len(calls) == 4  # three before capturing
    replay()
    assert (len(calls), fake_graphs) == (4, ["replay"])
    function = raising("CUDA error: not permitted when stream is capturing")
    assert replayed(function, CUDA) is function
    assert replayed(calls.clear, torch.device("cpu")) == calls.clear
    with pytest.raises(RuntimeError, match="illegal memory access"):
        replayed(raising(LOST), CUDA)


def test_timings_of_a_device_wait_for_each_other(capsys):
    cpu, seen = torch.device("cpu"), []
    path = cache_folders()[0] / "locks" / device_lock_name(cpu)

    def timed():
        seen.append("waits")
        time_sides({"one": lambda: seen.append("timed")}, device=cpu, warmup=0, repeats=1)

    other = threading.Thread(target=timed)
    with claim(path) as lock:
        assert lock is not None
        other.start()
        other.join(0.5)
        assert seen == ["waits"]
    other.join(10.0)
    assert seen == ["waits", "timed"]
    assert f"waiting for {path}" in capsys.readouterr().err
    with alone_on(cpu), alone_on(cpu), claim(path) as lock:
        assert lock is None
    with claim(path) as lock:
        assert lock is not None
