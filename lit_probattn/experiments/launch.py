"""Start processes: the steps of jobs, and shards of a command by submitit."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_probattn.base.errors import ConfigError
from lit_probattn.base.processes import start as start_child

# Variables that torchrun, SLURM and submitit set; the command of a run has separate ranks.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
_SCHEDULER = ("SLURM_", "SUBMITIT_")
# Seconds available to a preempted shard for saving its runs.
_SAVING_SECONDS = 75.0
# Parameters that submitit supports for every executor; others are specific to SLURM.
_SHARED = ("name", "timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node")
_DEFAULTS = {"name": "lit_probattn", "timeout_min": 1440, "stderr_to_stdout": True}
_MOST_TIMEOUTS = 100


def child_environment(
    slot: int, jobs: int, devices: Sequence[str], launch: Sequence[str] = ()
) -> dict[str, str]:
    """Return the environment of a command: one GPU of `devices`, a part of the cores, no ranks.

    Args:
        slot: index of the job, below `jobs`.
        jobs: number of concurrent commands.
        devices: CUDA devices to distribute them over; empty means unchanged.
        launch: launcher of the command, which may need the scheduler's variables.
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
    """Start a command that ends with this process, even if this process is killed.

    Ctrl-C reaches only this process, which requests its commands to save.

    Args:
        launch: launcher instead of `python`; empty means this Python.
        arguments: command line after the module.
        log: file to which the output is appended.
        environment: environment of the command.
        lock: handle of a lock that the command inherits and keeps.
        module: module to run.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as out:
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


# ---- submitit ----------------------------------------------------------------------------------


@dataclass
class Shard:
    """A shard of a command, pickled by submitit: runs it and requests resubmission.

    Args:
        module: the command's module.
        arguments: its arguments, including the shard.
    """

    module: str
    arguments: Sequence[str]

    def __call__(self) -> int:
        """Return the exit status of the command."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SUBMITIT_")}
        self.process = start_child(
            [sys.executable, "-m", self.module, *self.arguments], env=environment
        )
        # Not `wait`, which holds a lock that `checkpoint` in a signal handler would wait for.
        while self.process.poll() is None:
            time.sleep(0.2)
        return self.process.returncode

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module, "arguments": list(self.arguments)}

    def checkpoint(self) -> Any:
        """Save the runs of a preempted job; return the submission that resumes it."""
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
) -> list[int]:
    """Submit a command as an array of shards and wait for them to finish.

    Args:
        module: the command's module.
        arguments: its arguments, without executor and shard.
        executor: `slurm`, `local` (processes on this machine) or `debug` (this process).
        count: number of shards.
        folder: folder for submitit's pickles and logs.
        parameters: parameters of submitit or of SLURM, such as `partition`.

    Returns:
        Exit status of every shard; 1 for a lost one.

    Raises:
        ConfigError: submitit is not installed, or rejects a parameter.
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
        about = f"{executor} job {job.job_id}; log {job.paths.stdout}"
        print(f"shard {index}/{count}: {about}", flush=True)
    found = []
    for index, job in enumerate(jobs):
        try:
            found.append(int(job.result()))
        except UncompletedJobError as error:
            reason = str(error).splitlines()[0]
            print(f"shard {index}/{count}: lost: {reason}", flush=True)
            found.append(1)
    return found
