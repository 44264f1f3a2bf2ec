"""Progress of a run: a rich bar on a terminal, plain lines elsewhere."""

import sys
import time
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar

SECONDS_BETWEEN_LINES = 10.0


def make_progress_bar() -> ProgressBar:
    """The kind that suits where the output goes."""
    return StepProgressBar(leave=True) if sys.stdout.isatty() else PlainProgress()


class StepProgressBar(RichProgressBar):
    """Rich bar whose total is the whole run: `max_steps`, in micro-batches."""

    @property
    def total_train_batches(self) -> int | float:
        """Micro-batches of the run."""
        return self.trainer.max_steps * self.trainer.accumulate_grad_batches

    def _get_train_description(self, current_epoch: int) -> str:
        return "training"

    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """Metrics beside the bar, without the logger's version number."""
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return metrics


class PlainProgress(ProgressBar):
    """One line at the first step, then at most every ten seconds, and for every evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self._first_step, self._started, self._printed = 0, 0.0, 0.0
        self._enabled = True

    def disable(self) -> None:
        """Print nothing; Lightning calls this on all ranks but the first."""
        self._enabled = False

    def enable(self) -> None:
        """Print again."""
        self._enabled = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        self._first_step, self._started = trainer.global_step, time.monotonic()
        self._printed = 0.0

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Print a line if it is time."""
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
