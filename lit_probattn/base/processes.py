"""Child processes that end with this process."""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

from lit_probattn.base.errors import ChildError, ConfigError

RAISED = 70  # exit status of a forked process whose work raised
_DEATH_SIGNAL, _SIGKILL = 1, 9  # PR_SET_PDEATHSIG of prctl
Item = TypeVar("Item")
Result = TypeVar("Result")


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent exits or is killed (Linux).

    For `preexec_fn`. SIGUSR2, SLURM's warning to submitit's process, is ignored in children.
    """
    if hasattr(signal, "SIGUSR2"):
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, _SIGKILL)


def start(
    words: Sequence[str], *handles: int, session: bool = False, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a command that ends with this process, even if this process is killed.

    Without POSIX it may outlive this process.

    Args:
        words: the command.
        handles: file handles that it inherits.
        session: whether Ctrl-C reaches only this process.
        options: options of `subprocess.Popen`.
    """
    if hasattr(os, "fork"):
        options |= {"pass_fds": handles, "start_new_session": session}
        options["preexec_fn"] = end_with_parent
    return subprocess.Popen(words, **options)


def capture(words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command; return its exit status and output as text."""
    return subprocess.run(words, capture_output=True, text=True, check=False, **options)


def with_our_code() -> dict[str, str]:
    """Return this environment with the import path of the running packages."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def fork_context() -> Any:
    """Return the fork context of `multiprocessing`.

    Raises:
        ConfigError: this system does not support fork.
    """
    if not hasattr(os, "fork"):
        raise ConfigError("this command forks processes, which this system cannot: use Linux")
    return multiprocessing.get_context("fork")


def finish(work: Callable[[], int], log: Path | None = None) -> NoReturn:
    """Run the work of a forked process, which ends without the clean-up of its parent.

    The exit status is what the work returns, or `RAISED` after an exception, whose traceback is
    printed.

    Args:
        work: the work.
        log: file to which the process's output is appended. None keeps the parent's output.
    """
    status = RAISED
    try:
        if log is not None:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)  # in the order of writing
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def num_useful(given: int | None, most: int) -> int:
    """Return the number of processes to start: `given`, or one per CPU up to `most`.

    Raises:
        ConfigError: more than one, and this system does not support fork.
    """
    if not hasattr(os, "fork"):
        if (given or 1) > 1:
            raise ConfigError(
                f"num_processes {given} requires fork, which this system does not support: set it "
                "to 1"
            )
        return 1
    if given is not None:
        return given
    available = getattr(os, "sched_getaffinity", None)
    return min(len(available(0)) if available else os.cpu_count() or 1, most)


def map_in_processes(
    function: Callable[[Item], Result], items: Iterable[Item], count: int
) -> Generator[Result, None, None]:
    """Yield the result of each item in order, computed by forked processes that end with this one.

    Items may be infinite: few are computed ahead. Closing the generator ends the processes. With
    one process everything runs in this one.

    Args:
        function: function of a module.
        items: its arguments, which can be pickled like its results.
        count: number of processes.

    Raises:
        ChildError: a process died.
        ConfigError: `count` is above 1, and this system does not support fork.
    """
    if count == 1:
        yield from map(function, items)
        return
    pool = ProcessPoolExecutor(count, fork_context(), _enter_pool)
    ahead: deque[Future[Result]] = deque()
    try:
        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) > 2 * count:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    except BrokenProcessPool:
        raise ChildError("a process died, for example because memory ran out") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _enter_pool() -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop


class Worker:
    """A process that answers requests one at a time; a dead one is restarted at the next request.

    It runs `python -m module HANDLE words…`, which calls `answer_requests(HANDLE, …)`, and is
    reused, because importing libraries takes longer than most requests.

    Args:
        module: module to run.
        words: its arguments after the handle for answers.
        environment: variables in addition to those of this process.
    """

    def __init__(
        self, module: str, words: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        self.module, self.words, self.environment = module, tuple(words), environment or {}
        self.process: subprocess.Popen[bytes] | None = None
        self._replies: IO[bytes] | None = None
        self._line, self._limit_s, self._deadline = b"", math.inf, math.inf
        self._reason = ""

    def ask(self, request: Any, limit_s: float = math.inf) -> None:
        """Send a request, plain JSON; the process is killed if it exceeds the time limit.

        Raises:
            ChildError: this system does not support the worker.
        """
        if self.process is None or self.process.poll() is not None:
            self.close()
            self._start()
        assert self.process is not None
        assert self.process.stdin is not None
        self._line, self._reason = b"", ""
        self._limit_s, self._deadline = limit_s, time.monotonic() + limit_s
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self._died()

    def _start(self) -> None:
        if os.name != "posix":
            raise ChildError("memory and time are measured on POSIX systems only, such as Linux")
        receive, send = os.pipe()
        self.process = start(
            [sys.executable, "-m", self.module, str(send), *self.words],
            send,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**with_our_code(), **self.environment},
        )
        os.close(send)
        self._replies = os.fdopen(receive, "rb")

    def poll(self, seconds: float = 0.0) -> int | None:
        """Wait this long for the answer; return None if it is pending, like `Popen.poll`."""
        while not self._reason and not self._line.endswith(b"\n"):
            assert self._replies is not None
            wait = max(0.0, min(seconds, self._deadline - time.monotonic()))
            if not select.select([self._replies], [], [], wait)[0]:
                if time.monotonic() < self._deadline:
                    return None
                self.close()
                self._reason = f"no result within {self._limit_s:.0f} s; the worker was stopped"
            elif part := os.read(self._replies.fileno(), 1 << 16):
                self._line += part
            else:
                self._died()
        return 0

    def answer(self) -> Any:
        """Wait for the answer and return it.

        Raises:
            ChildError: the process died or exceeded its time limit.
        """
        while self.poll(60.0) is None:
            pass
        if self._reason:
            raise ChildError(self._reason)
        return json.loads(self._line)

    def _died(self) -> None:
        assert self.process is not None
        code = self.process.wait()
        self.close()
        if code == -9:
            why = "was killed (signal 9), as the system does when memory runs out"
        elif code < 0:
            why = f"died by signal {-code} ({signal.Signals(-code).name})"
        else:
            why = f"exited with status {code}"
        self._reason = f"the worker {why}"

    def close(self) -> None:
        """Stop the process, if it is running."""
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()
            self.process.wait()
            if self.process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    self.process.stdin.close()
            self.process = None
        if self._replies is not None:
            self._replies.close()
            self._replies = None


def answer_requests(handle: int, answer: Callable[[Any], Any]) -> None:
    """Answer the requests on standard input until it closes, in a process of `Worker`."""
    # If memory runs out, the kernel should kill this process, not its parent (Linux).
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("900", encoding="ascii")
    with os.fdopen(handle, "wb") as replies:
        for line in sys.stdin.buffer:
            replies.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
            replies.flush()
