"""Runs cells: several at a time, each once, and on from where it was interrupted."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_probattn.compare.cells import Cell, portable
from lit_probattn.training.checkpoints import newest_good_checkpoint, step_of
from lit_probattn.training.run_record import read_starts

# A command of a cell, and its exit status.
Work = Generator[list[str], int, dict[str, Any]]
# Adds to a finished cell's result what is counted on its model and data.
Facts = Callable[[Cell], Mapping[str, Any]]

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
_POLL_SECONDS = 0.1
# How long a cell that another process works on is asked for.
GRACE_SECONDS = 5.0
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl


class CellError(RuntimeError):
    """A command of a cell failed; its log says why."""


@dataclass
class Outcome:
    """What became of the cells of a command.

    Args:
        finished: cells with a result, in order; those finished before included.
        ran: number of cells that this command finished.
        failed: label and reason.
        elsewhere: labels of cells that another process is working on.
    """

    finished: list[Cell] = field(default_factory=list)
    ran: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    elsewhere: list[str] = field(default_factory=list)


def cell_work(cell: Cell, facts: Facts) -> Work:
    """Yield the commands of a cell in turn; return its result.

    Raises:
        CellError: a command ended with another status than 0.
    """
    begin = time.perf_counter()
    if resumed_step(cell) != cell.max_steps:  # else killed after its last step
        yield from _command(cell, cell.fit_arguments())
    seconds = time.perf_counter() - begin
    version = cell.version()
    if version is None:
        raise CellError(f"`fit` left no run folder in {cell.place.runs / cell.name}")
    values: dict[str, float] = {}
    report: dict[str, Any] = {}
    for command, settings, metrics in cell.evaluations():
        yield from _command(cell, cell.evaluate_arguments(command, settings, version))
        path = max(version.glob(f"{command}-*.json"), key=lambda p: p.stat().st_mtime)
        report = json.loads(path.read_text())
        values |= {m.name: m.scale * report[m.key] for m in metrics}
    counted = dict(facts(cell))
    every = cell.task.metrics.values()
    values |= {m.name: m.scale * counted[m.key] for m in every if m.command == "count"}
    return cell_result(cell, version, values, report, seconds) | counted


def _command(cell: Cell, arguments: list[str]) -> Generator[list[str], int, None]:
    status = yield arguments
    if status:
        raise CellError(f"`{arguments[0]}` ended with status {status}; see {log_path(cell)}")


def cell_result(
    cell: Cell,
    version: Path,
    values: Mapping[str, float],
    report: Mapping[str, Any],
    seconds: float,
) -> dict[str, Any]:
    """Collect what is known of a finished cell from its run folder."""
    starts = read_starts(version)
    last = next((s for s in reversed(starts) if "backends" in s), starts[-1])
    return {
        "task": cell.task.name,
        "row": cell.row.name,
        "seed": cell.seed,
        "values": dict(values),
        "selected_step": step_of(Path(report["checkpoint"])),
        "selected_on_test": bool(report.get("selected_on_test")),
        "max_steps": cell.max_steps,
        "fit_seconds_of_last_start": seconds,
        "num_starts": len(starts),
        "run_folder": str(version),
        "command": shlex.join(["python", "-m", "lit_probattn", *portable(cell.fit_arguments())]),
        "python": last.get("python"),
        "packages": last.get("packages"),
        "git": last.get("git"),
        "hardware": last.get("hardware"),
        "backends": last.get("backends"),
    }


def log_path(cell: Cell) -> Path:
    """File that the commands of a cell write to."""
    return cell.folder / "logs" / f"{cell.name}.log"


def resumed_step(cell: Cell) -> int | None:
    """Step of the checkpoint that a cell goes on from, None for a first start."""
    version = cell.version()
    checkpoint = version and newest_good_checkpoint(version / "checkpoints", "step")
    return step_of(checkpoint) if checkpoint else None


@contextmanager
def claim(cell: Cell) -> Iterator[int | None]:
    """Lock a cell; yields the lock's file, or None if another process keeps it.

    Commands of a process that was just killed need a moment to end. The system frees the lock when
    the last process that has the file open ends, however it ends; the commands of the cell inherit
    it.
    """
    path = cell.folder / "locks" / f"{cell.name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield handle if _locked(handle) else None
    finally:
        os.close(handle)


def _locked(handle: int) -> bool:
    end = time.monotonic() + GRACE_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_SECONDS)


def child_environment(slot: int, jobs: int, devices: Sequence[str]) -> dict[str, str]:
    """Environment of a command: one GPU of `devices`, a share of the cores, no torchrun."""
    found = {k: v for k, v in os.environ.items() if not k.startswith(_TORCHRUN)}
    if devices:
        found["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    if jobs > 1:
        found.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    return found


def start(cell: Cell, arguments: Sequence[str], lock: int, environment: dict[str, str]) -> Any:
    """Start a command of a cell; it ends with this process, even if that is killed."""
    program = list(cell.place.launch) or [sys.executable]
    log = log_path(cell)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as out:
        out.write(f"$ {shlex.join(['python', '-m', 'lit_probattn', *arguments])}\n")
        out.flush()
        return subprocess.Popen(
            [*program, "-m", "lit_probattn", *arguments],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=(lock,),
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)


@dataclass
class _Slot:
    """A cell that is being worked on."""

    title: str
    cell: Cell
    claim: Any
    lock: int
    work: Work
    process: Any = None


class Runner:
    """Runs cells.

    Args:
        facts: adds what is counted on model and data to a result.
        jobs: cells at a time.
        devices: CUDA devices that the jobs share in turn; empty leaves them as they are.
        say: receives a line for everything that happens.
    """

    def __init__(
        self,
        facts: Facts,
        jobs: int = 1,
        devices: Sequence[str] = (),
        say: Callable[[str], None] = lambda line: print(line, flush=True),
    ) -> None:
        self.facts, self.jobs, self.devices, self.say = facts, jobs, devices, say

    def run(self, cells: Sequence[Cell], after: Callable[[], object]) -> Outcome:
        """Run what is not finished.

        Args:
            cells: the cells, in order.
            after: called whenever a cell was finished.
        """
        outcome = Outcome()
        waiting = [(f"[{i}/{len(cells)}] {cell.label}", cell) for i, cell in enumerate(cells, 1)]
        slots: list[_Slot | None] = [None] * self.jobs
        try:
            while waiting or any(slots):
                for index, slot in enumerate(slots):
                    if slot is None and waiting:
                        slots[index] = self._begin(index, *waiting.pop(0), outcome)
                    elif slot is not None and slot.process.poll() is not None:
                        slots[index] = self._go_on(index, slot, outcome, after)
                if all(slot is not None for slot in slots) or not waiting:
                    time.sleep(_POLL_SECONDS)
        finally:
            for slot in filter(None, slots):
                slot.process.terminate()
                slot.process.wait()
        return outcome

    def _begin(self, index: int, title: str, cell: Cell, outcome: Outcome) -> _Slot | None:
        claimed = claim(cell)
        lock = claimed.__enter__()
        if cell.result() is not None:
            self.say(f"{title}: finished before, not run again")
            outcome.finished.append(cell)
        elif lock is None:
            self.say(f"{title}: another process is working on it")
            outcome.elsewhere.append(cell.label)
        else:
            step = resumed_step(cell)
            origin = "starts" if step is None else f"goes on from step {step} of {cell.max_steps}"
            self.say(f"{title}: {origin}; log {log_path(cell)}")
            slot = _Slot(title, cell, claimed, lock, cell_work(cell, self.facts))
            self._start(index, slot, next(slot.work))
            return slot
        claimed.__exit__(None, None, None)
        return None

    def _start(self, index: int, slot: _Slot, arguments: list[str]) -> None:
        environment = child_environment(index, self.jobs, self.devices)
        slot.process = start(slot.cell, arguments, slot.lock, environment)

    def _go_on(
        self, index: int, slot: _Slot, outcome: Outcome, after: Callable[[], object]
    ) -> _Slot | None:
        try:
            self._start(index, slot, slot.work.send(slot.process.returncode))
            return slot
        except StopIteration as done:
            slot.cell.keep(done.value)
            numbers = ", ".join(f"{k} {v:.2f}" for k, v in done.value["values"].items())
            seconds = done.value["fit_seconds_of_last_start"]
            self.say(f"{slot.title}: {numbers}; {seconds / 60:.1f} minutes")
            outcome.finished.append(slot.cell)
            outcome.ran += 1
            after()
        except (CellError, OSError, KeyError, ValueError) as error:
            self.say(f"{slot.title}: failed: {error}")
            outcome.failed[slot.cell.label] = str(error)
        slot.claim.__exit__(None, None, None)
        return None
