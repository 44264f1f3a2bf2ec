"""Callbacks of every run: the end of a run, step numbers, record, throughput."""

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from lit_probattn.attention import recorded_choices
from lit_probattn.training.run_record import add_to_last_start


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
