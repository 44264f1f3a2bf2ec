"""Tasks in several processes: errors stay with their task, and a lost GPU with its process."""

from __future__ import annotations

import os
import signal
from multiprocessing import get_context

import pytest

from profiling.measure import tasks
from profiling.measure.tasks import Outcome, in_processes

LOST = "CUDA error: an illegal memory access was encountered"


def work(task):
    if task.startswith("!"):
        raise RuntimeError(f"{task[1:]}\nmore")
    return task.upper()


def number(task):
    """Return the process's number, unless it dies or loses its GPU."""
    if task == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "lose":
        raise RuntimeError(LOST)
    return os.getpid()


def test_a_process_that_dies_or_loses_its_gpu_takes_one_task_with_it(monkeypatch):
    asked = []

    def forked(method):  # starts at once
        asked.append(method)
        return get_context("fork")

    monkeypatch.setattr(tasks, "get_context", forked)
    given = [("a", "die", "b", "lose", "c", "d")[i % 6] + " " * (i // 6) for i in range(12)]
    found = {outcome.task: outcome for outcome in in_processes(stripped, given, 2)}
    assert sorted(found) == sorted(given), "every task has one outcome"
    bad = {task for task, outcome in found.items() if outcome.problem}
    assert {task.strip() for task in bad} == {"die", "lose"}
    assert len(bad) == 4
    assert found["lose"].problem == f"RuntimeError: {LOST}"
    used = {outcome.result for outcome in found.values() if not outcome.problem}
    assert os.getpid() not in used
    assert len(used) >= 2
    assert {*asked} == {"spawn"}, "a forked process could not use the GPU"


def stripped(task):
    return number(task.strip())


@pytest.mark.parametrize(("given", "jobs"), [(["a", "!x"], 1), (["a"], 4)])
def test_one_job_or_one_task_needs_no_process(monkeypatch, given, jobs):
    monkeypatch.delattr(tasks, "ProcessPoolExecutor")
    found = list(in_processes(work, given, jobs))
    assert found[0] == Outcome("a", "A")
    assert [outcome.problem for outcome in found[1:]] == ["RuntimeError: x"] * (len(given) - 1)


@pytest.mark.parametrize(
    ("cores", "gib", "jobs"), [(4, 80, 4), (64, 140, 16), (16, 11, 2), (8, 1, 1)]
)
def test_processes_fit_on_the_gpu(monkeypatch, cores, gib, jobs):
    monkeypatch.setattr(tasks.os, "cpu_count", lambda: cores)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (gib << 30, gib << 30))
    assert tasks.default_jobs("cuda") == jobs
    assert tasks.default_jobs("cpu") == 1


@pytest.mark.slow
def test_processes_return_results():
    """Two real processes, which import this module; the test above forks them."""
    assert {x.result for x in in_processes(work, ["a", "b", "c"], 2)} == {"A", "B", "C"}
