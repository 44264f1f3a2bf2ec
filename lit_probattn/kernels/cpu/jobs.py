"""Calls of the C library in the threads of torch; they release the interpreter lock."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import count
from typing import Any

import torch


@lru_cache(maxsize=4)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="lit_probattn-tiles")


_PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@lru_cache(maxsize=1)
def _parallel() -> Any:
    """Return the OpenMP function that runs a callback in all threads of torch, or None.

    After an operation of torch these threads wait actively for some milliseconds; other threads
    would share their processors.
    """
    try:
        found = ctypes.CDLL(None).GOMP_parallel
    except AttributeError:
        return None
    found.argtypes = [_PARALLEL, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    found.restype = None
    return found


def run_jobs(call: Callable[[int], int | None], jobs: range, alone: bool = False) -> None:
    """Call for every job, in as many threads as torch uses, or sequentially with `alone`.

    Raises:
        MemoryError: a job returned something other than 0 or None.
    """
    threads = torch.get_num_threads()
    if alone or threads == 1 or len(jobs) == 1:
        failed = [call(n) for n in jobs]
    elif (parallel := _parallel()) is None:
        failed = list(_pool(threads).map(call, jobs))
    else:
        numbers, errors = count(), list[BaseException]()
        failed = []

        def work(_: int | None) -> None:
            try:
                while not errors and (n := next(numbers)) < len(jobs):
                    failed.append(call(jobs[n]))
            except BaseException as error:  # C cannot pass it on
                errors.append(error)

        parallel(_PARALLEL(work), None, threads, 0)
        if errors:
            raise errors[0]
    if any(failed):
        raise MemoryError("the CPU library could not allocate its tiles")
