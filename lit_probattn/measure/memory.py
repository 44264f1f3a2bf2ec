"""Peak memory by the allocators of CUDA and CPU, by NVML, and predicted."""

from __future__ import annotations

import contextlib
import gc
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
    """Return the peak of allocated CPU memory during a call above the memory before it, in bytes.

    The profiler's allocator events are exact. The resident set size has the granularity of pages
    and does not fall, and tracemalloc does not track tensors.
    """
    gc.collect()  # garbage that is freed during the call would lower the peak
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silence the profiler's library
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
    """Return the peaks of allocated and of reserved memory above resident memory, in bytes.

    Warm up before the call, so that workspaces and caches of libraries are resident.
    """
    gc.collect()
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
    """Return the peak of allocated memory above resident memory on a CPU or GPU, in bytes."""
    if device.type == "cuda":
        return cuda_peak_bytes(function, device)[0]
    return cpu_peak_bytes(function)


def measured_cpu_bytes(build: Callable[[], tuple[StepFunction, Resident]]) -> tuple[int, int]:
    """Measure the values of `predicted_bytes`: (peak above resident, resident) in bytes.

    The step runs twice, since libraries allocate at their first use, for example in self-tests.
    """
    held = 0

    def run() -> None:
        nonlocal held
        step, resident = build()
        held = resident_bytes(resident)
        step()

    run()
    return cpu_peak_bytes(run) - held, held


def nvml_used_bytes(device: torch.device) -> int | None:
    """Return the GPU memory of this process according to NVML, or None if unknown."""
    with contextlib.suppress(Exception):
        handle = nvml_handle(device)
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory is not None:
                return int(process.usedGpuMemory)
    return None


def nvml_energy_j(device: torch.device) -> float | None:
    """Return the energy used by the GPU since its driver was loaded, in joules, or None."""
    if device.type != "cuda":
        return None
    with contextlib.suppress(Exception):
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(nvml_handle(device))) / 1e3
    return None


def nvml_handle(device: torch.device) -> Any:
    """Return NVML's handle of a CUDA device by its UUID; NVMLError without a driver."""
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def available_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device in bytes, or None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) if torch.cuda.is_available() else None
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
