"""Time of calls: CUDA events or the wall clock, warm-up first, sides interleaved in one run."""

from __future__ import annotations

import math
import platform
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from lit_probattn.base.errors import UnsupportedError
from lit_probattn.base.files import cache_folders
from lit_probattn.base.locks import claim

_FLUSH_BYTES = 256 * 2**20  # more than the last-level cache of current GPUs


Side = TypeVar("Side", bound=Hashable)


@dataclass(frozen=True)
class Timing:
    """Distribution of the time of one call in seconds; its energy where the device tells it."""

    median_s: float
    p20_s: float
    p80_s: float
    repeats: int
    energy_j: float | None = None


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return a quantile by linear interpolation; a ValueError without values."""
    if not len(values):
        raise ValueError("expected at least one value, received none")
    return float(np.quantile(values, fraction))


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return the median as `name`, and the quantiles as `name_p20` and `name_p80`."""
    shares = {"": 0.5, "_p20": 0.2, "_p80": 0.8}
    return {f"{name}{end}": quantile(values, share) for end, share in shares.items()}


def round_ratios(seconds: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratio of two sides in every round: what is slow for both cancels."""
    return [mine / theirs for mine, theirs in zip(seconds, others, strict=True)]


def summarise(seconds: list[float], energy_j: float | None = None) -> Timing:
    """Return median and quantiles of timed calls."""
    low, middle, high = (quantile(seconds, share) for share in (0.2, 0.5, 0.8))
    return Timing(middle, low, high, len(seconds), energy_j)


_alone: set[str] = set()


@contextmanager
def alone_on(device: torch.device) -> Iterator[None]:
    """Hold the lock of a device while it is timed: other timings of this user on this machine wait.

    Nested calls hold it once. Where no lock file can be made, nothing is locked.
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
    """Return the name of a device's lock file, the same in every process of the machine."""
    host = platform.node()
    if device.type != "cuda":
        return f"{host}-{device.type}.lock"
    return f"{host}-cuda-{torch.cuda.get_device_properties(device).uuid}.lock"


def _wait_for(path: Path, stack: ExitStack) -> None:
    if stack.enter_context(claim(path)) is None:
        print(f"waiting for {path}: another timing runs on the device", file=sys.stderr, flush=True)
        stack.enter_context(claim(path, math.inf))


def time_once(function: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call: between CUDA events on a GPU, else on the wall clock."""
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
    """Time several functions in turns, so that a busy moment of the machine hits all of them.

    The device's lock is held (`alone_on`).

    Args:
        max_seconds: no new round starts after this long; every side gets three rounds at least
            (or `repeats`, if fewer).

    Returns:
        Seconds of every timed call by name; round r of all sides is entry r.
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


# Parts of the messages of errors that end everything a process does on a GPU from then on ...
_LOST = (
    *("device-side assert triggered", "illegal memory access", "illegal instruction"),
    *("misaligned address", "launch failure", "launch timed out"),
)
# ... and of those with "CUDA error" that do not.
_KEPT = ("captur", "out of memory", "invalid argument", "invalid configuration", "not supported")


def lost_gpu(error: Exception | str) -> bool:
    """Whether an error, or its message, means that a process can do nothing on its GPU any more."""
    said = str(error)
    if any(text in said for text in _LOST):
        return True
    return "CUDA error" in said and not any(text in said for text in _KEPT)


def captured(function: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return a function that replays the kernels of a call as a CUDA graph, without any Python.

    Three calls on a stream of their own come first, as capturing asks for.

    Raises:
        UnsupportedError: the device has no graphs, or the call does what a graph cannot hold.
        RuntimeError: the call lost the GPU (`lost_gpu`).
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
    """Return `captured(function, device)`, or the function itself where it cannot be captured."""
    try:
        return captured(function, device)
    except UnsupportedError:
        return function
