"""Tasks in several processes: errors stay with their task, and a lost GPU with its process."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from profiling.measure import tasks
from profiling.measure.tasks import Outcome, in_processes

LOST = "CUDA error: an illegal memory access was encountered"


def work(task):
    if task.startswith("!"):
        raise RuntimeError(f"{task[1:]}\nmore")
    return task.upper()


@pytest.fixture
def pools(monkeypatch):
    """Run a pool's tasks in this process, as in a single worker; returns the pools' tasks."""
    made = []

    class Pool:
        def __init__(self, workers, mp_context, initializer):
            self.tasks = []
            made.append(self.tasks)
            monkeypatch.setattr(tasks, "_lost", "")

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def submit(self, function, *args):
            self.tasks.append(args[-1])
            done = Future()
            done.set_result(function(*args))
            return done

    monkeypatch.setattr(tasks, "ProcessPoolExecutor", Pool)
    return made


def test_tasks_after_a_lost_gpu_run_in_another_process(pools):
    given = ["a", f"!{LOST}", "b", "!no such size", "c"]
    found = {outcome.task: outcome for outcome in in_processes(work, given, 2)}
    assert list(found) == list(dict.fromkeys(found)), "every task has one outcome"
    assert sorted(found) == sorted(given)
    assert {task: found[task].result for task in "abc"} == {"a": "A", "b": "B", "c": "C"}
    assert found[given[1]].problem == f"RuntimeError: {LOST}"
    assert found[given[3]].problem == "RuntimeError: no such size"
    assert pools == [given, ["b", "!no such size", "c"]]


@pytest.mark.parametrize(("given", "jobs"), [(["a", "!x"], 1), (["a"], 4)])
def test_one_job_or_one_task_needs_no_process(pools, given, jobs):
    found = list(in_processes(work, given, jobs))
    assert found[0] == Outcome("a", "A")
    assert [outcome.problem for outcome in found[1:]] == ["RuntimeError: x"] * (len(given) - 1)
    assert pools == []


@pytest.mark.parametrize(
    ("cores", "gib", "jobs"), [(4, 80, 4), (64, 140, 16), (16, 11, 2), (8, 1, 1)]
)
def test_processes_fit_on_the_gpu(monkeypatch, cores, gib, jobs):
    monkeypatch.setattr(tasks.os, "cpu_count", lambda: cores)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (gib << 30, gib << 30))
    assert tasks.default_jobs("cuda") == jobs
    assert tasks.default_jobs("cpu") == 1


def test_processes_return_results():
    """Two real processes, which import this module."""
    assert {x.result for x in in_processes(work, ["a", "b", "c"], 2)} == {"A", "B", "C"}
