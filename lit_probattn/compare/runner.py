"""Runs cells: several at a time, each once, and on from where it was interrupted.

A cell waits for the one that it begins with, and is skipped where that does not come about.
"""

from __future__ import annotations

import json
import shlex
import signal
import statistics
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_probattn.base.errors import ChildError
from lit_probattn.base.locks import claim
from lit_probattn.base.progress import Progress
from lit_probattn.compare.cells import Cell, portable
from lit_probattn.compare.launch import child_environment, start
from lit_probattn.compare.results import checked
from lit_probattn.training.checkpoints import newest_good_checkpoint, step_of
from lit_probattn.training.logs import FILE_NAME as METRICS
from lit_probattn.training.run_record import read_starts

# A command of a cell, and its exit status.
Work = Generator[list[str], int, dict[str, Any]]
# Adds to a finished cell's result what is counted on its model and data.
Facts = Callable[[Cell], Mapping[str, Any]]

_POLL_SECONDS = 0.1
# How long to wait for a cell whose process was just killed and may still be ending.
GRACE_SECONDS = 5.0
PROGRESS_SECONDS = 60.0


@dataclass
class Outcome:
    """What became of the cells of a command.

    Args:
        finished: cells with a result, in order; those finished before included.
        ran: number of cells that this command finished.
        failed: label and reason.
        elsewhere: labels of cells that another process is working on.
        skipped: label and reason of cells whose start is not finished.
    """

    finished: list[Cell] = field(default_factory=list)
    ran: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    elsewhere: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


def cell_work(cell: Cell, facts: Facts) -> Work:
    """Yield the commands of a cell in turn; return its result.

    Raises:
        ChildError: a command ended with another status than 0.
    """
    begin, seconds = time.perf_counter(), None
    if resumed_step(cell) != cell.max_steps:  # else killed after its last step
        yield from _command(cell, cell.fit_arguments())
        seconds = time.perf_counter() - begin
    version = cell.version()
    if version is None:
        raise ChildError(f"`fit` left no run folder in {cell.place.runs / cell.run_name}")
    values: dict[str, float] = {}
    report: dict[str, Any] = {}
    for command, settings, metrics in cell.evaluations():
        yield from _command(cell, cell.evaluate_arguments(command, settings, version))
        path = max(version.glob(f"{command}-*.json"), key=lambda p: p.stat().st_mtime)
        report = json.loads(path.read_text())
        values |= {m.name: m.value(report) for m in metrics}
    counted = dict(facts(cell))
    every = cell.task.metrics.values()
    values |= {m.name: m.value(counted) for m in every if m.command == "count"}
    return checked(cell_result(cell, version, values, report, seconds) | counted)


def minutes_of(result: Mapping[str, Any]) -> str:
    """Return how long a cell was trained; a resumed fit counts from its last start."""
    seconds = result["fit_seconds_of_last_start"]
    if seconds is None:
        return "unknown"
    return f"{'at least ' if result['num_starts'] > 1 else ''}{seconds / 60:.1f}"


def _command(cell: Cell, arguments: list[str]) -> Generator[list[str], int, None]:
    status = yield arguments
    if status:
        raise ChildError(f"`{arguments[0]}` ended with status {status}; see {cell.log_path}")


def cell_result(
    cell: Cell,
    version: Path,
    values: Mapping[str, float],
    report: Mapping[str, Any],
    seconds: float | None,
) -> dict[str, Any]:
    """Collect what is known of a finished cell from its run folder.

    Raises:
        ChildError: its data were changed while it was trained.
    """
    starts = read_starts(version)
    noted: dict[str, str] = next((s["sources"] for s in reversed(starts) if s.get("sources")), {})
    known = cell.place.hashes.get(cell.data_key, {})
    changed = sorted(k for k in noted.keys() & known.keys() if noted[k] != known[k])
    if changed:
        raise ChildError(f"data files changed while it ran: {', '.join(changed)}; run it again")
    last = next((s for s in reversed(starts) if "backends" in s), starts[-1])
    return {
        "name": cell.name,
        "task": cell.task.name,
        "row": cell.row.name,
        "seed": cell.seed,
        "values": dict(values),
        "sources": cell.sources or {},
        "selected_step": step_of(Path(report["checkpoint"])),
        "selected_on_test": bool(report.get("selected_on_test")),
        "max_steps": cell.max_steps,
        "fit_seconds_of_last_start": seconds,
        "num_starts": len(starts),
        "report": dict(report),
        "run_folder": str(version),
        "command": shlex.join(["python", "-m", "lit_probattn", *portable(cell.fit_arguments())]),
        **{key: last.get(key) for key in ("python", "packages", "git", "hardware", "backends")},
    }


