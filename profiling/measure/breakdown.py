"""What a call spends its time on: kernels of a GPU, or operations of a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity

OTHERS = "others"
_WIDTH = 72  # of a shortened name
_PREFIXES = ("void ", "(anonymous namespace)::", "at::native::", "at::", "c10::", "std::")


@dataclass(frozen=True)
class Part:
    """Part of the time of a call.

    Args:
        kernel: name of a GPU's kernel, or of a CPU's operation; `OTHERS` for several together.
        microseconds: per call, on the device.
        launches: per call.
        share: of the time of all kernels.
    """

    kernel: str
    microseconds: float
    launches: float
    share: float


def device_breakdown(
    function: Callable[[], object], device: torch.device, calls: int = 5, most: int = 12
) -> list[Part]:
    """Return the kernels of a call by their time, the longest first; the mean over some calls.

    The caller has warmed up. On a CPU these are operations, without those that they call.

    Args:
        most: kernels that are listed; the rest are `OTHERS`, last.

    Raises:
        RuntimeError: the profiler saw nothing.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library prints nothing
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    if on_gpu:
        torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[activity]) as profile:
        for _ in range(calls):
            function()
        if on_gpu:
            torch.cuda.synchronize(device)
    times: dict[str, list[float]] = {}
    for event in profile.events() or []:
        if event.device_type.name == ("CUDA" if on_gpu else "CPU"):
            spent = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
            times.setdefault(event.name, []).append(float(spent))
    total = sum(map(sum, times.values()))
    if not total:
        raise RuntimeError(f"the profiler saw nothing on {device}")

    def part(name: str, spent: list[float]) -> Part:
        return Part(name, sum(spent) / calls, len(spent) / calls, sum(spent) / total)

    ranked = sorted(times, key=lambda name: -sum(times[name]))
    parts = [part(shortened(name), times[name]) for name in ranked[:most]]
    rest = [spent for name in ranked[most:] for spent in times[name]]
    return [*parts, part(OTHERS, rest)] if rest else parts


def shortened(name: str) -> str:
    """Return the name of a kernel without common namespaces, cut off where it is long."""
    for prefix in _PREFIXES:
        name = name.replace(prefix, "")
    return name if len(name) <= _WIDTH else f"{name[: _WIDTH - 1]}…"
