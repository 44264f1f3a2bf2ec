"""Trainings of published tables: many at once on one GPU, each going on where it stopped.

These models are too small to fill a GPU, so cells run beside each other, in forks that share what
this process has imported. Shortly before the end of its time every training is asked to save.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path

# Imported here, so that no training has to: its command and the tasks.
import lit_probattn.cli.app
import lit_probattn.tasks  # noqa: F401
from lit_probattn.cli.shards import end_with_parent, fork_context
from lit_probattn.compare import cells, launch
from lit_probattn.compare.cells import Cell
from lit_probattn.compare.command import Counted, make_cells, missing_by_task
from lit_probattn.compare.protocol import Options
from lit_probattn.compare.report import Report
from lit_probattn.compare.runner import Runner, logged_step
from lit_probattn.compare.tables import read_table
from lit_probattn.training.checkpoints import list_checkpoints
from profiling.stages.place import Phase, Place, Stage
from profiling.stages.units import Row, Skipped, Unfinished, Unit, seconds_left

# Tables and rows in the order of their value: all seeds of these rows, then of the next. Without
# rows: all that are left.
ORDER: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("mgk_table1", ("softmax_8", "mgk_4", "smgk_4", "softmax_4")),
    ("mgk_table2", ("linear_8", "mlk_4", "smlk_4")),
    ("mgk_table5", ()),
    ("mgk_table1", ()),
    ("mgk_table2", ()),
)
_AT_A_TIME = 12
_SAVING_SECONDS = 20.0  # before the end of the time, for saving
_SHORTEST_SECONDS = 60.0  # no training starts with less time left
# Assumed: a step of one training among as many as run at a time, with its share of validation.
_STEP_SECONDS = 0.08
_TINY = {
    **{f"listops:data.init_args.num_{split}": 8 for split in ("train", "val", "test")},
    **{"listops:data.init_args.min_length": 4, "listops:data.init_args.max_length": 32},
    **{"listops:data.init_args.max_length_tokens": 32, "listops:data.init_args.num_processes": 1},
    **{"data.init_args.batch_size": 2, "model.init_args.num_layers": 1},
    **{"trainer.val_check_interval": 2, "run.checkpoint_every": 1},
}


def training_stage(task: str, about: str, minutes: float) -> Stage:
    """Return the stage of a task's trainings; it is in no hurry to be finished."""
    saved = partial(unfinished_checkpoints, task)
    return Stage(task, about, minutes, partial(_phases, task), partial(_page, task), saved)


def _options(place: Place) -> Options:
    if place.rehearses:
        return Options(steps=2, settings=_TINY)
    return Options(trainer="configs/trainer/one_gpu.yaml")


@lru_cache
def tables_of(task: str, place: Place) -> dict[str, list[Cell]]:
    """Return the cells of a task's tables by table; a rehearsal has two."""
    where = cells.Place(
        place.out / task / "runs",
        data_dir=str(place.out / "no data") if place.rehearses else None,
        cache_dir=str(place.out / task / "cache") if place.rehearses else None,
        accelerator="cpu" if place.rehearses else "gpu",
    )
    found: dict[str, list[Cell]] = {}
    for name, rows in ORDER[: 1 if place.rehearses else None]:
        table = read_table(name)
        chosen = [task, *(rows[:2] if place.rehearses else rows)]
        seeds = table.seeds[:1] if place.rehearses else table.seeds
        made = make_cells(table, chosen, seeds, _options(place), where)
        known = {cell.name for cell in found.get(name, [])}
        found.setdefault(name, []).extend(cell for cell in made if cell.name not in known)
    return found


def cells_of(task: str, place: Place) -> list[Cell]:
    """Return the cells of a task, each once, in the order of their value."""
    tables = tables_of(task, place)
    order: dict[str, Cell] = {}
    for name, rows in ORDER:
        for cell in tables.get(name, []):
            if not rows or cell.row.name in rows:
                order.setdefault(cell.name, cell)
    return list(order.values())


