"""Callbacks of every run: checkpoints, the end of a run, step numbers, throughput."""

import time
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint

from lit_probattn.attention import recorded_choices
from lit_probattn.checkpoints import checkpoint_path, list_checkpoints
from lit_probattn.run_record import add_to_last_start


class RunCheckpoint(Checkpoint):
    """Saves every so many optimiser steps, at the end, and at the best validation.

    Where a validation follows directly on the step, the checkpoint is written after it. A run that
    is killed in between therefore repeats the validation: nothing is skipped or counted twice.

    Args:
        folder: where checkpoints go. May be set later; nothing is saved while it is None.
        every_n_steps: optimiser steps between checkpoints. None: after every validation.
        keep: number of step checkpoints kept, at least 2: the newest may be a damaged one.
        monitor: metric that decides on the best checkpoint.
        mode: whether larger (`max`) or smaller (`min`) is better.

    Raises:
        ValueError: `keep` is below 2 or `every_n_steps` below 1.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        every_n_steps: int | None = None,
        keep: int = 2,
        monitor: str = "val/accuracy",
        mode: Literal["max", "min"] = "max",
    ) -> None:
        if keep < 2:
            raise ValueError(f"at least 2 checkpoints must be kept, got {keep}")
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"steps between checkpoints must be at least 1, got {every_n_steps}")
        self.folder = folder
        self.every_n_steps, self.keep = every_n_steps, keep
        self.monitor, self.mode = monitor, mode
        self.best_score: float | None = None
        self.best_step: int | None = None
        self._save_after_validation = False

    @property
    def best_model_path(self) -> str:
        """Path of the best checkpoint, empty before the first; read by Lightning for `best`."""
        if self.folder is None or self.best_step is None:
            return ""
        return str(checkpoint_path(self.folder, "best", self.best_step))

    def state_dict(self) -> dict[str, Any]:
        """Best score so far and its step."""
        return {"best_score": self.best_score, "best_step": self.best_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best score and its step, if that checkpoint is in this run's folder."""
        step = state_dict["best_step"]
        if step is None or self.folder is None:
            return
        if checkpoint_path(self.folder, "best", step).is_file():
            self.best_score, self.best_step = state_dict["best_score"], step

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Save if this step is due and no validation follows on it."""
        if self.folder is None or (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        step = trainer.global_step
        is_last = step == trainer.max_steps
        validates = validation_follows(trainer, batch_idx)
        due = is_last or (
            validates if self.every_n_steps is None else step % self.every_n_steps == 0
        )
        self._save_after_validation = due and validates
        if due and not validates:
            self._save_step(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the best checkpoint if this is one, then the step checkpoint if it is due."""
        if self.folder is None or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        score = trainer.callback_metrics.get(self.monitor)
        if score is not None and self._is_better(float(score)):
            self.best_score, self.best_step = float(score), trainer.global_step
            self._save(trainer, "best")
            self._remove(trainer, "best", keep=1)
        if self._save_after_validation:
            self._save_after_validation = False
            self._save_step(trainer)

    def _is_better(self, score: float) -> bool:
        if score != score:
            return False
        if self.best_score is None:
            return True
        return score > self.best_score if self.mode == "max" else score < self.best_score

    def _save_step(self, trainer: pl.Trainer) -> None:
        self._save(trainer, "step")
        self._remove(trainer, "step", keep=self.keep)

    def _save(self, trainer: pl.Trainer, kind: Literal["step", "best"]) -> None:
        assert self.folder is not None
        path = checkpoint_path(self.folder, kind, trainer.global_step)
        trainer.save_checkpoint(path, weights_only=False)

    def _remove(self, trainer: pl.Trainer, kind: Literal["step", "best"], keep: int) -> None:
        """Delete all but the newest `keep`; steps beyond the present one are left-overs too."""
        if not trainer.is_global_zero or self.folder is None:
            return
        present = checkpoint_path(self.folder, kind, trainer.global_step)
        paths = list_checkpoints(self.folder, kind)
        position = paths.index(present)
        for path in paths[:position] + paths[position + keep :]:
            trainer.strategy.remove_checkpoint(path)


def validation_follows(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Whether Lightning validates right after micro-batch `batch_idx` of the endless epoch."""
    if not trainer.enable_validation:
        return False
    if trainer.should_stop:
        return True
    interval = trainer.val_check_batch
    return interval is not None and interval != float("inf") and (batch_idx + 1) % interval == 0


class FinalValidation(Callback):
    """Validates after the last step even if the run's length is no multiple of the interval.

    Must come before `RunCheckpoint`.
    """

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Ask Lightning to stop, which makes it validate first."""
        if trainer.global_step == trainer.max_steps:
            trainer.should_stop = True


class StepNumbers(Callback):
    """Keeps the step numbers of the logs equal to the optimiser steps, also after a resume.

    Lightning counts steps for its loggers apart from `global_step`, and may be one off after it
    has resumed from a checkpoint that was written after a validation.
    """

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set Lightning's count for loggers."""
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step


class RunRecord(Callback):
    """Adds to `versions.json` what is known once the first step is done.

    Args:
        folder: the run folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._done = False

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Record and print the number of parameters and the attention backends in use."""
        if self._done or not trainer.is_global_zero:
            return
        self._done = True
        backends = recorded_choices()
        model = getattr(pl_module, "model", pl_module)  # without averages of its weights
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        add_to_last_start(
            self.folder,
            backends=backends,
            num_parameters=num_parameters,
            world_size=trainer.world_size,
            precision=trainer.precision,
        )
        used = ", ".join(f"{backend} for {call}" for call, backend in backends.items())
        print(f"parameters: {num_parameters:,}; attention backend: {used}", flush=True)


class Throughput(Callback):
    """Logs `samples_per_second` over the training steps since the last logged step.

    Time spent in validation is not counted.
    """

    def __init__(self) -> None:
        self._samples, self._seconds = 0, 0.0
        self._started: float | None = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock after a pause."""
        if self._started is None:
            self._started = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count the batch; log at logging steps."""
        self._samples += len(batch["sample_ids"]) * trainer.world_size
        stepped = (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        interval: int = getattr(trainer, "log_every_n_steps", 1)
        if not stepped or trainer.global_step % max(interval, 1):
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize(pl_module.device)
        self._pause()
        pl_module.log("samples_per_second", self._samples / self._seconds)
        self._samples, self._seconds = 0, 0.0

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop the clock."""
        self._pause()

    def _pause(self) -> None:
        if self._started is not None:
            self._seconds += time.perf_counter() - self._started
            self._started = None
