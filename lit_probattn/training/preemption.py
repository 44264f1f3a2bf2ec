"""Pre-emption: SIGTERM, Ctrl-C and SLURM's SIGUSR1 save the run and end it; SLURM queues it again.

A handler only sets a flag. The ranks agree on it together with the finite-loss check of the next
optimiser step (or after the next batch of a validation), so that all of them save the same step and
none is left waiting in a collective call. `RunCheckpoint` then saves and raises `Preempted`.

Lightning's own handlers are replaced: they call collectives from inside a signal handler, keep
SLURM's checkpoint in a place of its own instead of the run folder, and have the ranks exchange a
number, which waits for the device, before every batch.
"""

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lit_probattn.base.processes import capture
from lit_probattn.tasks.distributed import STOP_SIGNALS, gather_objects
from lit_probattn.training.lightning_internals import leave_out_sigterm_question


class Preempted(BaseException):
    """The run was asked to end and did so after a checkpoint.

    Not an Exception: nothing went wrong, and nothing should catch it by accident.

    `number` is the signal that this or another rank received.
    """

    def __init__(self, number: int, step: int, checkpoint: Path) -> None:
        self.number, self.step, self.checkpoint = number, step, checkpoint
        super().__init__(
            f"stopped by {signal.Signals(self.number).name} after step {step}; saved {checkpoint}; "
            "the same command with --ckpt_path last goes on from there"
        )

    @property
    def status(self) -> int:
        """Exit status of the process: 128 + signal, as shells count."""
        return 128 + int(self.number)


class StopSignals(Callback):
    """Takes SIGTERM, SIGINT and SIGUSR1 while a run trains, and notes them on the task.

    A second SIGINT ends the process at once. Processes of the loader, which Ctrl-C reaches too,
    leave it to the one that trains.

    Must be removed again with `restore`.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._task: Any = None
        self._process = os.getpid()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install the handlers, before loader processes are started, which inherit them."""
        self._task, self._process = pl_module, os.getpid()
        self._install()

    def on_sanity_check_start(self, *_: Any) -> None:
        """Install them again: Lightning has put its own in their place."""
        self._install()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install them again; leave out Lightning's question after every batch, which is ours."""
        self._install()
        leave_out_sigterm_question(trainer)

    def _install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is signal.SIG_IGN:  # a shell's background job: leave it so
                continue
            self._before.setdefault(number, signal.signal(number, self._note))

    def _note(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT:
            if os.getpid() != self._process:
                return
            if self._task.stop_requested == number:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
        if not self._task.stop_requested:
            text = f"{signal.Signals(number).name}: saving at the next optimiser step\n"
            os.write(2, text.encode())
        self._task.stop_requested = number

    def restore(self) -> None:
        """Put back the handlers that were there before."""
        for number, before in self._before.items():
            if before is not None:
                signal.signal(number, before)
        self._before.clear()


def requeue() -> str:
    """Ask SLURM to start this job again; return a line for the user, empty outside SLURM."""
    job = slurm_job()
    if job is None:
        return ""
    command = ["scontrol", "requeue", job]
    if shutil.which(command[0]) is None:
        return f"cannot requeue job {job}: scontrol is not on the PATH; submit it again by hand"
    done = capture(command)
    if done.returncode:
        told = " ".join(done.stderr.split())
        return f"cannot requeue job {job}: {told}; submit it again by hand"
    return f"requeued job {job}"


def slurm_job() -> str | None:
    """Return the name of this SLURM job, `<array>_<task>` for one of an array; None outside."""
    array, task = (os.environ.get(f"SLURM_ARRAY_{part}_ID") for part in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def job_name() -> str | None:
    """Return what stays the same when a cluster starts this command again, if anything does."""
    slurm = slurm_job()
    if slurm is not None:
        return f"slurm {slurm}"
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if run in (None, "none") else f"torchrun {run}"


def is_restart() -> bool:
    """Whether torchrun or SLURM has started this command before, as far as this process knows."""
    counts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return any(int(os.environ.get(name) or 0) > 0 for name in counts)


def agree_on_restart() -> None:
    """Tell every rank that this is a restart if one rank knows: a new node counts from 0."""
    if any(gather_objects(is_restart())) and not is_restart():
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
