"""Peak memory: the CUDA allocator's, the CPU allocator's to the byte, NVML's, and predicted."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pynvml
import torch

from lit_probattn.base.memory import Resident, StepFunction, resident_bytes


def cpu_peak_bytes(function: Callable[[], object]) -> int:
    """Return how far one call raises the CPU allocator above what was live before, in bytes.

    The profiler's allocator events are exact. Resident set size and tracemalloc would not do: the
    first moves in pages and does not fall, the second does not see tensors.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library prints nothing
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        kept = function()
    del kept
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text(encoding="utf-8"))["traceEvents"]
    memory = sorted((e for e in events if e.get("name") == "[memory]"), key=lambda e: e["ts"])
    return max(accumulate((e["args"]["Bytes"] for e in memory), initial=0))


def cuda_peak_bytes(function: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """Return the peak of allocated and of reserved memory above what was resident, in bytes.

    The caller has warmed up: workspaces and caches of libraries are resident by then.
    """
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    function()
    torch.cuda.synchronize(device)
    return (
        torch.cuda.max_memory_allocated(device) - allocated,
        torch.cuda.max_memory_reserved(device) - reserved,
    )


def peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """Return the peak of allocated memory above what was resident, on either kind of device."""
    if device.type == "cuda":
        return cuda_peak_bytes(function, device)[0]
    return cpu_peak_bytes(function)


def measured_cpu_bytes(build: Callable[[], tuple[StepFunction, Resident]]) -> tuple[int, int]:
    """Measure what `predicted_bytes` predicts: (peak above resident, resident) in bytes."""
    held = 0

    def run() -> None:
        nonlocal held
        step, resident = build()
        held = resident_bytes(resident)
        step()

    return cpu_peak_bytes(run) - held, held


def nvml_used_bytes(device: torch.device) -> int | None:
    """Return the memory that this process holds on the GPU by NVML, or None if that is unknown."""
    with contextlib.suppress(Exception):
        handle = nvml_handle(device)
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory is not None:
                return int(process.usedGpuMemory)
    return None


def nvml_energy_j(device: torch.device) -> float | None:
    """Return the energy that the GPU has used since its driver was loaded, in joules, or None."""
    if device.type != "cuda":
        return None
    with contextlib.suppress(Exception):
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(nvml_handle(device))) / 1e3
    return None


def nvml_handle(device: torch.device) -> Any:
    """Return NVML's handle of a CUDA device by its unique id; an NVMLError without a driver."""
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def available_bytes(device: torch.device) -> int | None:
    """Return the memory that is free now on a device, or None if that is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) if torch.cuda.is_available() else None
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
