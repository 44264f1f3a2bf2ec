"""Compile the kernels of a stage before they are timed, in many processes, into Triton's cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from lit_probattn.kernels.runtime import interpreted, recording
from profiling.kernels.cases import Case
from profiling.kernels.compile import STAGES, WARPS, candidate_launches, compile_launch
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


def tuning_units(
    cases: Sequence[Case], head_dims: Sequence[int], dtype: torch.dtype, capability: int
) -> list[Unit]:
    """Return units that compile the candidates of the tuning, by their warps and stages."""
    return [
        Unit(
            f"compile: {case.name}, {size}, {warps} warps, {stages} stages",
            partial(compile_candidates, case, size, dtype, capability, warps, stages),
            60,
        )
        for case, size, warps, stages in product(cases, head_dims, WARPS, STAGES)
    ]


def compile_candidates(
    case: Case, head_dim: int, dtype: torch.dtype, capability: int, warps: int, stages: int
) -> list[dict[str, Any]]:
    """Compile the candidates of a case with so many warps and stages.

    What cannot be compiled is counted: tuning passes over it.
    """
    if interpreted():
        raise Skipped("nothing is compiled in the interpreter")
    resources = {"num_warps": warps, "num_stages": stages}
    before, launches, refused = compiled_kernels(), 0, 0
    for launched in candidate_launches(case, head_dim, dtype, capability, resources):
        launches += 1
        try:
            compile_launch(launched, capability)
        except Exception:  # as in tuning: a candidate may ask for more than the GPU has
            refused += 1
    found = {"launches": launches, "refused": refused}
    return [{**found, "new_kernels": compiled_kernels() - before}]
