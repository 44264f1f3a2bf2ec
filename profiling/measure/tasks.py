"""Tasks in several processes of one GPU: kernels compile at the same time, errors stay apart."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch

from lit_probattn.measure.timing import lost_gpu

Task = TypeVar("Task")
_BYTES_PER_PROCESS = 4 << 30  # of GPU memory: a context and the tensors of a comparison


@dataclass(frozen=True)
class Outcome(Generic[Task]):
    """Result of a task, or the first line of its error."""

    task: Task
    result: Any = None
    problem: str = ""


def default_jobs(device: str) -> int:
    """Return the number of processes that compile: one per core and 4 GiB of the GPU, at most 16.

    Without a GPU it is 1, because the calls themselves take all cores.
    """
    if device != "cuda":
        return 1
    fitting = torch.cuda.mem_get_info()[0] // _BYTES_PER_PROCESS
    return max(1, min(16, os.cpu_count() or 1, fitting))


def in_processes(
    function: Callable[[Task], Any], tasks: Sequence[Task], jobs: int
) -> Iterator[Outcome[Task]]:
    """Yield the outcome of each task as it ends.

    A process that dies, or whose GPU an illegal access made unusable, takes no task but its own
    with it: a new one replaces it. With one job, or one task, everything runs in this process.
    """
    if min(jobs, len(tasks)) < 2:
        for task in tasks:
            yield _outcome(function, task)
        return
    count = min(jobs, len(tasks))
    free: SimpleQueue[_Worker] = SimpleQueue()
    workers = [_Worker() for _ in range(count)]
    for worker in workers:
        free.put(worker)

    def run(task: Task) -> Outcome[Task]:
        worker = free.get()
        try:
            return worker.run(function, task)
        finally:
            free.put(worker)

    threads = ThreadPoolExecutor(count)
    try:
        for future in as_completed([threads.submit(run, task) for task in tasks]):
            yield future.result()
    finally:
        threads.shutdown(cancel_futures=True)
        for worker in workers:
            worker.stop()


class _Worker:
    """One process that runs tasks one after another, and is replaced when it breaks."""

    def __init__(self) -> None:
        self._process: ProcessPoolExecutor | None = None

    def run(self, function: Callable[[Task], Any], task: Task) -> Outcome[Task]:
        if self._process is None:
            spawn = get_context("spawn")
            self._process = ProcessPoolExecutor(1, mp_context=spawn, initializer=_one_thread)
        try:
            outcome: Outcome[Task] = self._process.submit(_outcome, function, task).result()
        except BrokenProcessPool:
            outcome = Outcome(task, problem="its process died: no memory, or a crashing compiler")
            self.stop()
        if lost_gpu(outcome.problem):
            self.stop()
        return outcome

    def stop(self) -> None:
        if self._process is not None:
            self._process.shutdown()
            self._process = None


def _one_thread() -> None:
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def _outcome(function: Callable[[Task], Any], task: Task) -> Outcome[Task]:
    try:
        return Outcome(task, function(task))
    except Exception as error:  # compilers raise any kind of exception
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        return Outcome(task, problem=said[:200])
