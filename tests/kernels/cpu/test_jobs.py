"""Jobs of the C library run once each, in threads of OpenMP or of a pool; errors are raised."""

from __future__ import annotations

import threading

import pytest
import torch

from lit_probattn.kernels.cpu import jobs


@pytest.fixture(params=["OpenMP", "a pool"])
def two_threads(request, monkeypatch):
    if request.param == "a pool":
        monkeypatch.setattr(jobs, "_parallel", lambda: None)
    elif jobs._parallel() is None:
        pytest.skip("torch does not use OpenMP here")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_every_job_runs_once_in_two_threads(two_threads):
    both, seen = threading.Barrier(2, timeout=60), []

    def call(n):
        if n < 2:
            both.wait()  # passes only if two threads are in it
        seen.append(n)

    jobs.run_jobs(call, range(9))
    assert sorted(seen) == list(range(9))


def test_a_job_that_fails_is_a_memory_error(two_threads):
    with pytest.raises(MemoryError):
        jobs.run_jobs(lambda n: int(n == 3), range(5))


def test_the_error_of_a_job_is_raised(two_threads):
    with pytest.raises(KeyboardInterrupt):
        jobs.run_jobs(exit_of, range(5))


def exit_of(n):
    if n == 2:
        raise KeyboardInterrupt
