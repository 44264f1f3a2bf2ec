"""What a call spends its time on: kernels of a GPU (fakes), operations of a CPU."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from profiling.measure import breakdown
from profiling.measure.breakdown import OTHERS, device_breakdown, shortened


def test_operations_of_a_cpu():
    calls = []
    left, right = torch.randn(200, 200), torch.randn(200, 200)

    def function():
        calls.append("call")
        return (left @ right).softmax(-1), left @ right

    parts = device_breakdown(function, torch.device("cpu"), calls=3)
    assert len(calls) == 3
    found = {part.kernel: part for part in parts}
    assert (found["aten::mm"].launches, found["aten::_softmax"].launches) == (2, 1)
    assert [p.microseconds for p in parts] == sorted((p.microseconds for p in parts), reverse=True)
    assert sum(part.share for part in parts) == pytest.approx(1)


def gpu_events(monkeypatch, *events):
    """Have the profiler see kernels of a GPU, and what the CPU did."""

    def event(name, microseconds, device="CUDA"):
        elapsed = SimpleNamespace(elapsed_us=lambda: microseconds)
        return SimpleNamespace(
            name=name,
            device_type=SimpleNamespace(name=device),
            time_range=elapsed,
            self_cpu_time_total=microseconds,
        )

    seen = [event(*given) for given in events]

    @contextmanager
    def profile(activities):
        assert activities == [torch.profiler.ProfilerActivity.CUDA]
        yield SimpleNamespace(events=lambda: seen)

    monkeypatch.setattr(torch.profiler, "profile", profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


def test_kernels_of_a_gpu_per_call_the_least_as_others(monkeypatch):
    kernels = [("forward", 60.0), ("grad_key", 20.0), ("a", 6.0), ("b", 4.0)]
    gpu_events(monkeypatch, *kernels, *kernels, ("grad_key", 20.0), ("cudaLaunch", 9.0, "CPU"))
    parts = device_breakdown(lambda: None, torch.device("cuda"), calls=2, most=2)
    assert [(p.kernel, p.microseconds, p.launches) for p in parts] == [
        ("forward", 60.0, 1.0),
        ("grad_key", 30.0, 1.5),
        (OTHERS, 10.0, 2.0),
    ]
    assert [p.share for p in parts] == [0.6, 0.3, 0.1]


def test_a_profiler_that_sees_no_kernel_is_an_error(monkeypatch):
    gpu_events(monkeypatch, ("cudaLaunch", 9.0, "CPU"))
    with pytest.raises(RuntimeError, match="the profiler saw nothing on cuda"):
        device_breakdown(lambda: None, torch.device("cuda"))


def test_names_of_kernels_are_shortened():
    long = (
        "void at::native::elementwise_kernel<128, 4, at::native::CUDAFunctor_add<float>" + "x" * 99
    )
    assert shortened(long).startswith("elementwise_kernel<128, 4, CUDAFunctor_add<float>x")
    assert len(shortened(long)) == breakdown._WIDTH
    assert shortened("mgk_forward_kernel") == "mgk_forward_kernel"
