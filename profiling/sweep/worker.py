"""A subprocess that runs memory and time points, and the handle that the sweep holds on it.

It lives as long as it can: starting Python and libraries for every point would take longer than
most points. When it dies, hangs or runs out of memory, the handle says so and starts another one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from lit_probattn.base.errors import ChildError
from lit_probattn.base.provenance import git_revision
from profiling.measure.rows import ProfileRow
from profiling.sweep.plan import Point

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")


class Worker:
    """Runs points in a subprocess, one at a time.

    Args:
        memory_limit_bytes: what the worker may allocate on the host, where the system can limit
            it; None means no limit.
        command: the command line to record in rows.
    """

    def __init__(self, memory_limit_bytes: int | None, command: str) -> None:
        self.memory_limit_bytes, self.command = memory_limit_bytes, command
        self.process: subprocess.Popen[bytes] | None = None
        self.replies: IO[bytes] | None = None
        self.started = 0

    def _start(self) -> None:
        # Imported here: the worker itself needs no command line.
        from lit_probattn.base.processes import start, with_our_code

        if os.name != "posix":
            raise ChildError("memory and time are measured on POSIX systems only, such as Linux")
        receive, send = os.pipe()
        environment = {**with_our_code(), "PROFILING_COMMAND": self.command}
        environment["PROFILING_REVISION"] = git_revision()
        limit = str(self.memory_limit_bytes or 0)
        self.process = start(
            [sys.executable, "-m", "profiling.sweep.worker", str(send), limit],
            send,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        os.close(send)
        self.replies = os.fdopen(receive, "rb")
        self.started += 1

    def run(
        self, point: Point, timeout_s: float, predicted: tuple[int, int] | None = None
    ) -> list[ProfileRow]:
        """Return the rows of a point; `predicted` is the memory of its place, where it is known.

        Raises:
            ChildError: the worker died or took too long; another one serves the next point.
        """
        if self.process is None or self.process.poll() is not None:
            self.close()
            self._start()
        assert self.process is not None
        assert self.process.stdin is not None
        asked = {"point": dataclasses.asdict(point), "predicted": predicted}
        request = json.dumps(asked).encode() + b"\n"
        try:
            self.process.stdin.write(request)
            self.process.stdin.flush()
        except BrokenPipeError:
            raise ChildError(self._reason()) from None
        line = self._read(timeout_s)
        rows = [ProfileRow.model_validate(row) for row in json.loads(line)]
        reason = (rows[0].reason or "").lower()
        if rows[0].status == "failed" and any(text in reason for text in _OUT_OF_MEMORY):
            self.close()  # what it still holds would distort the next point
        return rows

    def _read(self, timeout_s: float) -> bytes:
        assert self.replies is not None
        deadline = time.monotonic() + timeout_s
        line = b""
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self.replies], [], [], max(0.0, left))
            if not ready:
                self.close()
                raise ChildError(f"no result within {timeout_s:.0f} s; the worker was stopped")
            part = os.read(self.replies.fileno(), 1 << 16)
            if not part:
                raise ChildError(self._reason())
            line += part
        return line

    def _reason(self) -> str:
        assert self.process is not None
        code = self.process.wait()
        self.close()
        if code == -9:
            return "the worker was killed (signal 9), as the system does when memory runs out"
        if code < 0:
            return f"the worker died by signal {-code} ({signal.Signals(-code).name})"
        return f"the worker ended with exit status {code}"

    def close(self) -> None:
        """Stop the worker, if there is one."""
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()
            self.process.wait()
            if self.process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    self.process.stdin.close()
            self.process = None
        if self.replies is not None:
            self.replies.close()
            self.replies = None


def _be_first_to_go() -> None:
    """Tell the kernel to end this process first when memory runs out, not the sweep (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("900", encoding="ascii")


def serve(send: int, limit: int) -> None:
    """Answer requests on standard input until it closes."""
    from profiling.sweep.points import measure_point

    if limit and resource is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with os.fdopen(send, "wb") as replies:
        for line in sys.stdin.buffer:
            request: dict[str, Any] = json.loads(line)
            predicted = request["predicted"]
            rows = measure_point(
                Point(**request["point"]), None if predicted is None else tuple(predicted)
            )
            answer = json.dumps([row.model_dump() for row in rows])
            replies.write(answer.encode() + b"\n")
            replies.flush()


if __name__ == "__main__":
    _be_first_to_go()
    serve(int(sys.argv[1]), int(sys.argv[2]))
