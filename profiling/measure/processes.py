"""Run work in several processes of one machine, with the variables that torchrun sets.

The processes are forked, so modules imported by the parent are not imported again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from lit_probattn.base.errors import ChildError
from lit_probattn.base.processes import finish, fork_context


def run_in_ranks(
    work: Callable[[], int], count: int = 1, timeout: float = 600.0, log: Path | None = None
) -> None:
    """Run `work` in `count` forked processes of one thread, which may form a process group.

    Args:
        count: number of processes. A single one gets no variables of a distributed run.
        log: file for their output, whose end is part of the error. None means the terminal.

    Raises:
        ChildError: an exit status is not 0, or the time limit is exceeded.
    """
    port = find_free_network_port()
    processes = [_fork(work, rank_variables(rank, count, port), log) for rank in range(count)]
    end = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in late:
        processes[rank].kill()
        processes[rank].join()
    printed = ""
    if log is not None and log.is_file():
        lines = log.read_text(errors="replace").splitlines()[-20:]
        printed = "; they printed\n" + "\n".join(lines)
    if late:
        raise ChildError(
            f"ranks {late} did not finish within {timeout:.0f} s and were killed{printed}"
        )
    codes = [process.exitcode for process in processes]
    if any(codes):
        raise ChildError(f"exit statuses of the ranks: {codes}{printed}")


def rank_variables(rank: int, count: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank on one node; empty for a single rank."""
    if count == 1:
        return {}
    world = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_RANK": "0"}
    return {**place, **world, **ranks, "TORCHELASTIC_RUN_ID": "local"}


def _fork(work: Callable[[], int], variables: dict[str, str], log: Path | None) -> BaseProcess:
    def target() -> None:
        os.environ.update(variables)
        torch.set_num_threads(1)
        finish(work, log)

    process: BaseProcess = fork_context().Process(target=target)
    process.start()
    return process
