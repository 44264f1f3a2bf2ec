"""Starts processes: the steps of jobs, and shards of a whole command through submitit."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_probattn.base.errors import ConfigError
from lit_probattn.base.processes import start as start_child

# What torchrun, SLURM and submitit tell their own processes; a cell's command has its own ranks.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
_SCHEDULER = ("SLURM_", "SUBMITIT_")
# Seconds that a preempted shard has to save its cells.
_SAVING_SECONDS = 75.0
# Parameters that submitit knows for every executor; others are SLURM's own.
_SHARED = ("name", "timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node")
_DEFAULTS = {"name": "lit_probattn", "timeout_min": 1440, "stderr_to_stdout": True}
_MOST_TIMEOUTS = 100


def child_environment(
    slot: int, jobs: int, devices: Sequence[str], launch: Sequence[str] = ()
) -> dict[str, str]:
    """Return the environment of a command: one GPU of `devices`, a share of the cores, no ranks.

    Args:
        slot: number of the job, below `jobs`.
        jobs: commands at a time.
        devices: CUDA devices that they share in turn; empty leaves them as they are.
        launch: words that start the command; they may need what the scheduler says.
    """
    dropped = _TORCHRUN if launch else (*_TORCHRUN, *_SCHEDULER)
    found = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    if devices:
        found["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    if jobs > 1:
        found.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    return found


def start(
    launch: Sequence[str],
    arguments: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    lock: int,
    module: str = "lit_probattn",
) -> subprocess.Popen[bytes]:
    """Start a command; it ends with this process, even if that is killed.

    Ctrl-C reaches this process only, which asks its commands to save.

    Args:
        launch: words in place of `python`; empty for this Python.
        arguments: the command line after the program's name.
        log: file that the output is appended to.
        environment: of the command.
        lock: handle that the command inherits and so keeps locked.
        module: the program.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as out:
        out.write(f"$ {shlex.join(['python', '-m', module, *arguments])}\n")
        out.flush()
        return start_child(
            [*(launch or [sys.executable]), "-m", module, *arguments],
            lock,
            session=True,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
        )


# ---- through submitit --------------------------------------------------------------------------


@dataclass
class Shard:
    """A shard of a command, as submitit pickles it: runs it, and asks for another start.

    Args:
        module: the command's module.
        arguments: its arguments, the shard included.
    """

    module: str
    arguments: Sequence[str]

    def __call__(self) -> int:
        """Return the exit status of the command."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SUBMITIT_")}
        self.process = start_child(
            [sys.executable, "-m", self.module, *self.arguments], env=environment
        )
        # Not `wait`: it holds a lock that `checkpoint`, in a signal handler, would wait for.
        while self.process.poll() is None:
            time.sleep(0.2)
        return self.process.returncode

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "arguments": list(self.arguments)}

    def checkpoint(self) -> Any:
        """Have the cells saved; return the submission that goes on, for preempted jobs."""
        from submitit.helpers import DelayedSubmission

        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(_SAVING_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
        return DelayedSubmission(self)


def submit(
    module: str,
    arguments: Sequence[str],
    *,
    executor: str,
    count: int,
    folder: Path,
    parameters: Mapping[str, Any],
    say: Callable[[str], None] = lambda line: print(line, flush=True),
) -> list[int]:
    """Submit a command as an array of shards and wait for them.

    Args:
        module: the command's module.
        arguments: its arguments, without executor and shard.
        executor: `slurm`, `local` (processes of this machine) or `debug` (this process).
        count: number of shards.
        folder: submitit's files: pickles and logs.
        parameters: submitit's; names that it does not share are SLURM's, such as `partition`.
        say: receives a line for everything that happens.

    Returns:
        Exit status of every shard; 1 for one that was lost.

    Raises:
        ConfigError: submitit is not installed, or refuses a parameter.
    """
    try:
        import submitit
        from submitit.core.utils import UncompletedJobError
    except ImportError as error:
        raise ConfigError('--executor needs submitit: pip install "lit-probattn[slurm]"') from error
    given = {k if k in _SHARED else f"slurm_{k}": v for k, v in parameters.items()}
    try:
        runner = submitit.AutoExecutor(
            folder=folder / "%j", cluster=executor, slurm_max_num_timeout=_MOST_TIMEOUTS
        )
        runner.update_parameters(**{**_DEFAULTS, **given})
    except (NameError, AssertionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"--slurm: {str(error).splitlines()[0]}") from error
    with runner.batch():
        jobs = [
            runner.submit(Shard(module, [*arguments, "--shard", f"{index}/{count}"]))
            for index in range(count)
        ]
    for index, job in enumerate(jobs):
        say(f"shard {index}/{count}: {executor} job {job.job_id}; log {job.paths.stdout}")
    found = []
    for index, job in enumerate(jobs):
        try:
            found.append(int(job.result()))
        except UncompletedJobError as error:
            say(f"shard {index}/{count}: lost: {str(error).splitlines()[0]}")
            found.append(1)
    return found
