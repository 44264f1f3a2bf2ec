"""Work in several processes of one machine that see what torchrun would tell them.

The processes are forked, so what the parent has imported need not be imported again.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

FAILED = 70  # exit status of work that raised


class RanksError(RuntimeError):
    """A process failed or did not end in time."""


def run_in_ranks(
    work: Callable[[], int],
    count: int = 1,
    timeout: float = 600.0,
    log: Path | None = None,
    threads: int = 1,
) -> None:
    """Run `work` in `count` forked processes, which may form a process group.

    Args:
        work: returns an exit status.
        count: number of processes. One gets no variables of a distributed run.
        timeout: seconds after which they are killed.
        threads: threads of PyTorch in each process.
        log: file that gets what they print; its end is part of the error. None: the terminal.

    Raises:
        RanksError: an exit status is not 0, or the time is over.
    """
    port = free_port()

    def prepared() -> int:
        torch.set_num_threads(threads)
        return work()

    processes = [_fork(prepared, rank_variables(rank, count, port), log) for rank in range(count)]
    end = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in late:
        processes[rank].kill()
        processes[rank].join()
    if late:
        raise RanksError(
            f"ranks {late} did not end within {timeout:.0f} s and were killed{_end_of(log)}"
        )
    codes = [process.exitcode for process in processes]
    if any(codes):
        raise RanksError(f"exit statuses of the ranks: {codes}{_end_of(log)}")


def _end_of(log: Path | None) -> str:
    if log is None or not log.is_file():
        return ""
    return "; they printed\n" + "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def free_port() -> int:
    """Return a TCP port of this machine that was free a moment ago."""
    with socket.socket() as candidate:
        candidate.bind(("127.0.0.1", 0))
        return int(candidate.getsockname()[1])


def rank_variables(rank: int, count: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for one rank of a single node; none for one rank."""
    if count == 1:
        return {}
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "TORCHELASTIC_RUN_ID": "local",
    }


def _fork(work: Callable[[], int], variables: dict[str, str], log: Path | None) -> BaseProcess:
    def target() -> None:
        os.environ.update(variables)
        if log is not None:
            sys.stdout = sys.stderr = log.open("a")
            os.dup2(sys.stdout.fileno(), 1)
            os.dup2(sys.stdout.fileno(), 2)
        status = FAILED
        try:
            status = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    process = multiprocessing.get_context("fork").Process(target=target)
    process.start()
    return process
