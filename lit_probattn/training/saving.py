"""Saving a run: periodically, at the best validation, at the end, and on stop signals."""

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, Checkpoint, EarlyStopping, Timer
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason

from lit_probattn.tasks.base import Task
from lit_probattn.tasks.distributed import agree_on_signal
from lit_probattn.training.checkpoints import checkpoint_path, list_checkpoints
from lit_probattn.training.lightning_internals import validate_now, write_step_metrics
from lit_probattn.training.preemption import Preempted
from lit_probattn.training.run_record import add_to_last_start

# Parts of the names of scores whose largest or smallest value is the best, and of what is logged
# about such scores.
_LARGEST = ("accuracy", "bleu", "f1", "exact_match", "score", "return")
_SMALLEST = ("loss", "nll", "ppl", "error")
_ABOUT = ("_std", "_threshold")
_REFUSED = (
    "{} {} would select by the test split, whose scores are only logged: use a validation "
    "metric, such as val/{}"
)


def reject_test_metric(setting: str, metric: Any) -> None:
    """Raise if a setting selects by a test metric.

    Args:
        setting: name of the setting, for the message.
        metric: name of the metric.

    Raises:
        ValueError: `metric` is a test metric.
    """
    if isinstance(metric, str) and metric.startswith("test/"):
        raise ValueError(_REFUSED.format(setting, metric, metric.removeprefix("test/")))


def reject_test_monitors(callbacks: Iterable[Callback]) -> None:
    """Raise if a callback, such as early stopping, monitors a test metric.

    Raises:
        ValueError: a callback monitors one; the message names it.
    """
    for callback in callbacks:
        name = f"the monitor of {type(callback).__name__} in trainer.callbacks,"
        reject_test_metric(name, getattr(callback, "monitor", None))


def best_mode(metric: str) -> Literal["max", "min"] | None:
    """Return whether the largest or the smallest value of a metric is the best, by its name."""
    if any(word in metric for word in _ABOUT):
        return None
    found = [any(word in metric for word in words) for words in (_LARGEST, _SMALLEST)]
    return None if found[0] == found[1] else "max" if found[0] else "min"


def reject_worst(setting: str, metric: Any, mode: Any, logged: Sequence[str]) -> None:
    """Raise if a setting would select by the worst value of a known metric.

    Args:
        setting: name of the setting, for the message.
        metric: name of the metric.
        mode: `max` or `min`.
        logged: patterns of the scores that the task logs, without the split.

    Raises:
        ValueError: the metric is one of these, and the other mode is its best.
    """
    if not isinstance(metric, str) or mode not in ("max", "min"):
        return
    name, best = metric.removeprefix("val/"), best_mode(metric)
    is_known = metric == "train/loss" or any(fnmatchcase(name, pattern) for pattern in logged)
    if not is_known or best in (None, mode):
        return
    which = "largest" if best == "max" else "smallest"
    raise ValueError(
        f"{setting} {mode} would select the worst {metric}, whose {which} value is the best: set "
        f"it to {best}"
    )


