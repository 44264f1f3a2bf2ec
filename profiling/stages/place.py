"""Where the plan runs, what a stage is, and a page of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from lit_probattn.records.tables import markdown_lines
from profiling.kernels.command import header
from profiling.stages.units import Row, Unit, read_units


@dataclass(frozen=True)
class Place:
    """Where the plan runs.

    Args:
        out: folder of the results, with a folder per stage.
        device: "cuda", or "cpu" in a rehearsal, where everything is tiny.
        capability: of the GPU, such as 90.
        cores: processes that compile or check at a time.
    """

    out: Path
    device: str
    capability: int = 90
    cores: int = 1

    @property
    def rehearses(self) -> bool:
        """Whether this is a rehearsal on the CPU."""
        return self.device == "cpu"

    def rows(self, stage: str) -> Path:
        """Return the file of a stage's rows."""
        return self.out / stage / "units.jsonl"


@dataclass(frozen=True)
class Phase:
    """Units of a stage that run in one go, in so many processes."""

    units: Sequence[Unit]
    jobs: int = 1


Report = Callable[[Place, list[Row]], str | None]


@dataclass(frozen=True)
class Stage:
    """A stage.

    Args:
        about: what it is for, in a few words.
        minutes: after which it is ended.
        phases: what it runs, one after the other.
        report: its page from its rows; None where `phases` write it.
        checkpoints: what it needs to go on, which has archives of its own.
    """

    name: str
    about: str
    minutes: float
    phases: Callable[[Place], list[Phase]]
    report: Report
    checkpoints: Callable[[Place], Iterable[Path]] = lambda place: ()

    def predicted(self, place: Place) -> tuple[float, int]:
        """Return (seconds, rows) that all units are predicted to take, on all cores."""
        phases = self.phases(place)
        seconds = sum(
            3.0 + sum(unit.seconds for unit in phase.units) / min(phase.jobs, len(phase.units))
            for phase in phases
            if phase.units
        )
        return seconds, sum(unit.rows for phase in phases for unit in phase.units)


def verdict(good: bool, reason: str | None) -> Row:
    """Return the status of a row, and why it failed."""
    return {"status": "ok"} if good else {"status": "failed", "reason": reason}


def hardware(place: Place) -> str:
    """Return where the rows were measured."""
    found = [r["hardware"] for r in read_units(place.rows("environment")) if "hardware" in r]
    return f"{found[-1]}{' (interpreter)' if place.rehearses else ''}" if found else "not noted"


def ceiling(place: Place) -> float:
    """Return the FLOP/s of a large matrix product in half precision; NaN if not measured."""
    rows = read_units(place.rows("environment"))
    found = [
        row["flops_per_s"]
        for row in rows
        if row.get("dtype") == "bfloat16" and "flops_per_s" in row
    ]
    return float(found[-1]) if found else float("nan")


def table_page(title: str, place: Place, rows: Iterable[Row]) -> str:
    """Return a page with the rows as tables, one per set of columns."""
    tables: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        shown = {k: v for k, v in row.items() if k != "session"}
        tables.setdefault(tuple(shown), []).append(shown)
    lines = header(title, [f"Hardware: {hardware(place)}"])
    for table in tables.values():
        lines += ["", *markdown_lines(pd.DataFrame(table).astype(object).fillna("–"))]
    return "\n".join(lines)
