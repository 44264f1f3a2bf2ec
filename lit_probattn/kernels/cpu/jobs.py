"""Calls of the C library in as many threads as torch uses; they release the interpreter lock."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch


@lru_cache(maxsize=4)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="lit_probattn-tiles")


def run_jobs(call: Callable[[int], int | None], jobs: range, alone: bool = False) -> None:
    """Call for every job, in as many threads as torch uses, or sequentially with `alone`.

    Raises:
        MemoryError: a job returned something other than 0 or None.
    """
    threads = torch.get_num_threads()
    if alone or threads == 1 or len(jobs) == 1:
        failed = [call(n) for n in jobs]
    else:
        failed = list(_pool(threads).map(call, jobs))
    if any(failed):
        raise MemoryError("the CPU library could not allocate its tiles")