def _phases(task: str, place: Place) -> list[Phase]:
    every = cells_of(task, place)
    missing = _missing(task, place)
    if missing is not None:
        return [Phase([Unit("data, missing", partial(_skip, missing))])]
    jobs = min(_AT_A_TIME, place.cores)
    units = [
        Unit(cell.label, partial(_train, cell), cell.max_steps * _STEP_SECONDS) for cell in every
    ]
    return [Phase([Unit("data", partial(_prepare, every), 15)]), Phase(units, jobs)]


@lru_cache
def _missing(task: str, place: Place) -> str | None:
    return missing_by_task(cells_of(task, place)[:1]).get(task)


def _skip(reason: str) -> list[Row]:
    raise Skipped(reason)


def _prepare(every: list[Cell]) -> list[Row]:
    failed = Counted().prepare(every[:1])
    if failed:
        raise RuntimeError("; ".join(failed.values()))
    return [{"cells": len(every)}]


def _train(cell: Cell) -> list[Row]:
    """Train and test a cell in a fork, which has used neither CUDA nor threads before."""
    if cell.result() is None:
        if seconds_left() < min(_SHORTEST_SECONDS, 3 * _SAVING_SECONDS):
            raise Unfinished("no time to begin")
        _in_time(cell)
    result = cell.result()
    if result is None:
        raise RuntimeError(_last_line(cell.log_path))
    return [
        {
            **{"task": cell.task.name, "row": cell.row.name, "seed": cell.seed},
            **result["values"],
            **{"steps": result["max_steps"], "starts": result["num_starts"]},
            "minutes_of_last_start": round(result["fit_seconds_of_last_start"] / 60, 2),
        }
    ]


def _in_time(cell: Cell) -> None:
    """Run a cell; where the time is short, have it saved.

    Raises:
        Unfinished: it was.
    """
    process = fork_context().Process(target=_run, args=(cell,))
    process.start()
    while process.exitcode is None and (left := seconds_left() - _SAVING_SECONDS) > 0:
        process.join(min(left, 1.0))
    if process.exitcode is None:
        process.terminate()
        process.join(_SAVING_SECONDS - 2)
        process.kill()
        process.join()
        if cell.result() is None:
            raise Unfinished(f"step {logged_step(cell)} of {cell.max_steps}")


def _run(cell: Cell) -> None:
    end_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["OMP_NUM_THREADS"] = "1"
    counted = Counted()

    def facts(one: Cell) -> dict[str, object]:
        counted.prepare([one])  # after the training: it may use threads
        return counted(one)

    Runner(facts, attempts=1, start=launch.fork).run([cell], lambda: None)


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    last = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
    return f"the training failed: {last.strip()[:200]} (see {log.name})"


def _page(task: str, place: Place, rows: list[Row]) -> str | None:
    """Write the report of every table that has a finished cell; return a page that names them."""
    lines = [f"# Trainings of {task}", ""]
    command = f"bash profiling/cuda.sh{' --rehearse' if place.rehearses else ''} {task}"
    for name, every in tables_of(task, place).items():
        report = Report(read_table(name), every, command)
        done = f"{len(report.results)} of {len(every)} trainings finished"
        if report.has_numbers:
            report.write(place.out / task / name)
            lines.append(f"- [{report.table.title}]({name}/report.md): {done}")
        else:
            lines.append(f"- {report.table.title}: {done}")
    reasons = [row["reason"] for row in rows if row["status"] != "ok"]
    return "\n".join([*lines, *(f"- {reason}" for reason in dict.fromkeys(reasons))])


def unfinished_checkpoints(task: str, place: Place) -> Iterator[Path]:
    """Yield what the next session needs of trainings that are not finished: newest and best."""
    for cell in cells_of(task, place):
        version = None if cell.result() is not None else cell.version()
        if version is not None:
            yield from list_checkpoints(version / "checkpoints", "step")[:1]
            yield from list_checkpoints(version / "checkpoints", "best")
