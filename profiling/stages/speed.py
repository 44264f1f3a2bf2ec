"""Time and memory of kernels."""

from __future__ import annotations

from functools import partial

from lit_probattn.kernels.runtime import tuned_file
from profiling.kernels.config import (
    Comparison,
    KernelsConfig,
    Side,
    TorchSdpa,
    load_kernels,
    points,
)
from profiling.kernels.config import Grid as KernelsGrid
from profiling.kernels.speed import measured_rows, place_name, speed_report
from profiling.stages.checks import checked
from profiling.stages.place import Phase, Place, Stage, ceiling, hardware
from profiling.stages.units import Row, Unit
from profiling.stages.warm import compile_units, compiled_kernels


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


def gate_config(place: Place) -> KernelsConfig:
    """Return the sides and comparisons of both files with gates, without their grids.

    In a rehearsal only the first file's.
    """
    config, fish = (kernels_config(place, name) for name in ("kernels_cuda", "kernels_fish_cuda"))
    if place.rehearses:
        return config
    return config.model_copy(
        update={
            "grid": None,
            "sides": {**fish.sides, **config.sides},
            "comparisons": [*config.comparisons, *fish.comparisons],
        }
    )


def gate_points(config: KernelsConfig, place: Place) -> list[KernelsConfig]:
    """Return the points of most gates, N = 4096 in half precision; in a rehearsal the file's."""
    if place.rehearses:
        return points(config)
    grid = KernelsGrid(
        tokens=16384,
        seq_lens=[4096],
        head_dims=[64, 128],
        modes=["train", "eval"],
        dtypes=["bfloat16"],
    )
    return points(config.model_copy(update={"grid": grid}))


def gated(config: KernelsConfig) -> list[Comparison]:
    """Return the comparisons with gates."""
    return [comparison for comparison in config.comparisons if comparison.gates]


def _speed(name: str, grids: slice, place: Place) -> list[Phase]:
    """The points of some grids, after their kernels have been compiled on all cores."""
    config = kernels_config(place, name)
    phases = []
    every = config.grid[grids] if isinstance(config.grid, list) else [config.grid]
    for grid in every:
        here = points(config.model_copy(update={"grid": grid}))
        phases.append(Phase(compile_units(here, place.capability), place.cores))
        phases.append(Phase([point_unit(point, place) for point in here]))
    return phases


def point_unit(point: KernelsConfig, place: Place) -> Unit:
    """Return the unit that times the sides of a point."""
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
    rows.append({"place": place_name(point), "compiled_late": compiled_kernels() - before})
    table = tuned_file(place.capability)
    tuned = None if place.rehearses or not table.exists() else table.name
    return [{**row, "tuned": tuned} for row in rows]


def speed_page(
    config: KernelsConfig, place: Place, rows: list[Row], tests: str | None = None
) -> str:
    """Return the page of timed points: no ratios unless the checks say that kernels are right.

    Args:
        config: the kernels file.
        place: where the points were measured.
        rows: of the stage.
        tests: what the checks say, where these are not those of the stage `checks`.
    """
    tests = tests or checked(place)
    measured = [row for row in rows if "place" in row and "compiled_late" not in row]
    if not tests.startswith("passed"):
        measured = [row for row in measured if "comparison" not in row]
    late = sum(row.get("compiled_late", 0) for row in rows)
    page = speed_report(config, measured, ceiling(place), tests, hardware(place))
    tuned = sorted({row["tuned"] or "defaults" for row in rows if "tuned" in row})
    notes = [
        f"Kernels that were compiled while sides were timed: {late}.",
        f"Launch configurations: {', '.join(tuned) or 'none were used'}.",
    ]
    return "\n\n".join([page, *notes])


def kernel_stage(
    name: str, config: str, about: str, minutes: float, first: int = 0, last: int | None = None
) -> Stage:
    """Return the stage of a kernels file, or of its grids from `first` to before `last`."""
    phases = partial(_speed, config, slice(first, last))

    def page(place: Place, rows: list[Row]) -> str:
        return speed_page(kernels_config(place, config), place, rows)

    return Stage(name, about, minutes, phases, page)
