"""Pre-emption: SIGTERM, Ctrl-C and SLURM's SIGUSR1 save the run and stop it; SLURM requeues it.

A handler only sets a flag. The ranks agree on it together with the finite-loss check of the next
optimiser step (or after the next batch of a validation), so that all of them save the same step and
no rank is blocked in a collective call. `RunCheckpoint` then saves and raises `Preempted`.

Lightning's handlers are replaced: they call collectives from inside a signal handler, store SLURM's
checkpoint outside the run folder, and exchange a number between ranks, which synchronises the
device, before every batch.
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
    """The run received a stop signal and stopped after saving a checkpoint.

    Not an Exception: it is not an error, and must not be caught by accident.

    `number` is the signal that any rank received.
    """

    def __init__(self, number: int, step: int, checkpoint: Path) -> None:
        self.number, self.step, self.checkpoint = number, step, checkpoint
        super().__init__(
            f"stopped by {signal.Signals(self.number).name} after step {step}; saved {checkpoint}; "
            "rerun the same command with --ckpt_path last to resume"
        )

    @property
    def status(self) -> int:
        """Exit status of the process: 128 + signal, as in shells."""
        return 128 + int(self.number)


class StopSignals(Callback):
    """Handles SIGTERM, SIGINT and SIGUSR1 during training, and sets a flag of the task.

    A second SIGINT kills the process immediately. Loader processes, which also receive Ctrl-C,
    ignore it.

    `restore` must be called to remove the handlers.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._task: Any = None
        self._process = os.getpid()

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install the handlers before loader processes start, which inherit them."""
        self._task, self._process = pl_module, os.getpid()
        self._install()

    def on_sanity_check_start(self, *_: Any) -> None:
        """Reinstall the handlers, which Lightning has replaced."""
        self._install()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reinstall the handlers; disable Lightning's exchange after every batch."""
        self._install()
        leave_out_sigterm_question(trainer)

    def _install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is signal.SIG_IGN:  # a shell's background job
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
        """Restore the previous handlers."""
        for number, before in self._before.items():
            if before is not None:
                signal.signal(number, before)
        self._before.clear()


def requeue() -> str:
    """Requeue this SLURM job; return a line for the user, empty outside SLURM."""
    job = slurm_job()
    if job is None:
        return ""
    command = ["scontrol", "requeue", job]
    if shutil.which(command[0]) is None:
        return f"cannot requeue job {job}: scontrol is not on the PATH; resubmit it manually"
    done = capture(command)
    if done.returncode:
        reason = " ".join(done.stderr.split())
        return f"cannot requeue job {job}: {reason}; resubmit it manually"
    return f"requeued job {job}"


def slurm_job() -> str | None:
    """Return the name of this SLURM job, `<array>_<task>` for one of an array; None outside."""
    array, task = (os.environ.get(f"SLURM_ARRAY_{part}_ID") for part in ("JOB", "TASK"))
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")


def job_name() -> str | None:
    """Return the job's identity that is constant when a cluster restarts the command, or None."""
    slurm = slurm_job()
    if slurm is not None:
        return f"slurm {slurm}"
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if run in (None, "none") else f"torchrun {run}"


def is_restart() -> bool:
    """Whether torchrun or SLURM has restarted this command, according to this process."""
    counts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return any(int(os.environ.get(name) or 0) > 0 for name in counts)


def agree_on_restart() -> None:
    """Mark a restart on every rank if any rank detects one: a new node counts from 0."""
    if any(gather_objects(is_restart())) and not is_restart():
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
