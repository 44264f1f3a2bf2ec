"""Tasks in several processes of one GPU: kernels compile at the same time, errors stay apart."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, Generic, TypeVar

import torch

from lit_probattn.measure.timing import lost_gpu

Task = TypeVar("Task")
_BYTES_PER_PROCESS = 4 << 30  # of GPU memory: a context and the tensors of a comparison
_lost = ""  # the error after which this process cannot use its GPU


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
    """Yield the outcome of each task as it ends; a task without its own GPU is run again.

    An illegal access makes a process's GPU unusable: its later tasks go to other processes.
    With one job, or one task, everything runs in this process.
    """
    if min(jobs, len(tasks)) < 2:
        for task in tasks:
            yield _outcome(function, task)
        return
    pending = list(tasks)
    while pending:
        workers, done = min(jobs, len(pending)), []
        spawn = get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_one_thread) as pool:
            for future in as_completed([pool.submit(_guarded, function, x) for x in pending]):
                outcome = future.result()
                if outcome is None:
                    continue
                done.append(outcome.task)
                yield outcome
        pending = [task for task in pending if task not in done]


def _one_thread() -> None:
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def _guarded(function: Callable[[Task], Any], task: Task) -> Outcome[Task] | None:
    """Return the outcome; None if this process has lost its GPU in an earlier task."""
    global _lost
    if _lost:
        return None
    outcome = _outcome(function, task)
    if lost_gpu(outcome.problem):
        _lost = outcome.problem
    return outcome


def _outcome(function: Callable[[Task], Any], task: Task) -> Outcome[Task]:
    try:
        return Outcome(task, function(task))
    except Exception as error:  # compilers raise any kind of exception
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        return Outcome(task, problem=said[:200])
