"""Time of calls by CUDA events or the wall clock, after warm-up, with sides interleaved."""

from __future__ import annotations

import math
import platform
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from lit_probattn.base.errors import UnsupportedError
from lit_probattn.base.files import cache_folders
from lit_probattn.base.locks import claim

_FLUSH_BYTES = 256 * 2**20  # more than the last-level cache of current GPUs


Side = TypeVar("Side", bound=Hashable)


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return a quantile by linear interpolation; ValueError without values."""
    if not len(values):
        raise ValueError("expected at least one value, received none")
    return float(np.quantile(values, fraction))


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the median as `name`, and the quantiles as `name_p20` and `name_p80`."""
    shares = {"": 0.5, "_p20": 0.2, "_p80": 0.8}
    return {f"{name}{end}": quantile(values, share) for end, share in shares.items()}


def round_ratios(seconds: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratio of two sides per round, so that common slow-downs cancel."""
    return [mine / theirs for mine, theirs in zip(seconds, others, strict=True)]


def time_columns(seconds: Sequence[float]) -> dict[str, float]:
    """Return median, 20 % and 80 % quantiles and number of timed calls, as columns of a row."""
    median, low, high = spread("", seconds).values()
    times = {"time_median_s": median, "time_p20_s": low, "time_p80_s": high}
    return {**times, "time_repeats": len(seconds)}


_alone: set[str] = set()


@contextmanager
def alone_on(device: torch.device) -> Iterator[None]:
    """Hold the lock of a device during timing; other timings of this user on this machine wait.

    Nested calls hold it once. If the lock file cannot be created, there is no lock.
    """
    name = device_lock_name(device)
    with ExitStack() as stack:
        if name not in _alone:
            for folder in cache_folders():
                try:
                    _wait_for(folder / "locks" / name, stack)
                    break
                except OSError:  # not writable, or without locks
                    continue
            _alone.add(name)
            stack.callback(_alone.discard, name)
        yield


def device_lock_name(device: torch.device) -> str:
    """Return the name of a device's lock file, equal in all processes of the machine."""
    host = platform.node()
    if device.type != "cuda":
        return f"{host}-{device.type}.lock"
    return f"{host}-cuda-{torch.cuda.get_device_properties(device).uuid}.lock"


def _wait_for(path: Path, stack: ExitStack) -> None:
    if stack.enter_context(claim(path)) is None:
        print(
            f"waiting for {path}: another timing runs on the device",
            file=sys.stderr,
            flush=True,
        )
        stack.enter_context(claim(path, math.inf))


def time_once(function: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call by CUDA events on a GPU, otherwise by the wall clock."""
    if device.type != "cuda":
        begin = time.perf_counter()
        function()
        return time.perf_counter() - begin
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
    flush.zero_()
    start.record()
    function()
    end.record()
    torch.cuda.synchronize(device)
    milliseconds: float = start.elapsed_time(end)
    return milliseconds / 1e3


def time_sides(
    sides: Mapping[Side, Callable[[], object]],
    *,
    device: torch.device,
    warmup: int,
    repeats: int,
    max_seconds: float = float("inf"),
) -> dict[Side, list[float]]:
    """Time several functions in turns, so that load on the machine affects all of them.

    The device's lock is held (`alone_on`).

    Args:
        max_seconds: no new round starts after this time, but at least three rounds run (or
            `repeats`, if fewer).

    Returns:
        Seconds of all timed calls by name; element r belongs to round r.
    """
    times: dict[Side, list[float]] = {name: [] for name in sides}
    with alone_on(device):
        for function in sides.values():
            for _ in range(warmup):
                time_once(function, device)
        begin = time.perf_counter()
        for done in range(repeats):
            if done >= min(3, repeats) and time.perf_counter() - begin > max_seconds:
                break
            for name, function in sides.items():
                times[name].append(time_once(function, device))
    return times


# Parts of the messages of errors after which a process cannot use its GPU any more ...
_LOST = (
    *("device-side assert triggered", "illegal memory access", "illegal instruction"),
    *("misaligned address", "launch failure", "launch timed out"),
)
# ... and of messages with "CUDA error" after which it can.
_KEPT = ("captur", "out of memory", "invalid argument", "invalid configuration", "not supported")


def lost_gpu(error: Exception | str) -> bool:
    """Return whether a process cannot use its GPU after an error, or an error of this message."""
    said = str(error)
    if any(text in said for text in _LOST):
        return True
    return "CUDA error" in said and not any(text in said for text in _KEPT)


def captured(function: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return a function that replays the kernels of a call as a CUDA graph, without Python.

    Three calls on a side stream come first, as required for capture.

    Raises:
        UnsupportedError: the device has no graphs, or the call cannot be captured.
        RuntimeError: the GPU failed during the call (`lost_gpu`).
    """
    if device.type != "cuda":
        raise UnsupportedError(f"no CUDA graphs on {device.type}")
    current, own = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    own.wait_stream(current)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(own):
            for _ in range(3):
                function()
        current.wait_stream(own)
        with torch.cuda.graph(graph):
            kept = function()
    except RuntimeError as error:
        if lost_gpu(error):
            raise
        raise UnsupportedError(str(error).splitlines()[0][:80]) from error

    def replay() -> object:
        graph.replay()
        return kept

    return replay


def replayed(function: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return `captured(function, device)`, or the function itself if it cannot be captured."""
    try:
        return captured(function, device)
    except UnsupportedError:
        return function
