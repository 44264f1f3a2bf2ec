"""Time and memory of kernels, and the fastest launch configurations."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from profiling.kernels.cases import Case, compile_cases
from profiling.kernels.config import Grid as KernelsGrid
from profiling.kernels.config import KernelsConfig, Side, TorchSdpa, load_kernels, points
from profiling.kernels.speed import measured_rows, place_name, speed_report
from profiling.stages.checks import checked
from profiling.stages.place import Phase, Place, Stage, ceiling, hardware
from profiling.stages.units import Row, Skipped, Unit
from profiling.stages.warm import compile_units, compiled_kernels, tuning_units


def kernels_config(place: Place, name: str) -> KernelsConfig:
    """Return a kernels file; in a rehearsal, one tiny point of a few sides on the CPU."""
    config = load_kernels(f"configs/profiling/{name}.yaml")
    if not place.rehearses:
        return config
    every = {
        k: v.model_copy(update={"seq_lens": None, "head_dims": None, "dtypes": None})
        for k, v in config.sides.items()
    }
    library = {k: Side(torch_sdpa=TorchSdpa(num_heads=8)) for k, v in every.items() if v.torch_sdpa}
    ours = {k: v for k, v in every.items() if v.attention is not None}
    fused = [k for k, v in ours.items() if v.backend == "triton"][:2]
    eager = [k for k, v in ours.items() if v.backend == "reference"][:1]
    sides = {**dict([*library.items()][:1]), **{k: ours[k] for k in (*eager, *fused)}}
    compared = [c for c in config.comparisons if c.side in sides and c.against in sides]
    grid = KernelsGrid(tokens=16, seq_lens=[16], head_dims=[16], modes=["train"])
    tiny = {"device": "cpu", "dtype": "float32", "warmup": 0, "repeats": 1, "grid": grid}
    return config.model_copy(update={"sides": sides, "comparisons": compared, **tiny})


def _speed(name: str, grids: slice, place: Place) -> list[Phase]:
    """The points of some grids, after their kernels have been compiled on all cores."""
    config = kernels_config(place, name)
    phases = []
    every = config.grid[grids] if isinstance(config.grid, list) else [config.grid]
    for grid in every:
        here = points(config.model_copy(update={"grid": grid}))
        phases.append(Phase(compile_units(here, place.capability), place.cores))
        phases.append(Phase([_point_unit(point, place) for point in here]))
    return phases


def _point_unit(point: KernelsConfig, place: Place) -> Unit:
    seconds = sum(_side_seconds(point, name) for name in point.sides)
    rows = len(point.sides) + len(point.comparisons)
    return Unit(place_name(point), partial(_timed, point, place), seconds, rows)


def _side_seconds(point: KernelsConfig, name: str) -> float:
    """Predict the seconds of a side: calls times products over a speed to be expected."""
    side = point.sides[name]
    fused = side.torch_sdpa is not None or side.backend in ("triton", "sdpa")
    speed = (2e14 if fused else 4e13) / (8 if point.dtype == "float32" else 1)
    passes = 3.5 if point.mode == "train" else 1.0
    flops = 32 * point.batch_size * point.seq_len**2 * point.head_dim * passes
    calls = 2 * (point.warmup + point.repeats) + 8
    return 0.3 + calls * (flops / speed + 1e-3) + (30 if side.backend == "flex" else 0)


def _timed(point: KernelsConfig, place: Place) -> list[Row]:
    before = compiled_kernels()
    rows = measured_rows(point, ceiling(place), True)
    # Kernels that were compiled only now were missed by the stage's own compiling.
    return [*rows, {"place": place_name(point), "compiled_late": compiled_kernels() - before}]


def _speed_page(name: str, place: Place, rows: list[Row]) -> str:
    tests = checked(place)
    measured = [row for row in rows if "place" in row and "compiled_late" not in row]
    if not tests.startswith("passed"):
        measured = [row for row in measured if "comparison" not in row]
    late = sum(row.get("compiled_late", 0) for row in rows)
    page = speed_report(
        kernels_config(place, name), measured, ceiling(place), tests, hardware(place)
    )
    return f"{page}\n\nKernels that were compiled while sides were timed: {late}."


def tuning(place: Place) -> list[Phase]:
    """Candidates are compiled on all cores before the GPU times them."""
    cases, sizes = tuned_cases(), [64, 128]
    if place.rehearses:
        cases, sizes = cases[:1], sizes[:1]
    dtype, capability = torch.bfloat16, place.capability
    units = [
        Unit(f"{case.name}, {size}", partial(_tuned, place, case, size), 20, 3)
        for size in sizes
        for case in cases
    ]
    return [
        Phase(tuning_units(cases, sizes, dtype, capability), place.cores),
        Phase(units),
    ]


def tuned_cases() -> list[Case]:
    """Return the cases that are tuned; tiles of FiSH and chunks of linear attention are planned."""
    left_out = ("dropout", "linear", "fish")
    return [case for case in compile_cases() if not any(word in case.name for word in left_out)]


def _tuned(place: Place, case: Case, head_dim: int) -> list[Row]:
    from profiling.kernels.compile import tune

    if place.rehearses:
        raise Skipped("launch configurations are found by measurement, which needs a GPU")
    path, lines = tune([head_dim], [torch.bfloat16], [case])
    kept = place.out / "tuning" / Path(path).name
    kept.write_bytes(Path(path).read_bytes())
    return lines or [{"status": "failed", "reason": "no candidate ran"}]


def kernel_stage(
    name: str, config: str, about: str, minutes: float, first: int = 0, last: int | None = None
) -> Stage:
    """Return the stage of a kernels file, or of its grids from `first` to before `last`."""
    phases = partial(_speed, config, slice(first, last))
    return Stage(name, about, minutes, phases, partial(_speed_page, config))
