"""The fastest launch configurations, and the gates once more with them."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from lit_probattn.kernels.runtime import forget_tuned, tuned_file
from lit_probattn.records.provenance import replace_text
from profiling.kernels.cases import Case, compile_cases
from profiling.kernels.compile import tune
from profiling.kernels.config import KernelsConfig
from profiling.stages.checks import checked, outcome, parity_unit
from profiling.stages.place import Phase, Place
from profiling.stages.speed import gate_config, gate_points, gated, point_unit, speed_page
from profiling.stages.units import Row, Skipped, Unit
from profiling.stages.warm import compile_units, tuning_units


# ---------------------------------------------------------------------- search
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
    if place.rehearses:
        raise Skipped("launch configurations are found by measurement, which needs a GPU")
    put_in_place(place)  # or the kept table would lose what an earlier run found
    path, lines = tune([head_dim], [torch.bfloat16], [case])
    replace_text(_kept(place), Path(path).read_text(encoding="utf-8"))
    return lines or [{"status": "failed", "reason": "no candidate ran"}]


# ---------------------------------------------------------------------- table
def _kept(place: Place) -> Path:
    """Return where the results keep the tuned table of their GPU."""
    return place.out / "tuning" / tuned_file(place.capability).name


def table_name(place: Place) -> str | None:
    """Return file and digest of the tuned table, the package's or the results'; None without.

    The interpreter takes no configurations from a table.
    """
    if place.rehearses:
        return None
    for path in (tuned_file(place.capability), _kept(place)):
        if path.exists():
            return f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()[:8]}"
    return None


def put_in_place(place: Place) -> None:
    """Give the package the results' table if it has none: they may be of a machine that is gone."""
    path, kept = tuned_file(place.capability), _kept(place)
    if not path.exists() and kept.exists():
        replace_text(path, kept.read_text(encoding="utf-8"))
        forget_tuned()


# ---------------------------------------------------------------------- gates
def speed_tuned(place: Place) -> list[Phase]:
    """Return what checks our kernels with a tuned table and times them and what gates name.

    Units are named after the table: another one is measured again.
    """
    here = gate_points(_tuned_config(place), place)
    table = table_name(place)

    def named(unit: Unit) -> Unit:
        key = f"{unit.key}; {table or 'no tuned table'}"
        return Unit(key, partial(_with_table, place, unit), unit.seconds, unit.rows)

    compiling = [named(unit) for unit in compile_units(here, place.capability)]
    sizes = [16] if place.rehearses else [64, 128]
    causal = tuned_cases()[: 1 if place.rehearses else None]
    plain = [replace(case, name=f"{case.name}, not causal", masks=()) for case in causal]
    cases = [*causal, *plain]
    parity = [
        named(parity_unit(place, case, torch.bfloat16, size)) for size in sizes for case in cases
    ]
    timing = [named(point_unit(point, place)) for point in here]
    return [Phase(compiling, place.cores), Phase(parity, place.cores), Phase(timing)]


def _tuned_config(place: Place) -> KernelsConfig:
    config = gate_config(place)
    ours = {name for name, side in config.sides.items() if side.backend == "triton"}
    ours |= {comparison.against for comparison in gated(config) if comparison.side in ours}
    sides = {name: side for name, side in config.sides.items() if name in ours}
    compared = [c for c in config.comparisons if c.side in sides and c.against in sides]
    return config.model_copy(update={"sides": sides, "comparisons": compared})


def _with_table(place: Place, unit: Unit) -> list[Row]:
    if place.rehearses:
        raise Skipped("the interpreter takes no configurations from a tuned table")
    put_in_place(place)
    table = tuned_file(place.capability).name
    if table_name(place) is None:
        raise Skipped(f"there is no {table}, neither in the package nor in the results")
    return [dict(row) for row in unit.work()]


def tuned_page(place: Place, rows: list[Row]) -> str:
    """Return the page of the points with the table that there is now."""
    compiling, parity, timing = ({u.key for u in phase.units} for phase in speed_tuned(place))
    here = [row for row in rows if row["unit"] in compiling | parity | timing]
    tests = outcome(parity, here)
    if tests.startswith("passed"):
        tests = checked(place)
    reasons = dict.fromkeys(row["reason"] for row in here if row["status"] == "skipped")
    points = [row for row in here if row["unit"] in timing]
    page = speed_page(_tuned_config(place), place, points, tests)
    return "\n\n".join([page, *(f"Not measured: {reason}." for reason in reasons)])
