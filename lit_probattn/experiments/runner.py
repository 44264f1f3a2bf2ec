"""Run jobs concurrently, each once, and resume interrupted ones.

A job is identified by all settings that affect its result: a training with its evaluation, a study
of it, a comparison of studies. It waits for the jobs on which it depends, and is skipped if one of
them fails. Concurrent commands on one folder share the jobs, since each locks those that it runs.
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_probattn.base.errors import ChildError
from lit_probattn.base.locks import claim
from lit_probattn.base.processes import Worker
from lit_probattn.base.progress import Progress
from lit_probattn.experiments.launch import child_environment, start

_POLL_SECONDS = 0.1
# How long to wait for a job whose process was just killed and may still be exiting.
GRACE_SECONDS = 5.0
PROGRESS_SECONDS = 60.0


@dataclass(frozen=True)
class Command:
    """A step of a job: a module of this package with arguments.

    Args:
        arguments: command line after the module.
        module: module to run.
        launch: launcher instead of `python`, which may need the scheduler's variables.
    """

    arguments: Sequence[str]
    module: str = "lit_probattn"
    launch: Sequence[str] = ()


@dataclass(frozen=True)
class Call:
    """A step of a job: a request to a worker process, which is kept for the next step of its slot.

    Args:
        worker: creates the worker.
        request: plain JSON.
        limit_s: seconds after which the worker is killed.
    """

    worker: Callable[[], Worker]
    request: Any
    limit_s: float


# The steps of a job: the answer to a command is its exit status, to a call the worker. The returned
# text describes the result; if it is empty, only the progress line is printed.
Work = Generator[Command | Call, Any, str]


class Job(ABC):
    """A run.

    Args:
        name: identity, and name of its lock and log below `folder`.
        label: name in messages.
        folder: folder of locks and logs.
        after: jobs on which it depends.
        kind: jobs of one kind take about the same time per unit of size.
        size: number of units of work, such as optimiser steps.
    """

    def __init__(
        self,
        name: str,
        label: str,
        folder: Path,
        *,
        after: Sequence[Job] = (),
        kind: Hashable = None,
        size: int = 1,
    ) -> None:
        self.name, self.label, self.folder = name, label, folder
        self.after, self.kind, self.size = after, kind, size

    @property
    def log_path(self) -> Path:
        """Log file of the steps."""
        return self.folder / "logs" / f"{self.name}.log"

    @property
    def lock_path(self) -> Path:
        """Lock file, held while the job runs."""
        return self.folder / "locks" / f"{self.name}.lock"

    @abstractmethod
    def is_done(self) -> bool:
        """Whether the result exists."""

    @abstractmethod
    def work(self) -> Work:
        """Yield the steps one by one; store the result and return a line about it.

        Raises:
            ChildError: a step failed.
        """

    def begins(self) -> tuple[str, int]:
        """Return the message at its start (empty for none), and the number of finished units."""
        return "starts", 0

    def position(self) -> int:
        """Return the number of finished units that it has reported."""
        return 0

    def seconds(self) -> float | None:
        """Return the time of a finished job for all its units, or None if unknown."""
        return None


@dataclass
class Outcome:
    """Result of the jobs of a command.

    Args:
        finished: jobs with a result, in order, including those finished before.
        ran: number of jobs that this command finished.
        failed: reasons by label.
        elsewhere: labels of jobs that another process is running.
        skipped: reasons by label of jobs that depend on an unfinished job.
    """

    finished: list[Any] = field(default_factory=list)
    ran: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    elsewhere: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)


@dataclass
class Slot:
    """A running job."""

    title: str
    job: Job
    claim: AbstractContextManager[int | None]
    lock: int
    work: Work
    first: int
    process: Any = None
    begin: float = field(default_factory=time.monotonic)

    def pace(self) -> float | None:
        """Seconds per unit so far."""
        done = self.job.position() - self.first
        return (time.monotonic() - self.begin) / done if done > 0 else None


class Pace:
    """Seconds per unit of each kind of job, from finished and running ones."""

    def __init__(self) -> None:
        self._finished: dict[Hashable, list[float]] = {}

    def learn(self, job: Job, taken: float | None = None) -> None:
        """Record a finished job; `taken` are its seconds if it does not report them."""
        seconds = job.seconds()
        seconds = taken if seconds is None else seconds
        if seconds is not None:
            self._finished.setdefault(job.kind, []).append(seconds / max(1, job.size))

    def seconds_left(
        self, waiting: Sequence[Job], slots: Sequence[Slot], num_slots: int
    ) -> float | None:
        """Return the estimated remaining time, or None if there is no estimate yet.

        Kinds without an estimate use the mean of the others.
        """
        known = {kind: statistics.fmean(found) for kind, found in self._finished.items()}
        for slot in slots:
            pace = slot.pace()
            if pace is not None:
                known.setdefault(slot.job.kind, pace)
        if not known:
            return None
        mean = statistics.fmean(known.values())

        def rest(job: Job, done: int) -> float:
            return known.get(job.kind, mean) * max(0, job.size - done)

        running = [rest(slot.job, max(slot.first, slot.job.position())) for slot in slots]
        total = sum(running) + sum(rest(job, 0) for job in waiting)
        return max([total / num_slots, *running])


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt, so that jobs save before exit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Runner:
    """Runs jobs.

    Args:
        num_slots: number of concurrent jobs.
        devices: CUDA devices to distribute the slots over; empty means unchanged.
        attempts: number of attempts per job; failed jobs are retried after the others.
        say: receives a line per event. None means standard error with one progress line that is
            updated, or a line every ten seconds.
        what: plural noun for the jobs.
    """

    def __init__(
        self,
        num_slots: int = 1,
        devices: Sequence[str] = (),
        attempts: int = 2,
        say: Callable[[str], None] | None = lambda line: print(line, flush=True),
        what: str = "jobs",
    ) -> None:
        self.num_slots, self.devices = num_slots, devices
        self.say = say or (lambda line: print(line, file=sys.stderr, flush=True))
        self.shown = (say, 10.0 if say is None else PROGRESS_SECONDS)
        self.workers: dict[int, Worker] = {}
        self.attempts, self.what = attempts, what

    def run(
        self, jobs: Sequence[Job], after: Callable[[], object] = lambda: None, done: int = 0
    ) -> Outcome:
        """Run the unfinished jobs.

        Args:
            jobs: the jobs, in order.
            after: called after each finished job.
            done: number of jobs finished before that are not in `jobs`.
        """
        self.done = done
        self.outcome, self.tries, self.pace = Outcome(), Counter[str](), Pace()
        self.waiting = deque(
            (f"[{i}/{len(jobs)}] {job.label}", job) for i, job in enumerate(jobs, 1)
        )
        self.slots: list[Slot | None] = [None] * self.num_slots
        self.progress = Progress(done + len(jobs), self.what, *self.shown)
        with stopped_by_sigterm():
            try:
                while self.waiting or any(self.slots):
                    self._turn(after)
            finally:
                running = [slot.process for slot in self.slots if slot is not None]
                commands = [one for one in running if one and not isinstance(one, Worker)]
                for process in commands:
                    process.terminate()
                for process in commands:
                    process.wait()
                for worker in self.workers.values():
                    worker.close()
        return self.outcome

    def _turn(self, after: Callable[[], object]) -> None:
        """Poll every slot once."""
        blocked = False
        for index, slot in enumerate(self.slots):
            if slot is None and self.waiting:
                found = self._next()
                blocked |= found is None
                if found is not None:
                    self._begin(index, *found, after)
            elif slot is not None and slot.process.poll() is not None:
                self._go_on(index, slot, after)
        if self.progress.due():
            self._tell()
        if all(slot is not None for slot in self.slots) or blocked or not self.waiting:
            self._wait()

    def _next(self) -> tuple[str, Job] | None:
        """Return the first waiting job that can start; skip those that never can."""
        coming = {job.name for _, job in self.waiting}
        coming |= {slot.job.name for slot in self.slots if slot is not None}
        for entry in list(self.waiting):
            title, job = entry
            missing = [] if job.is_done() else [one for one in job.after if not one.is_done()]
            if not missing:
                self.waiting.remove(entry)
                return entry
            never = next((one for one in missing if one.name not in coming), None)
            if never is not None:
                self.waiting.remove(entry)
                coming.discard(job.name)
                reason = f"it depends on {never.label}, which {self._fate(never)}"
                self.say(f"{title}: skipped: {reason}")
                self.outcome.skipped[job.label] = reason
        return None

    def _fate(self, job: Job) -> str:
        if job.label in self.outcome.elsewhere:
            return "another process is running"
        return "failed" if job.label in self.outcome.failed else "is not finished"

    def _wait(self) -> None:
        """Wait for a short time, or shorter if a single worker answers."""
        running = [slot.process for slot in self.slots if slot is not None]
        if len(running) == 1 and isinstance(running[0], Worker):
            running[0].poll(_POLL_SECONDS)
        elif running or self.waiting:
            time.sleep(_POLL_SECONDS)

    def _tell(self, note: str = "") -> None:
        slots = [slot for slot in self.slots if slot is not None]
        waiting = [job for _, job in self.waiting]
        steps = [f"{s.job.position()} of {s.job.size}" for s in slots if s.job.size > 1]
        note = f"running: step {', '.join(steps)}" if steps else note
        left = self.pace.seconds_left(waiting, slots, self.num_slots) if waiting or slots else None
        self.progress.show(self.done + len(self.outcome.finished), left, note)

    def _begin(self, index: int, title: str, job: Job, after: Callable[[], object]) -> None:
        claimed = claim(job.lock_path, GRACE_SECONDS)
        lock = claimed.__enter__()
        if job.is_done():
            self.say(f"{title}: already finished")
            self.outcome.finished.append(job)
            self.pace.learn(job)
        elif lock is None:
            self.say(f"{title}: running in another process")
            self.outcome.elsewhere.append(job.label)
        else:
            told, first = job.begins()
            if told:
                self.say(f"{title}: {told}; log {job.log_path}")
            self.tries[job.name] += 1
            self.slots[index] = slot = Slot(title, job, claimed, lock, job.work(), first)
            self._go_on(index, slot, after)
            return
        claimed.__exit__(None, None, None)

    def _start(self, index: int, slot: Slot, step: Command | Call) -> None:
        if isinstance(step, Call):
            if index not in self.workers:
                self.workers[index] = step.worker()
            self.workers[index].ask(step.request, step.limit_s)
            slot.process = self.workers[index]
            return
        environment = child_environment(index, self.num_slots, self.devices, step.launch)
        words, log = step.arguments, slot.job.log_path
        slot.process = start(step.launch, words, log, environment, slot.lock, step.module)

    def _go_on(self, index: int, slot: Slot, after: Callable[[], object]) -> None:
        process = slot.process
        answer = process if process is None or isinstance(process, Worker) else process.returncode
        try:
            self._start(index, slot, slot.work.send(answer))
            return
        except StopIteration as done:
            self._finish(index, slot, done.value)
            after()
        except (ChildError, OSError, KeyError, ValueError, subprocess.SubprocessError) as error:
            self.slots[index] = None
            again = not isinstance(error, ChildError) or error.again
            if again and self.tries[slot.job.name] < self.attempts:
                self.say(f"{slot.title}: failed: {error}; retried after the others")
                self.waiting.append((slot.title, slot.job))
            else:
                self.say(f"{slot.title}: failed: {error}")
                self.outcome.failed[slot.job.label] = str(error)
        slot.claim.__exit__(None, None, None)

    def _finish(self, index: int, slot: Slot, told: str) -> None:
        if told:
            self.say(f"{slot.title}: {told}")
        self.outcome.finished.append(slot.job)
        self.outcome.ran += 1
        whole = None if slot.first else time.monotonic() - slot.begin
        self.pace.learn(slot.job, whole)
        self.slots[index] = None
        self._tell("" if told else slot.job.label)
        if slot.job.is_done():  # checked before the lock is taken again
            slot.job.lock_path.unlink(missing_ok=True)