def resumed_step(cell: Cell) -> int | None:
    """Return the step of the checkpoint that a cell goes on from, None for a first start."""
    version = cell.version()
    checkpoint = version and newest_good_checkpoint(version / "checkpoints", "step")
    return step_of(checkpoint) if checkpoint else None


def logged_step(cell: Cell) -> int:
    """Return the last step that a cell's run has logged, 0 if it has not logged any."""
    try:
        paths = (cell.place.runs / cell.run_name).glob(f"*/{METRICS}")
        with max(paths, key=lambda p: p.stat().st_mtime).open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 4096))
            return int(file.read().splitlines()[-1].split(b",")[0])
    except (OSError, ValueError, IndexError):
        return 0


@dataclass
class _Slot:
    """A cell that is being worked on."""

    title: str
    cell: Cell
    claim: AbstractContextManager[int | None]
    lock: int
    work: Work
    first: int
    process: Any = None
    begin: float = field(default_factory=time.monotonic)

    def pace(self) -> float | None:
        """Seconds per step so far."""
        done = logged_step(self.cell) - self.first
        return (time.monotonic() - self.begin) / done if done > 0 else None


class Pace:
    """Seconds per step of every task and row, from finished and from running cells."""

    def __init__(self) -> None:
        self._finished: dict[tuple[str, str], list[float]] = {}

    def learn(self, cell: Cell, result: Mapping[str, Any]) -> None:
        """Learn from a finished cell that was started once."""
        seconds = result["fit_seconds_of_last_start"]
        if result["num_starts"] == 1 and seconds is not None:
            found = self._finished.setdefault((cell.task.name, cell.row.name), [])
            found.append(seconds / max(1, cell.max_steps))

    def seconds_left(
        self, waiting: Sequence[Cell], slots: Sequence[_Slot], jobs: int
    ) -> float | None:
        """Return about how long the rest takes, None while nothing is known.

        Rows of which nothing is known yet are taken for the mean of the others.
        """
        known = {kind: statistics.fmean(found) for kind, found in self._finished.items()}
        for slot in slots:
            pace = slot.pace()
            if pace is not None:
                known.setdefault((slot.cell.task.name, slot.cell.row.name), pace)
        if not known:
            return None
        mean = statistics.fmean(known.values())

        def rest(cell: Cell, done: int) -> float:
            pace = known.get((cell.task.name, cell.row.name), mean)
            return pace * max(0, cell.max_steps - done)

        running = [rest(slot.cell, max(slot.first, logged_step(slot.cell))) for slot in slots]
        total = sum(running) + sum(rest(cell, 0) for cell in waiting)
        return max([total / jobs, *running])


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Have SIGTERM raise KeyboardInterrupt, so that cells are asked to save before the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Runner:
    """Runs cells.

    Args:
        facts: adds what is counted on model and data to a result.
        jobs: cells at a time.
        devices: CUDA devices that the jobs share in turn; empty leaves them as they are.
        attempts: how often a cell that fails is tried, the others first.
        say: receives a line for everything that happens.
    """

    def __init__(
        self,
        facts: Facts,
        jobs: int = 1,
        devices: Sequence[str] = (),
        attempts: int = 2,
        say: Callable[[str], None] = lambda line: print(line, flush=True),
    ) -> None:
        self.facts, self.jobs, self.devices, self.say = facts, jobs, devices, say
        self.attempts = attempts

    def run(self, cells: Sequence[Cell], after: Callable[[], object]) -> Outcome:
        """Run what is not finished.

        Args:
            cells: the cells, in order.
            after: called whenever a cell was finished.
        """
        self.outcome, self.tries, self.pace = Outcome(), Counter[str](), Pace()
        self.waiting = deque(
            (f"[{i}/{len(cells)}] {cell.label}", cell) for i, cell in enumerate(cells, 1)
        )
        self.slots: list[_Slot | None] = [None] * self.jobs
        self.progress = Progress(len(cells), "cells", self.say, PROGRESS_SECONDS)
        with stopped_by_sigterm():
            try:
                while self.waiting or any(self.slots):
                    self._turn(after)
            finally:
                for slot in filter(None, self.slots):
                    slot.process.terminate()
                for slot in filter(None, self.slots):
                    slot.process.wait()
        return self.outcome

    def _turn(self, after: Callable[[], object]) -> None:
        """Look at every slot once."""
        blocked = False
        for index, slot in enumerate(self.slots):
            if slot is None and self.waiting:
                found = self._next()
                blocked |= found is None
                if found is not None:
                    self.slots[index] = self._begin(index, *found)
            elif slot is not None and slot.process.poll() is not None:
                self.slots[index] = self._go_on(index, slot, after)
        if self.progress.due():
            self._tell()
        if all(slot is not None for slot in self.slots) or blocked or not self.waiting:
            time.sleep(_POLL_SECONDS)

    def _next(self) -> tuple[str, Cell] | None:
        """Take the first waiting cell that can begin; skip those that never will."""
        coming = {cell.name for _, cell in self.waiting}
        coming |= {slot.cell.name for slot in self.slots if slot is not None}
        for entry in list(self.waiting):
            title, cell = entry
            start = cell.start
            if start is None or cell.result() is not None or start.result() is not None:
                self.waiting.remove(entry)
                return entry
            if start.name not in coming:
                self.waiting.remove(entry)
                coming.discard(cell.name)
                reason = f"it begins with {start.label}, which {self._fate(start)}"
                self.say(f"{title}: skipped: {reason}")
                self.outcome.skipped[cell.label] = reason
        return None

    def _fate(self, start: Cell) -> str:
        if start.label in self.outcome.elsewhere:
            return "another process is working on"
        return "failed" if start.label in self.outcome.failed else "is not finished"

    def _tell(self) -> None:
        """Say how far all cells are."""
        slots = [slot for slot in self.slots if slot is not None]
        waiting = [cell for _, cell in self.waiting]
        steps = [f"{logged_step(s.cell)} of {s.cell.max_steps}" for s in slots]
        note = f"running: step {', '.join(steps)}" if steps else ""
        left = self.pace.seconds_left(waiting, slots, self.jobs) if waiting or slots else None
        self.progress.show(len(self.outcome.finished), left, note)

    def _begin(self, index: int, title: str, cell: Cell) -> _Slot | None:
        claimed = claim(cell.folder / "locks" / f"{cell.name}.lock", GRACE_SECONDS)
        lock = claimed.__enter__()
        result = cell.result()
        if result is not None:
            self.say(f"{title}: finished before, not run again")
            self.outcome.finished.append(cell)
            self.pace.learn(cell, result)
        elif lock is None:
            self.say(f"{title}: another process is working on it")
            self.outcome.elsewhere.append(cell.label)
        else:
            step = resumed_step(cell)
            origin = "starts" if step is None else f"goes on from step {step} of {cell.max_steps}"
            changed = cell.changed_sources()
            if changed:
                origin += f" (its result is of other data; changed: {', '.join(changed)})"
            self.say(f"{title}: {origin}; log {cell.log_path}")
            self.tries[cell.name] += 1
            slot = _Slot(title, cell, claimed, lock, cell_work(cell, self.facts), step or 0)
            self._start(index, slot, next(slot.work))
            return slot
        claimed.__exit__(None, None, None)
        return None

    def _start(self, index: int, slot: _Slot, arguments: list[str]) -> None:
        launch = slot.cell.place.launch
        environment = child_environment(index, self.jobs, self.devices, launch)
        slot.process = start(launch, arguments, slot.cell.log_path, environment, slot.lock)

    def _go_on(self, index: int, slot: _Slot, after: Callable[[], object]) -> _Slot | None:
        try:
            self._start(index, slot, slot.work.send(slot.process.returncode))
            return slot
        except StopIteration as done:
            self._finish(slot, done.value)
            after()
        except (ChildError, OSError, KeyError, ValueError, subprocess.SubprocessError) as error:
            if self.tries[slot.cell.name] < self.attempts:
                self.say(f"{slot.title}: failed: {error}; it is tried again after the others")
                self.waiting.append((slot.title, slot.cell))
            else:
                self.say(f"{slot.title}: failed: {error}")
                self.outcome.failed[slot.cell.label] = str(error)
        slot.claim.__exit__(None, None, None)
        return None

    def _finish(self, slot: _Slot, result: dict[str, Any]) -> None:
        slot.cell.keep(result)
        numbers = ", ".join(f"{k} {v:.2f}" for k, v in result["values"].items())
        self.say(f"{slot.title}: {numbers}; {minutes_of(result)} minutes")
        self.outcome.finished.append(slot.cell)
        self.outcome.ran += 1
        self.pace.learn(slot.cell, result)
        self.slots[self.slots.index(slot)] = None
        self._tell()
