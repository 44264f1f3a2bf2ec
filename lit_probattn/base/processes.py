"""Processes that generate data."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["job_of_worker", "num_useful", "workers"]


def num_useful(given: int | None, most: int) -> int:
    """Return how many processes to start: as many as given, or one per CPU up to `most`."""
    if given is not None:
        return given
    available = getattr(os, "sched_getaffinity", None)
    return min(len(available(0)) if available else os.cpu_count() or 1, most)


@contextmanager
def workers(module: str, count: int, *job: Any) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Run `serve` of a module in `count` processes, each of which writes to a pipe; kill them last.

    Args:
        job: What `job_of_worker` returns there, after rank and count; plain JSON values.
    """
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-c", f"from {module} import serve; serve()"]
    started = [
        subprocess.Popen(
            [*command, json.dumps([rank, count, *job])],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        for rank in range(count)
    ]
    try:
        yield started
    finally:
        for worker in started:
            worker.kill()
        for worker in started:
            worker.communicate()


def job_of_worker() -> list[Any]:
    """Return rank, count and job in a process that `workers` started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides when to stop
    job: list[Any] = json.loads(sys.argv[1])
    return job