class RunCheckpoint(Checkpoint):
    """Saves periodically, at the end, and at the best validation.

    The end is the last step of the run: if a callback stops the run early (a time limit,
    early stopping), it ends after the current optimiser step.

    If a validation follows a step directly, the checkpoint is written after it. A run that
    is killed in between therefore repeats the validation: nothing is skipped or counted twice.

    When the ranks agree that one of them received a stop signal
    (`lit_probattn.training.preemption`), the step is saved immediately and `Preempted` is raised.
    If a validation is due or in progress, the resumed run starts with it.

    Args:
        folder: folder of the checkpoints. Can be set later; nothing is saved while it is None.
        every_n_steps: optimiser steps between checkpoints. None: after every validation.
        keep: number of step checkpoints to keep, at least 2, since the newest can be corrupt.
        mode: whether larger (`max`) or smaller (`min`) is better.

    Raises:
        ValueError: `keep` is below 2, `every_n_steps` below 1, or `monitor` is a test metric.
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
            raise ValueError(f"run.keep_checkpoints must be at least 2, received {keep}")
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"run.checkpoint_every must be at least 1, received {every_n_steps}")
        reject_test_metric("run.monitor", monitor)
        self.folder = folder
        self.every_n_steps, self.keep = every_n_steps, keep
        self.monitor, self.mode = monitor, mode
        self.best_score: float | None = None
        self.best_step: int | None = None
        self._save_after_validation = False
        self._validation_is_due = False
        self._stopped: Preempted | None = None
        self._ends_with_step = False
        self._has_saved = False

    @property
    def best_model_path(self) -> str:
        """Path of the best checkpoint, empty if there is none; used by Lightning for `best`."""
        if self.folder is None or self.best_step is None:
            return ""
        return str(checkpoint_path(self.folder, "best", self.best_step))

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that this and other callbacks, such as early stopping, select the best scores.

        Raises:
            ValueError: a callback selects the worst values of a score of the task.
        """
        callbacks: list[Any] = getattr(trainer, "callbacks", []) if stage == "fit" else []
        for callback in callbacks:
            name = f"the mode of {type(callback).__name__} in trainer.callbacks,"
            setting = "run.monitor_mode" if callback is self else name
            metric, mode = (getattr(callback, key, None) for key in ("monitor", "mode"))
            reject_worst(setting, metric, mode, getattr(pl_module, "logged", ()))

    def on_save_checkpoint(
        self, trainer: Any, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Exclude the elapsed time of `trainer.max_time`, which limits each start separately."""
        for callback in trainer.callbacks:
            if isinstance(callback, Timer):
                checkpoint["callbacks"].pop(callback.state_key, None)

    def on_load_checkpoint(
        self, trainer: Any, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the patience of this run's early stopping; Lightning loads that of the checkpoint.

        A run that had waited long enough continues with more patience.
        """
        for callback in trainer.callbacks:
            state = checkpoint["callbacks"].get(callback.state_key)
            if not isinstance(callback, EarlyStopping) or state is None:
                continue
            state["patience"] = callback.patience
            waited = state["stopping_reason"] == EarlyStoppingReason.PATIENCE_EXHAUSTED.value
            if waited and state["wait_count"] < callback.patience:
                state["stopping_reason"] = EarlyStoppingReason.NOT_STOPPED.value

    def state_dict(self) -> dict[str, Any]:
        """Return the best score and its step, and whether the validation of this step is due."""
        best = {"best_score": self.best_score, "best_step": self.best_step}
        return {**best, "validation_is_due": self._validation_is_due}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the best score and its step if that checkpoint is in this run's folder."""
        self._validation_is_due = state_dict.get("validation_is_due", False)
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
        """Save if this step is due and is not followed by a validation."""
        if self.folder is None:
            return
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            if trainer.should_stop:  # checkpoints do not contain partially accumulated gradients
                trainer.should_stop, self._ends_with_step = False, True
            return
        trainer.should_stop = trainer.should_stop or self._ends_with_step
        step = trainer.global_step
        is_last = step == trainer.max_steps
        validates = validation_follows(trainer)
        due = (
            is_last
            or trainer.should_stop
            or (validates if self.every_n_steps is None else step % self.every_n_steps == 0)
        )
        self._save_after_validation = due and validates
        stop = pl_module.stop_agreed and not is_last
        if stop or (due and not validates):
            self._validation_is_due = validates
            # Write this step's row first: a resumed run would not write it after a kill in between.
            write_step_metrics(trainer)
            self._save_step(trainer)
        if stop:  # stop once this step is logged
            self._stopped = self._preempted(trainer, pl_module)

    def on_train_batch_start(self, *_: Any) -> None:
        """Stop after a step that was saved for a stop signal."""
        if self._stopped is not None:
            raise self._stopped

    on_validation_start: Any = on_train_batch_start

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Run the validation that was due at the checkpoint; end a run that was stopped early.

        Early stopping counts only the validations that log its score.
        """
        callbacks: list[Any] = getattr(trainer, "callbacks", [])
        for callback in callbacks:
            if isinstance(callback, EarlyStopping) and _may_omit(pl_module, callback.monitor):
                callback.strict = False  # otherwise a validation without it is an error
        for callback in callbacks if self.folder is not None else ():
            if (
                isinstance(callback, EarlyStopping)
                and callback.stopping_reason != EarlyStoppingReason.NOT_STOPPED
            ):
                trainer.should_stop = True
                if trainer.is_global_zero:
                    print(
                        "nothing to train: the run was stopped early at step "
                        f"{trainer.global_step}: {callback.stopping_reason_message}",
                        flush=True,
                    )
        if self._validation_is_due:
            self._save_after_validation = True
            validate_now(trainer)

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *batch: Any
    ) -> None:
        """Save and stop if a rank received a stop signal; the validation is repeated."""
        self.leave_if_asked(trainer, pl_module)

    def leave_if_asked(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save and leave a validation if a rank received a stop signal; it is repeated on resuming.

        Raises:
            Preempted: a rank did.
        """
        if self.folder is None or trainer.sanity_checking or trainer.state.fn != "fit":
            return
        task: Any = pl_module
        task.stop_agreed = agree_on_signal(task.stop_requested, pl_module.device)
        if task.stop_agreed and trainer.global_step != trainer.max_steps:
            trainer.fit_loop.epoch_loop.val_loop.batch_progress.reset()
            self._validation_is_due = True
            self._save_step(trainer)
            raise self._preempted(trainer, pl_module)

    def _preempted(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Preempted:
        assert self.folder is not None
        path = checkpoint_path(self.folder, "step", trainer.global_step)
        agreed: Any = pl_module.stop_agreed
        return Preempted(agreed, trainer.global_step, path)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the best checkpoint if the score improved, then the step checkpoint if due.

        Raises:
            ValueError: the metric that selects the best checkpoint, or that of early stopping, is
                not logged.
        """
        if self.folder is None or trainer.state.fn != "fit":
            return
        scores = trainer.callback_metrics
        for setting, metric in self._monitored(trainer):
            if metric not in scores and not _may_omit(pl_module, metric):
                logged = ", ".join(sorted(name for name in scores if name.startswith("val/")))
                raise ValueError(f"{setting} {metric} is not a validation metric; logged: {logged}")
        if trainer.sanity_checking:
            return
        score = scores.get(self.monitor)
        if score is not None and self._is_better(float(score)):
            self.best_score, self.best_step = float(score), trainer.global_step
            self._save(trainer, "best")
            self._remove(trainer, "best", keep=1)
        # Whether a validation follows a step is unknown if they are a duration apart.
        if self._save_after_validation or self.every_n_steps is None or trainer.should_stop:
            self._save_after_validation = self._validation_is_due = False
            self._save_step(trainer)

    def _monitored(self, trainer: Any) -> Iterator[tuple[str, str]]:
        """Yield the settings whose metric validations must log, also one like `val_loss`."""
        yield "run.monitor", self.monitor
        for callback in trainer.callbacks:
            is_strict = isinstance(callback, EarlyStopping) and callback.strict
            if is_strict and callback.monitor.startswith("val"):
                yield "trainer.callbacks: EarlyStopping's monitor", callback.monitor

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
        if trainer.is_global_zero and not self._has_saved:
            add_to_last_start(self.folder.parent, saved=True)
            self._has_saved = True

    def _remove(self, trainer: pl.Trainer, kind: Literal["step", "best"], keep: int) -> None:
        """Delete all but the newest `keep`, and steps beyond the current one."""
        if not trainer.is_global_zero or self.folder is None:
            return
        present = checkpoint_path(self.folder, kind, trainer.global_step)
        paths = list_checkpoints(self.folder, kind)
        position = paths.index(present)
        for path in paths[:position] + paths[position + keep :]:
            trainer.strategy.remove_checkpoint(path)


def _may_omit(module: pl.LightningModule, metric: str) -> bool:
    """Whether some validations log a metric and others do not."""
    return isinstance(module, Task) and module.may_omit(metric)


def validation_follows(trainer: pl.Trainer) -> bool:
    """Whether Lightning validates directly after the current micro-batch."""
    epochs, loop = trainer.check_val_every_n_epoch, trainer.fit_loop.epoch_loop
    if not trainer.enable_validation or (epochs and (trainer.current_epoch + 1) % epochs):
        return False
    if trainer.should_stop:
        return True
    # With a number of epochs, Lightning counts from the beginning of each.
    done = (loop.total_batch_idx if epochs is None else loop.batch_idx) + 1
    interval = trainer.val_check_batch
    return interval is not None and interval != float("inf") and done % interval == 0
