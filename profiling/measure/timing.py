"""Time of calls: CUDA events or the wall clock, warm-up first, sides interleaved in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

_FLUSH_BYTES = 256 * 2**20  # more than the last-level cache of current GPUs


@dataclass(frozen=True)
class Timing:
    """Distribution of the time of one call, in seconds.

    Args:
        median_s: median.
        p20_s: 20 % quantile.
        p80_s: 80 % quantile.
        repeats: timed calls.
        energy_j: energy of one call in joules, or None where the device does not say.
    """

    median_s: float
    p20_s: float
    p80_s: float
    repeats: int
    energy_j: float | None = None


def quantile(values: list[float], fraction: float) -> float:
    """Return a quantile by linear interpolation between order statistics.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("expected at least one value, received none")
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def summarise(seconds: list[float], energy_j: float | None = None) -> Timing:
    """Return median and quantiles of timed calls."""
    return Timing(
        median_s=statistics.median(seconds),
        p20_s=quantile(seconds, 0.2),
        p80_s=quantile(seconds, 0.8),
        repeats=len(seconds),
        energy_j=energy_j,
    )


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
    sides: Mapping[str, Callable[[], object]],
    *,
    device: torch.device,
    warmup: int,
    repeats: int,
    max_seconds: float = float("inf"),
) -> dict[str, list[float]]:
    """Time several functions in turns, so that a busy moment of the machine hits all of them.

    Args:
        sides: functions by name.
        device: where they run.
        warmup: untimed calls of each.
        repeats: timed calls of each.
        max_seconds: no new round starts after this long; every side gets three rounds at least
            (or `repeats`, if fewer).

    Returns:
        Seconds of every timed call by name; round r of all sides is entry r.
    """
    for function in sides.values():
        for _ in range(warmup):
            time_once(function, device)
    times: dict[str, list[float]] = {name: [] for name in sides}
    begin = time.perf_counter()
    for done in range(repeats):
        if done >= min(3, repeats) and time.perf_counter() - begin > max_seconds:
            break
        for name, function in sides.items():
            times[name].append(time_once(function, device))
    return times
