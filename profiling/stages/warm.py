"""Compile the kernels of a stage before they are timed, in many processes, into Triton's cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lit_probattn.kernels.runtime import interpreted, recording
from profiling.kernels.compile import compile_launch
from profiling.kernels.config import KernelsConfig, Side
from profiling.kernels.speed import side_function
from profiling.stages.units import Skipped, Unit


def cache_folder() -> Path:
    """Return where Triton keeps what it compiled."""
    return Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))


def compiled_kernels() -> int:
    """Return how many kernels are in Triton's cache."""
    return sum(1 for _ in cache_folder().rglob("*.cubin"))


def compile_units(points: Sequence[KernelsConfig], capability: int) -> list[Unit]:
    """Return a unit for every side on kernels and every form of its calls.

    Lengths share their kernels; a batch of one has kernels of its own, since Triton builds numbers
    that are 1 into the code.
    """
    found: dict[str, Unit] = {}
    for point in points:
        for name, side in point.sides.items():
            if side.backend != "triton" or side.attention is None:
                continue
            form = (name, point.dtype, f"head size {point.head_dim}", point.mode)
            places = (f"causal {point.is_causal}", f"batch {min(point.batch_size, 2)}")
            key = "compile: " + ", ".join((*form, *places))
            found.setdefault(key, Unit(key, partial(compile_side, side, point, capability), 12))
    return list(found.values())


def compile_side(side: Side, point: KernelsConfig, capability: int) -> list[dict[str, Any]]:
    """Record what a side launches, on the CPU and without running it, and compile that."""
    if interpreted():
        raise Skipped("nothing is compiled in the interpreter")
    with recording(capability) as launches:
        side_function(side, point.model_copy(update={"device": "cpu"}))()
    before = compiled_kernels()
    for launched in launches:
        compile_launch(launched, capability)
    return [{"launches": len(launches), "new_kernels": compiled_kernels() - before}]
