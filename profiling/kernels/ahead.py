"""Compilation of the kernels of a benchmark, in several processes.

Triton and PyTorch's compiler keep their results in caches on disk, so the process that measures
afterwards compiles nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from profiling.kernels.config import KernelsConfig, Side
from profiling.kernels.sides import side_function
from profiling.measure.tasks import in_processes

_COMPILED_LENGTH = 1024  # kernels are compiled once for all lengths that are multiples of 8


def compile_ahead(points: Sequence[KernelsConfig], jobs: int) -> list[str]:
    """Run every compiled side once, in several processes; return what failed.

    Kernels of this package run at a short length, for which they are compiled as for long ones.
    """
    tasks: dict[str, tuple[Side, KernelsConfig]] = {}
    for point in points:
        for side in point.sides.values():
            if side.backend not in ("triton", "flex"):
                continue
            place = point
            if side.backend == "triton":
                size = min(_COMPILED_LENGTH, point.seq_len)
                place = point.model_copy(update={"seq_len": size, "batch_size": 2})
            place = place.model_copy(update={"sides": {}, "comparisons": []})
            tasks[f"{side!r} {place!r}"] = side, place
    # Longest first: PyTorch's compiler takes several times as long as Triton.
    ordered = sorted(tasks.values(), key=lambda task: task[0].backend != "flex")
    failed = [outcome for outcome in in_processes(_run_once, ordered, jobs) if outcome.problem]
    return [f"{outcome.task[0].attention}: {outcome.problem}" for outcome in failed]


def _run_once(task: tuple[Side, KernelsConfig]) -> None:
    side_function(*task)()
    torch.cuda.synchronize()
