"""The two things that are done with cells: predicting them, and running them to a report."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from datamodules.core.errors import DataError
from lit_probattn.compare.built import build_data, counts, missing_data
from lit_probattn.compare.cells import Cell
from lit_probattn.compare.predict import Prediction, predict
from lit_probattn.compare.report import Report
from lit_probattn.compare.runner import Runner
from lit_probattn.compare.tables import Table
from profiling.measure.environment import device_name


def _data_key(cell: Cell) -> str:
    return json.dumps(cell.config["data"], sort_keys=True)


def missing_by_task(cells: Iterable[Cell]) -> dict[str, str]:
    """Return why the data of a task cannot be read, by the task's name."""
    reasons: dict[str, str | None] = {}
    found: dict[str, str] = {}
    for cell in cells:
        key = _data_key(cell)
        if key not in reasons:
            reasons[key] = missing_data(build_data(cell))
        reason = reasons[key]
        if reason is not None:
            found[cell.task.name] = reason
    return found


# ---- predicting --------------------------------------------------------------------------------


def dry_run(cells: Sequence[Cell], tflops: float | None, commands: bool) -> int:
    """Print what would run, how long it would take and what is missing; 1 if data are missing."""
    missing = missing_by_task(cells)
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.task.name, cell.row.name), []).append(cell)
    plan = []
    for (task, row), group in groups.items():
        print(f"predicting {task}, {row}", file=sys.stderr, flush=True)
        left = [cell for cell in group if cell.result() is None]
        plan.append((group[0], predict(group[0], tflops), len(left), len(group)))
    print("\n".join(plan_lines(plan, missing)))
    for name, reason in missing.items():
        print(f"missing: {name}: {reason}")
    if commands:
        for cell in cells:
            print(shlex.join(["python", "-m", "lit_probattn", *cell.fit_arguments()]))
    return 1 if missing else 0


def plan_lines(
    plan: Sequence[tuple[Cell, Prediction, int, int]], missing: Mapping[str, str]
) -> list[str]:
    """The plan as Markdown.

    Args:
        plan: for each task and row a cell, its prediction, cells to run, cells in all.
        missing: tasks whose data are missing.
    """
    lines = [
        "| task | method | steps | batch x length | parameters | MACs per sample, M | "
        "hours per cell | peak memory, MiB | cells to run | data | time from |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    total = 0.0
    for cell, found, left, count in plan:
        total += left * found.hours
        lines.append(
            f"| {cell.task.name} | {cell.row.label} | {found.steps} | {found.batch_size} x "
            f"{found.seq_len} | {found.num_parameters:,} | {found.macs / 1e6:,.0f} | "
            f"{found.hours:.2f} | {found.peak_bytes / 2**20:,.0f} | {left} of {count} | "
            f"{'missing' if cell.task.name in missing else 'there'} | {found.basis} |"
        )
    measured = any(found.basis.startswith("measured") for _, found, _, _ in plan)
    where = f"measured on {device_name('cpu')}, as busy as it is now" if measured else "FLOP model"
    lines += ["", f"in all {total:.1f} hours one after another; {where}; memory on CPU paths"]
    return lines


# ---- running -----------------------------------------------------------------------------------


class Counted:
    """Adds what is counted on model and data to a result; alike cells are counted once."""

    def __init__(self) -> None:
        self._counts: dict[str, dict[str, int]] = {}
        self._tests: dict[str, int] = {}

    def prepare(self, cells: Sequence[Cell]) -> dict[str, str]:
        """Build the caches of the cells' data; return why a task's cannot be, by task."""
        failed: dict[str, str] = {}
        for cell in cells:
            key = _data_key(cell)
            if key in self._tests or cell.task.name in failed:
                continue
            data = build_data(cell)
            try:
                data.setup()
            except DataError as error:
                failed[cell.task.name] = str(error)
                continue
            self._tests[key] = len(data.split("test"))
        return failed

    def __call__(self, cell: Cell) -> dict[str, Any]:
        """Return parameters, multiply-adds here and at full length, size of the test split."""
        published = Cell(cell.task, cell.row, cell.seed, place=cell.place)
        return {
            **self._count(cell),
            "macs_published_length": self._count(published)["macs"],
            "num_test": self._tests.get(_data_key(cell)),
        }

    def _count(self, cell: Cell) -> dict[str, int]:
        key = json.dumps(cell.config, sort_keys=True)
        if key not in self._counts:
            self._counts[key] = counts(cell)
        return self._counts[key]


def run_table(
    table: Table,
    mine: Sequence[Cell],
    cells: Sequence[Cell],
    *,
    jobs: int,
    devices: Sequence[str],
    out: Path | None,
    command: str,
) -> int:
    """Run cells and write the report.

    Args:
        table: the table.
        mine: cells of this process.
        cells: cells of all processes, which the report shows.
        jobs: cells at a time.
        devices: CUDA devices of the jobs in turn.
        out: folder of the report; None writes none, as in one shard of several.
        command: the command.

    Returns:
        0 if all is finished, else 1.
    """
    counted = Counted()
    unfinished = [cell for cell in mine if cell.result() is None]
    failed = counted.prepare(unfinished)
    for name, reason in failed.items():
        print(f"skipped: {name}: {reason}", file=sys.stderr, flush=True)

    def write() -> str:
        report = Report(table, cells, command)
        return report.write(out) if out is not None and report.results else ""

    runner = Runner(counted, jobs, devices)
    there = [cell for cell in mine if cell.task.name not in failed]
    outcome = runner.run(there, write)
    text = write()
    if text:
        print(f"\n{text}\n\nreport: {out}/report.md")
    for label, reason in outcome.failed.items():
        print(f"failed: {label}: {reason}", file=sys.stderr)
    print(
        f"{len(outcome.finished)} of {len(mine)} cells finished, {outcome.ran} of them now; "
        f"{len(outcome.failed)} failed, {len(outcome.elsewhere)} run elsewhere, "
        f"{len(failed)} tasks without data",
        flush=True,
    )
    return 0 if len(outcome.finished) == len(mine) else 1
