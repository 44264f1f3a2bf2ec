"""What is done with tables: their state, predictions of their cells, running them to a report."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from datamodules.core.errors import DataError
from lit_probattn.compare.cells import Cell, Options, Place
from lit_probattn.compare.predict import Prediction, build_data, counts, missing_data, predict
from lit_probattn.compare.report import Report
from lit_probattn.compare.runner import Runner
from lit_probattn.compare.tables import FOLDER, Table, kinds, read_published, read_table
from lit_probattn.configs import ConfigError, find
from lit_probattn.records.provenance import device_name


def missing_parts(table: Table) -> list[str]:
    """Return the files that a table needs and this package does not have."""
    needed = [task.config for task in table.tasks.values()]
    needed += [row.attention for row in table.rows.values()]
    return sorted({name for name in needed if not find(name).is_file()})


def make_cells(
    table: Table, only: Sequence[str], seeds: Sequence[int], options: Options, place: Place
) -> list[Cell]:
    """Return the cells of a table whose parts are there: all rows of a seed before the next.

    Raises:
        ConfigError: `only` names nothing that the table has.
    """
    there = [p for p in table.select(only) if find(p[1].attention).is_file()]
    there = [p for p in there if find(p[0].config).is_file()]
    return [Cell(task, row, seed, options, place) for seed in seeds for task, row in there]


def list_lines(place: Place, folder: Path = FOLDER) -> list[str]:
    """Return one line per table: kind, printed numbers, state."""
    numbers: dict[str, int] = {}
    for row in read_published(folder):
        numbers[row["table"]] = numbers.get(row["table"], 0) + 1
    lines = []
    for name, part in kinds(folder).items():
        state = _state(name, part, place, folder)
        head = f"{name:20} {part['kind']:13} {numbers.get(name, 0):3} numbers"
        lines.append(f"{head}  {part['title']}: {state}")
    return lines


def _state(name: str, part: Mapping[str, Any], place: Place, folder: Path) -> str:
    kind = part["kind"]
    if kind == "fits":
        table = read_table(name, folder)
        cells = make_cells(table, [], table.seeds, Options(), place)
        done = sum(cell.result() is not None for cell in cells)
        text = f"{done} of {len(cells)} cells finished (full protocol)"
        parts = missing_parts(table)
        return f"{text}; missing parts: {', '.join(parts)}" if parts else text
    if kind == "uea":
        return "run by python -m lit_probattn.uea_benchmark"
    if kind == "out_of_scope":
        return f"not made: {part['reason']}"
    if kind == "analysis" and importlib.util.find_spec(part["needs"]) is None:
        return f"missing part: {part['needs']}"
    return "see the commands of `reproduce " + name + "`"


def other_lines(
    name: str, part: Mapping[str, Any], place: Place, folder: Path = FOLDER
) -> list[str]:
    """Return what to run for a table that is no table of fits, and the printed numbers.

    Raises:
        ConfigError: the table is out of scope, or a part of the package is missing.
    """
    title = part["title"]
    if part["kind"] == "out_of_scope":
        raise ConfigError(f"{name} ({title}) is not made: {part['reason']}")
    if part["kind"] == "analysis":
        if importlib.util.find_spec(part["needs"]) is None:
            raise ConfigError(f"{name} ({title}) needs {part['needs']}, which is missing")
        return [f"{name}: {title}", *_study_lines(part, place, folder), *_printed(name, folder)]
    return [
        f"{name}: {title}",
        "with a GPU:",
        *part["commands"],
        "without:",
        *part["without_gpu"],
    ]


def _study_lines(part: Mapping[str, Any], place: Place, folder: Path) -> list[str]:
    """Commands that train the models of a study, or study those that are trained."""
    lines: list[str] = []
    for words in part["models"]:
        before = len(lines)
        table = read_table(words.split()[0], folder)
        only = words.partition(" --only ")[2].split()
        for cell in make_cells(table, only, table.seeds, Options(), place):
            result = cell.result()
            if result is not None:
                run = Path(result["run_folder"])
                best = f"{run}/checkpoints/best-{result['selected_step']:08d}.ckpt"
                lines.append(
                    f"python -m lit_probattn.analysis {part['study']} --checkpoint {best} "
                    f"--out {run}/{part['study']}"
                )
        if len(lines) == before:
            lines.append(f"train first: python -m lit_probattn.reproduce {words}")
    return lines


def _printed(name: str, folder: Path) -> list[str]:
    rows = [row for row in read_published(folder) if row["table"] == name]
    return [f"printed: {r['method']}, {r['heads']}: {r['metric']} {r['value']}" for r in rows]


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
