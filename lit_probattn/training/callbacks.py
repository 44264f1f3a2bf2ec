"""Callbacks of every run: final validation, step numbers, record, throughput, predictions."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ProgressBar
from torch import Tensor

from lit_probattn.attention import recorded_choices
from lit_probattn.base.files import replace_text, replacing
from lit_probattn.tasks.base import Task
from lit_probattn.tasks.distributed import gather_objects
from lit_probattn.training.lightning_internals import TrainingBar, set_logged_step
from lit_probattn.training.run_folder import compare_sources
from lit_probattn.training.run_record import add_to_last_start

if TYPE_CHECKING:
    import pandas as pd

SECONDS_BETWEEN_LINES = 10.0


class FinalValidation(Callback):
    """Validates after the last step even if the interval does not divide the length of the run.

    Must come before `RunCheckpoint`.
    """

    def on_train_batch_end(self, trainer: pl.Trainer, *batch: Any) -> None:
        """Request a stop, before which Lightning validates."""
        if trainer.global_step == trainer.max_steps:
            trainer.should_stop = True


class StepNumbers(Callback):
    """Keeps the step numbers of loggers equal to the optimiser steps, also after resuming.

    Lightning counts the steps of its loggers separately from `global_step`, with a possible offset
    of one after resuming from a checkpoint that was written after a validation.
    """

    def on_train_batch_start(self, trainer: pl.Trainer, *batch: Any) -> None:
        """Set Lightning's step count for loggers."""
        set_logged_step(trainer, trainer.global_step)


class SameSources(Callback):
    """Compares the data sources of all ranks before the first step or score."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Compare the sources; the data are set up at this point."""
        if trainer.world_size > 1:
            data = getattr(trainer, "datamodule", None)
            compare_sources(gather_objects(getattr(data, "source_hashes", {})))


class RunRecord(Callback):
    """Adds data sources to `versions.json`, and after the first step backends and sizes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._done = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the hashes of the data's sources."""
        sources = getattr(getattr(trainer, "datamodule", None), "source_hashes", None)
        if sources is not None and trainer.is_global_zero:
            add_to_last_start(self.folder, sources=sources)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *batch: Any
    ) -> None:
        """Record and print the number of parameters and the selected attention backends."""
        if self._done or not trainer.is_global_zero:
            return
        self._done = True
        backends = recorded_choices()
        model = getattr(pl_module, "model", pl_module)  # excludes moving averages
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

    The time of validations is excluded.
    """

    def __init__(self) -> None:
        self._samples, self._seconds = 0, 0.0
        self._started: float | None = None

    def on_train_batch_start(self, *batch: Any) -> None:
        """Restart the clock after a pause."""
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
        self.on_validation_start()
        pl_module.log("samples_per_second", self._samples / self._seconds)
        self._samples, self._seconds = 0, 0.0

    def on_validation_start(self, *_: Any) -> None:
        """Stop the clock."""
        if self._started is not None:
            self._seconds += time.perf_counter() - self._started
            self._started = None


def predictions_frame(batches: list[dict[str, Any]]) -> pd.DataFrame:
    """Return the rows of `predict_step` outputs, ordered by sample.

    Returns:
        A column for each output: numbers, texts, or a list of numbers per row; `probabilities`
        is expanded to `probability_0` … (float32), one column per class.
    """
    import pandas as pd

    frames = []
    for batch in batches:
        columns: dict[str, Any] = {}
        for name, values in batch.items():
            if name == "probabilities":
                table = values.float().cpu().numpy()
                columns |= {f"probability_{c}": table[:, c] for c in range(table.shape[1])}
            elif isinstance(values, Tensor):
                columns[name] = values.cpu().numpy() if values.dim() == 1 else values.tolist()
            else:
                columns[name] = values
        frames.append(pd.DataFrame(columns))
    return _by_sample(frames)


def _by_sample(frames: list[pd.DataFrame]) -> pd.DataFrame:
    import pandas as pd

    table = pd.concat(frames, ignore_index=True)
    return table.sort_values("sample_id", kind="stable", ignore_index=True)


class PredictionWriter(Callback):
    """Collects the predictions of all ranks; rank 0 writes or overwrites one Parquet file.

    A task can postprocess the table of all rows (`finish_predictions`) and provide additional text
    files (`prediction_files`).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written = [path]
        self.num_samples = 0
        self._batches: list[dict[str, Any]] = []

    def on_predict_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *batch: Any
    ) -> None:
        """Store one batch on the CPU."""
        kept = {name: v.cpu() if isinstance(v, Tensor) else v for name, v in outputs.items()}
        self._batches.append(kept)

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gather the ranks' rows and write the file."""
        frames = gather_objects(predictions_frame(self._batches))
        self._batches = []
        if not trainer.is_global_zero:
            return
        task: Any = pl_module
        table = _by_sample(frames)
        if isinstance(task, Task):
            table = task.finish_predictions(table)
        self.num_samples = len(table)
        with replacing(self.path) as file:
            table.to_parquet(file, index=False)
        for ending, text in task.prediction_files(table).items() if isinstance(task, Task) else ():
            path = self.path.with_name(f"{self.path.stem}{ending}")
            replace_text(path, text)
            self.written.append(path)


def make_progress_bar() -> ProgressBar:
    """Return a progress bar for a terminal, plain lines otherwise."""
    return StepProgressBar() if sys.stdout.isatty() else PlainProgress()


class StepProgressBar(TrainingBar):
    """Rich progress bar over the whole run: `max_steps`, in micro-batches."""

    @property
    def total_train_batches(self) -> int | float:
        """Number of micro-batches of the run."""
        return self.trainer.max_steps * self.trainer.accumulate_grad_batches

    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Return the metrics next to the bar, without the logger's version number."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics


class PlainProgress(ProgressBar):
    """Prints a line at the first step, then at most every ten seconds, and per evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self._first_step, self._started, self._printed = 0, 0.0, 0.0
        self._enabled = True

    def disable(self) -> None:
        """Disable printing; Lightning calls this on all ranks except the first."""
        self._enabled = False

    def enable(self) -> None:
        """Enable printing."""
        self._enabled = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._first_step, self._started = trainer.global_step, time.monotonic()
        self._printed = 0.0

    def on_train_batch_end(self, trainer: pl.Trainer, *batch: Any) -> None:
        """Print a line if due."""
        now, step = time.monotonic(), trainer.global_step
        is_last = step == trainer.max_steps
        if step == self._first_step or (
            now - self._printed < SECONDS_BETWEEN_LINES and not is_last
        ):
            return
        self._printed = now
        rate = (step - self._first_step) / max(now - self._started, 1e-9)
        left = timedelta(seconds=round((trainer.max_steps - step) / rate))
        loss = trainer.callback_metrics.get("train/loss", float("nan"))
        self._line(trainer, f"loss {float(loss):.4f}  {rate:.2f} steps/s  remaining {left}")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the validation metrics."""
        if not trainer.sanity_checking and trainer.state.fn == "fit":
            self._line(trainer, _metrics(trainer, "val/"))

    def _line(self, trainer: pl.Trainer, text: str) -> None:
        if self._enabled and trainer.is_global_zero:
            width = len(str(trainer.max_steps))
            print(f"step {trainer.global_step:>{width}}/{trainer.max_steps}  {text}", flush=True)


def _metrics(trainer: pl.Trainer, prefix: str) -> str:
    values = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith(prefix)}
    return "  ".join(f"{name} {value:.4f}" for name, value in sorted(values.items()))
