"""The process that measures memory and time of points, and its requests."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from lit_probattn.base.processes import Worker, answer_requests
from lit_probattn.base.provenance import git_revision
from profiling.measure.rows import ProfileRow
from profiling.sweep.plan import Point

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

MODULE = "profiling.sweep.worker"
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")


def make_worker(memory_limit_bytes: int | None, command: str) -> Worker:
    """Return a worker that measures points.

    Args:
        memory_limit_bytes: limit of its host allocations, if the system supports limits; None
            means no limit.
        command: the command line to record in rows.
    """
    environment = {"PROFILING_COMMAND": command, "PROFILING_REVISION": git_revision()}
    return Worker(MODULE, [str(memory_limit_bytes or 0)], environment)


def request_of(point: Point, predicted: tuple[int, int] | None = None) -> dict[str, Any]:
    """Return the request for a point; `predicted` is its memory, if known."""
    return {"point": dataclasses.asdict(point), "predicted": predicted}


def rows_of(worker: Worker) -> list[ProfileRow]:
    """Return the rows of a worker's answer.

    Raises:
        ChildError: the worker died or exceeded its time limit.
    """
    return [ProfileRow.model_validate(row) for row in worker.answer()]


def out_of_memory(rows: Sequence[ProfileRow]) -> bool:
    """Return whether memory ran out, so that the worker's memory would distort the next point."""
    reason = (rows[0].reason or "").lower()
    return rows[0].status == "failed" and any(text in reason for text in _OUT_OF_MEMORY)


def run_worker(handle: int, limit: int) -> None:
    """Measure points until standard input closes."""
    from profiling.sweep.points import measure_point

    if limit and resource is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    def answer(request: dict[str, Any]) -> list[dict[str, Any]]:
        predicted = request["predicted"]
        rows = measure_point(
            Point(**request["point"]), None if predicted is None else tuple(predicted)
        )
        return [row.model_dump() for row in rows]

    answer_requests(handle, answer)


if __name__ == "__main__":
    run_worker(int(sys.argv[1]), int(sys.argv[2]))
