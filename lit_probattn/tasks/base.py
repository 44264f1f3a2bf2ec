"""Base of all tasks: optimiser, schedule, randomness, prior updates, checks for NaN."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypedDict

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
    Timer,
)
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lit_probattn.attention.mgk.annealing import NormAnnealing
from lit_probattn.attention.numerics import compute_dtype
from lit_probattn.base.arguments import Count, NotNegative, OnlyWith, Positive, WholeNumber, takes
from lit_probattn.randomness import RandomKey, mix_integers
from lit_probattn.tasks.distributed import (
    agreed_signal,
    gather_objects,
    num_ranks,
    shard,
    stop_counts,
    sum_over_ranks,
)
from lit_probattn.tasks.finite import (
    NonFiniteError,
    describe_samples,
    first_bad_gradient,
    first_bad_module,
    largest_gradient,
)
from lit_probattn.tasks.parameter_order import ordered_parameters
from lit_probattn.tasks.schedules import (
    OPEN_ENDED,
    Lengths,
    ScheduleName,
    ScheduleValues,
    check_schedule,
    lengths_of_run,
    schedule_values,
)

MAX_OVERFLOWS_IN_A_ROW = 10
Split = Literal["val", "test"]
# Callbacks of Lightning that would have another effect than intended.
_UNUSABLE: dict[type[Callback], str] = {
    BatchSizeFinder: (
        "changes batch_size, the number of samples of an optimiser step: remove it; "
        "--trainer.accumulate_grad_batches makes micro-batches smaller"
    ),
    GradientAccumulationScheduler: (
        "changes the number of micro-batches of a step, by which the data are already divided: "
        "remove it, and set --trainer.accumulate_grad_batches"
    ),
    LearningRateFinder: (
        "does not support tasks that set the learning rate before every step: remove it, and "
        "compare runs with several --lr"
    ),
    StochasticWeightAveraging: (
        "counts epochs, but the training data are one endless epoch: remove it; --ckpt_path "
        "average-10 evaluates the mean of the newest checkpoints"
    ),
}
_UNCHANGED = "The weights were not updated."


class Batch(TypedDict):
    """A batch of sequences.

    `inputs` (B, N) token ids, `key_mask` (B, N) True for real tokens, `target` (B,),
    `sample_ids` (B,) index in the split; -1 marks a filler row of an evaluation batch.
    Pairs of texts have `inputs` and `key_mask` (B, 2, N).
    """

    inputs: Tensor
    key_mask: Tensor
    target: Tensor
    sample_ids: Tensor


# Sizes that data determine, and whether they must be equal; a model may have more of the others.
SIZES = {
    "vocab_size": False,
    "source_vocab_size": False,
    "num_classes": False,
    "num_features": True,
    "mask_token": True,
}


def check_trainer(trainer: pl.Trainer) -> None:
    """Validate the settings of the trainer for a training run.

    Raises:
        ValueError: `max_steps` is missing, `min_steps`, `min_epochs`, `max_epochs` or
            `limit_train_batches` is set, a number of batches is below 1, validations may be within
            an optimiser step or at different steps of the ranks, gradients are clipped to a
            negative norm, or a callback changes what the task sets.
    """
    if trainer.max_steps < 1:
        raise ValueError(
            f"trainer.max_steps must be set, received {trainer.max_steps}: runs are "
            "measured in optimiser steps, for example --trainer.max_steps 5000"
        )
    is_short = getattr(trainer, "fast_dev_run", False)
    epochs = getattr(trainer, "max_epochs", None)
    if epochs not in (None, -1) and not is_short:
        raise ValueError(
            f"trainer.max_epochs must be unset, received {epochs}: the training data are one "
            "endless epoch, and --trainer.max_steps sets the length of a run"
        )
    for name in ("min_steps", "min_epochs"):
        if least := getattr(trainer, name, None):
            raise ValueError(
                f"trainer.{name} must be unset, received {least}: Lightning would not stop early "
                "within the training data, which are one endless epoch; patience of EarlyStopping "
                "delays it"
            )
    limit = getattr(trainer, "limit_train_batches", 1.0)  # 1 is one batch, 1.0 all of them
    is_whole = isinstance(limit, float) and limit == 1.0
    if not (is_whole or is_short or getattr(trainer, "overfit_batches", 0)):
        raise ValueError(
            f"trainer.limit_train_batches must be unset, received {limit}: it divides the training "
            "data, which are one endless epoch; --trainer.max_steps sets the length of a run, and "
            "python -m lit_probattn validate does not train"
        )
    for callback in getattr(trainer, "callbacks", ()):
        reason = next((text for kind, text in _UNUSABLE.items() if isinstance(callback, kind)), "")
        if reason:
            raise ValueError(f"trainer.callbacks: {type(callback).__name__} {reason}")
    timers = [c for c in getattr(trainer, "callbacks", ()) if isinstance(c, Timer)]
    if any(timer.time_remaining() == 0 for timer in timers):
        raise ValueError("trainer.max_time must be positive: no step would be trained")
    clipping = getattr(trainer, "gradient_clip_val", None)
    if isinstance(clipping, int | float) and clipping < 0:
        raise ValueError(
            f"trainer.gradient_clip_val must not be negative, received {clipping}: unset it "
            "to disable clipping"
        )
    if trainer.accumulate_grad_batches < 1:
        raise ValueError(
            "trainer.accumulate_grad_batches must be at least 1, received "
            f"{trainer.accumulate_grad_batches}"
        )
    interval = getattr(trainer, "val_check_interval", None)
    if isinstance(interval, int | float) and not interval > 0:
        raise ValueError(
            f"trainer.val_check_interval must be positive, received {interval}: number of "
            "micro-batches between validations; --trainer.limit_val_batches 0 disables validation"
        )
    parts = trainer.accumulate_grad_batches
    check_whole_steps("overfit_batches", getattr(trainer, "overfit_batches", None), parts)
    if getattr(trainer, "limit_val_batches", 1.0):
        check_whole_steps("val_check_interval", interval, parts)
        # Lightning does not set the attribute if the interval is a duration.
        is_duration = isinstance(trainer, pl.Trainer) and not hasattr(trainer, "val_check_interval")
        if is_duration and parts > 1:
            raise ValueError(
                "trainer.val_check_interval must be a number of micro-batches with "
                f"trainer.accumulate_grad_batches {parts}, received a duration, which may end "
                "within an optimiser step"
            )
        if is_duration and trainer.world_size > 1:
            raise ValueError(
                "trainer.val_check_interval must be a number of micro-batches with "
                f"{trainer.world_size} processes, received a duration, which may end at another "
                "step on each of them"
            )


def check_whole_steps(name: str, count: Any, parts: int) -> None:
    """Check that a number of micro-batches does not end within an optimiser step.

    Args:
        name: the trainer's argument.
        count: its value; only whole numbers are checked.
        parts: number of micro-batches of an optimiser step.

    Raises:
        ValueError: the number is not a multiple of `parts`.
    """
    if isinstance(count, int) and count % parts:
        raise ValueError(
            f"trainer.{name} counts micro-batches and must be a multiple of "
            f"trainer.accumulate_grad_batches {parts}, received {count}: set "
            f"{-(-count // parts) * parts}, or {count * parts} for {count} optimiser steps"
        )


def check_sizes(task: Task, data: Any) -> None:
    """Check that a task built without the command line, which links sizes, is one for these data.

    Raises:
        ValueError: the data have more tokens or classes than the model, another number of features,
            or another mask token.
    """
    for name, is_exact in SIZES.items():
        values = [getattr(part, name, None) for part in (task, task.model)]
        own = next((value for value in values if isinstance(value, int)), None)
        given = getattr(data, name, None)
        if own is None or not isinstance(given, int):
            continue
        if own < given or (is_exact and own != given):
            raise ValueError(
                f"{name}={own} of {type(task).__name__} does not suit {type(data).__name__}, whose "
                f"{name} is {given}: build the task with {name}={given}"
            )


def check_batch(batch: Any, data: Any) -> None:
    """Check that a batch, which may be of data of another package, numbers its samples.

    Raises:
        ValueError: it does not.
    """
    if not isinstance(batch, Mapping) or "sample_ids" not in batch:
        received = ", ".join(batch) if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        name = "the data" if data is None else type(data).__name__
        raise ValueError(
            f"{name}: expected a batch by name, with sample_ids (B,), the index of "
            f"each sample in its split, received {received}"
        )


def check_epoch(trainer: pl.Trainer) -> None:
    """Check that an epoch of data of another package, if finite, consists of whole steps.

    Raises:
        ValueError: its last step would have fewer micro-batches than the others.
    """
    count, parts = trainer.num_training_batches, trainer.accumulate_grad_batches
    if isinstance(count, int) and count % parts and not getattr(trainer, "fast_dev_run", False):
        raise ValueError(
            f"the training data have {count} micro-batches per epoch, which must be a multiple of "
            f"trainer.accumulate_grad_batches {parts}: drop the last ones, or use another batch "
            "size"
        )


def real_rows(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch without its filler rows; entries that do not have its rows are unchanged."""
    real = batch["sample_ids"] >= 0
    return {
        name: value[real] if isinstance(value, Tensor) and value.shape[:1] == real.shape else value
        for name, value in batch.items()
    }


class Task(pl.LightningModule):
    """Training rules shared by all tasks; a subclass adds the model, its loss and its metrics.

    A subclass sets `self.model` and implements `batch_loss`, `evaluate` and `log_scores`;
    `add_to_sums` and `summed` keep `num_sums` numbers between the last two. Logged values are
    `train/loss` (mean over the global batch), `lr` and `beta1`.

    Source of the defaults: MGK, ICML 2022, training set-up on the Long Range Arena and its code:
    AdamW, one-cycle schedule with beta1 cycling.

    Args:
        seed: seed of the run, which determines all random numbers in training.
        lr: peak learning rate.
        betas: AdamW's averaging factors; a schedule that cycles beta1 overrides betas[0].
        eps: AdamW's epsilon.
        weight_decay: decoupled weight decay, on all parameters unless the task exempts some.
        schedule: learning-rate schedule; see `lit_probattn.tasks.schedules`.
        warmup_steps: number of optimiser steps up to the peak; scaled down for runs that are not
            longer, see `lit_probattn.tasks.schedules.lengths_of_run`.
        schedule_steps: length of the schedule. None means `trainer.max_steps`.
        cycle_momentum: whether `one_cycle` moves beta1 from 0.95 to 0.85 and back.
        compile: whether to compile the model with `torch.compile`.
    """

    model: nn.Module
    # Patterns of the scores that evaluations log, without the split; empty if unknown.
    logged: ClassVar[tuple[str, ...]] = ()
    # Unit of the loss in reports.
    loss_unit: ClassVar[str] = "nats"
    # Numbers that an evaluation sums over the rows of a split.
    num_sums: ClassVar[int] = 0
    # Task-specific parts of the model, which initial weights may lack.
    heads: ClassVar[tuple[str, ...]] = ("head", "output", "spans", "pooler", "classifier")

    @takes(NormAnnealing)
    def __init__(
        self,
        *,
        seed: int = 0,
        lr: Positive = 1e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: NotNegative = 1e-6,
        weight_decay: NotNegative = 0.0,
        schedule: ScheduleName = "one_cycle",
        warmup_steps: WholeNumber = 0,
        schedule_steps: Count | None = None,
        cycle_momentum: Annotated[bool, OnlyWith(schedule="one_cycle")] = True,
        compile: bool = False,
        **annealing: Any,
    ) -> None:
        super().__init__()
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1), received {list(betas)}")
        self.annealing = NormAnnealing(**annealing)
        self.seed = seed
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.schedule: ScheduleName = schedule
        self.warmup_steps, self.schedule_steps = warmup_steps, schedule_steps
        self.cycle_momentum = cycle_momentum
        self.compile_model = compile
        self._micro_step = 0  # micro-batches of this rank before the current one, over all epochs
        self._window: list[tuple[int, Batch, Tensor]] = []  # micro-batches since the last step
        self._sums = torch.zeros(self.num_sums, dtype=torch.float64)
        self._overflows_in_a_row = 0
        self.stop_requested = 0  # set from outside: the signal that requests this process to stop
        self.stop_agreed = 0  # set here: the signal received by any rank, equal on all ranks
        # Set from outside: scores the test split after a validation, for logging only.
        self.score_test: Callable[[], None] | None = None

    def keep_arguments(self) -> None:
        """Store the arguments of all active constructors, by name, in checkpoints."""
        found: dict[str, Any] = {}
        frame: Any = inspect.currentframe()
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is self:
                names, _, options, values = inspect.getargvalues(frame)
                found |= {name: values[name] for name in names if name != "self"}
                found |= values[options] if options else {}
        # If the command line constructs the task, the values of the configuration.
        self.save_hyperparameters(logger=False, frame=frame)
        for name, value in found.items():
            if not callable(value):  # checkpoints contain no code: callables must be passed again
                self.hparams.setdefault(name, value)

    @property
    def trainer_or_none(self) -> pl.Trainer | None:
        """The trainer; None if the task is not attached to one."""
        try:
            return self.trainer
        except RuntimeError:
            return None

    @property
    def datamodule(self) -> Any:
        """The DataModule of the trainer, or None."""
        return getattr(self.trainer_or_none, "datamodule", None)

    def print_line(self, line: str) -> None:
        """Print a line on the first rank."""
        if self.trainer.is_global_zero:
            print(line, flush=True)

    def batch_loss(self, batch: Batch) -> Tensor:
        """Return the mean loss over the rows of a training batch. Shape ()."""
        raise NotImplementedError(f"{type(self).__name__} must implement batch_loss")

    def part_of_mean(self, total: Tensor, count: Tensor) -> Tensor:
        """Return this micro-batch's contribution to a mean over the global batch.

        The mean of the contributions over ranks and accumulation steps is that mean.

        Args:
            total: sum over the entries of this micro-batch.
            count: number of entries of the global batch, ().
        """
        trainer = self.trainer_or_none
        parts = num_ranks() * (1 if trainer is None else trainer.accumulate_grad_batches)
        return total * (parts / count.to(total))

    # ---- evaluation --------------------------------------------------------------------------

    def evaluate(self, batch: Batch, split: Split) -> None:
        """Score the real rows of a batch, ignoring filler rows."""
        raise NotImplementedError(f"{type(self).__name__} must implement evaluate")

    def log_scores(self, split: Split) -> None:
        """Log the metrics of a whole split, unless `evaluate` logs them."""

    def reset_scores(self) -> None:
        """Discard the sums of `evaluate`, also those of an evaluation that ended with an error."""
        self._sums.zero_()

    def add_to_sums(self, *values: Tensor) -> None:
        """Add to the first sums of an evaluation, in float64."""
        added = torch.stack([x.detach().double() for x in values])
        self._sums[: len(values)] += added.to(self._sums)

    def summed(self) -> Tensor:
        """Return the sums of an evaluation over all ranks, (num_sums,) float64."""
        return sum_over_ranks(self._sums.to(self.device, copy=True))

    def may_omit(self, metric: str) -> bool:
        """Whether some validations of this run log a metric, such as val/score, and others not."""
        return False

    def is_final(self, split: Split) -> bool:
        """Whether `split` is scored by `test`; a test split can also be scored during training."""
        trainer = self.trainer_or_none
        return split == "test" and (trainer is None or trainer.state.fn != "fit")

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Score one batch of the validation split."""
        self.evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Score one batch of the test split."""
        self.evaluate(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Raise; a subclass with predictions returns those of the real rows of a batch.

        Raises:
            ValueError: the task has no predictions.
        """
        raise ValueError(
            f"{type(self).__name__} has no predictions: its scores are those of the command test"
        )

    def finish_predictions(self, table: Any) -> Any:
        """Return the table that `predict` writes, from the rows of all `predict_step` calls."""
        return table

    def prediction_files(self, table: Any) -> dict[str, str]:
        """Return additional text files of `predict`, by file-name ending."""
        return {}

    def on_validation_epoch_start(self) -> None:
        """Discard what an interrupted evaluation has left, and the scores of the last validation.

        Otherwise Lightning's callbacks, such as early stopping, would count a score that this
        validation omits (`may_omit`) again.
        """
        self.reset_scores()
        scores = self.trainer.callback_metrics
        for name in [name for name in scores if name.startswith("val/")]:
            del scores[name]

    def on_test_epoch_start(self) -> None:
        """Discard what an interrupted evaluation has left."""
        self.reset_scores()

    def on_validation_epoch_end(self) -> None:
        """Log the metrics of the validation split and, if requested, of the test split."""
        self.log_scores("val")
        if self.score_test is not None and not self.trainer.sanity_checking:
            self.score_test()

    def on_test_epoch_end(self) -> None:
        """Log the metrics of the test split."""
        self.log_scores("test")

    # ---- set-up ------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Validate sizes and the length of the run; compile the model if requested.

        Raises:
            ValueError: `trainer.max_steps` is missing, or exceeds the schedule; there is nothing to
                anneal; or the model was built for other data.
        """
        check_sizes(self, self.datamodule)
        if self.compile_model:
            self.model.compile()
        if stage != "fit":
            return
        self.annealing.check(self.model)
        check_trainer(self.trainer)
        max_steps = self.trainer.max_steps
        length, warmup = self._lengths()
        check_schedule(self.schedule, total_steps=length, warmup_steps=warmup)
        if warmup != self.warmup_steps:
            self.print_line(
                f"warm-up scaled: warmup_steps {self.warmup_steps} is not below max_steps "
                f"{max_steps}; the schedule ends with the run, warm-up steps: {warmup}"
            )
        elif 0 < max_steps <= warmup:
            self.print_line(
                f"max_steps {max_steps} ends within the warm-up of {warmup} steps: for a complete "
                "schedule set --model.init_args.schedule_steps null"
            )
        if self.schedule not in OPEN_ENDED and max_steps > length:
            raise ValueError(
                f"trainer.max_steps {max_steps} exceeds schedule_steps {length}: also set "
                f"--model.init_args.schedule_steps {max_steps}, or use schedule 'constant'"
            )

    def configure_model(self) -> None:
        """Shard the parameters over the ranks if the strategy requires it."""
        if self.device_mesh is not None:
            shard(self.model, self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Optimizer:
        """Return AdamW over all parameters; learning rate and beta1 are set before every step."""
        return self.make_optimizer(AdamW, ordered_parameters(self).values())

    def on_fit_start(self) -> None:
        """Check the optimiser that a subclass configures.

        Raises:
            ValueError: it has a scheduler, learning rates or betas, which the task would replace.
        """
        remedy = f"{type(self).__name__} sets lr and betas of all parameters before every step"
        if self.trainer.lr_scheduler_configs:
            raise ValueError(
                f"configure_optimizers returned a learning-rate scheduler, but {remedy}: return "
                "the optimiser only, and set schedule or override `scheduled`"
            )
        own = {"lr": self.lr, "betas": tuple(self.betas)}
        for group in (g for optimizer in self.trainer.optimizers for g in optimizer.param_groups):
            for name, value in own.items():
                given = group.get(name, value)
                if (tuple(given) if name == "betas" else given) != value:
                    raise ValueError(
                        f"configure_optimizers returned parameters with {name} {given}, but "
                        f"{remedy}: use {name}=self.{name}"
                    )

    def make_optimizer(self, kind: Callable[..., Optimizer], trained: Iterable[Any]) -> Optimizer:
        """Return an optimiser of parameters or parameter groups, with the task's settings.

        It keeps `eps` and `weight_decay` when it loads the state of a run with others.
        """
        betas = (self.betas[0], self.betas[1])
        settings = {"eps": self.eps, "weight_decay": self.weight_decay}
        optimizer = kind(trained, lr=self.lr, betas=betas, **settings)
        own = [{name: group[name] for name in settings} for group in optimizer.param_groups]

        def keep(loaded: Optimizer) -> None:
            for group, values in zip(loaded.param_groups, own, strict=False):  # others may follow
                group.update(values)

        optimizer.register_load_state_dict_post_hook(keep)
        return optimizer

    def _lengths(self) -> Lengths:
        """Return the lengths of the schedule and of its warm-up in this run."""
        return lengths_of_run(self.trainer.max_steps, self.schedule_steps, self.warmup_steps)

    def is_head(self, name: str) -> bool:
        """Whether an entry of the state dict belongs to one of `heads`."""
        return name.startswith(tuple(f"model.{head}." for head in self.heads))

    # ---- randomness --------------------------------------------------------------------------

    def random_key(self, batch: Batch) -> RandomKey:
        """Return the key of all counter-based random draws for this batch.

        In evaluation the step is 0, so that a sample has the same draws in every pass.
        """
        step = self.trainer.global_step if self.training else 0
        return RandomKey(self.seed, step, batch["sample_ids"])

    def reseed(self, micro_step: int) -> None:
        """Seed torch's generators (dropout outside attention) for one micro-batch of this rank."""
        torch.manual_seed(mix_integers(self.seed, micro_step, self.global_rank) >> 1)

    def on_train_start(self) -> None:
        """Discard what an interrupted step has left; set the current step on all layers.

        Raises:
            ValueError: data of another package end an epoch within an optimiser step.
        """
        check_epoch(self.trainer)
        self._window.clear()
        self._update_priors(apply=False)
        self._set_step(self.trainer.global_step)

    def _set_step(self, step: int) -> None:
        """Update everything that depends on the step, and log it after an optimiser step."""
        for name, value in self.annealing.set_step(self, step).items():
            if step > self.trainer.global_step:
                self.log(name, value)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Seed the generators, also for the order of the next epoch of another package's data."""
        check_batch(batch, self.datamodule)
        counter: Any = self.trainer.fit_loop.epoch_loop.batch_progress.total
        self._micro_step = counter.processed
        self.reseed(self._micro_step)

    # ---- one optimiser step ------------------------------------------------------------------

    def on_validation_batch_start(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Check a batch of an evaluation."""
        check_batch(batch, self.datamodule)

    on_test_batch_start: Any = on_validation_batch_start
    on_predict_batch_start: Any = on_validation_batch_start

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of one micro-batch. Shape ()."""
        loss = self.batch_loss(batch)
        self._window.append((self._micro_step, batch, loss.detach()))
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients.

        Raises:
            NonFiniteError: PyTorch's anomaly detection found NaN.
        """
        try:
            super().backward(loss, *args, **kwargs)
        except RuntimeError as error:
            if "returned nan values" not in str(error):
                raise
            raise NonFiniteError(self._describe_anomaly(str(error))) from error

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Check that losses and gradients are finite, set learning rate and beta1, log the loss.

        The ranks also agree on whether one of them received a stop signal.

        Raises:
            NonFiniteError: on every rank, if a loss or gradient of any rank is not finite. With
                loss scaling, the scaler skips the step after a gradient overflow; the tenth
                overflow in a row raises.
        """
        wide = [loss.to(compute_dtype(loss)) for *_, loss in self._window]
        losses = torch.stack(wide)
        largest = largest_gradient(self.parameters()).to(losses.device)
        bad = torch.stack([~losses.isfinite().all(), ~largest.isfinite()]).to(losses)
        stop = bad.new_tensor(stop_counts(self.stop_requested))
        summed = sum_over_ranks(torch.cat([losses.mean()[None], bad, stop]))
        _, bad_losses, bad_gradients, *stops = summed.tolist()
        self.stop_agreed = agreed_signal(stops)
        self._overflows_in_a_row = self._overflows_in_a_row + 1 if bad_gradients else 0
        if bad_losses or (bad_gradients and not self._scaler_may_skip()):
            raise NonFiniteError(self._describe_non_finite(bool(bad_losses)))
        self._window.clear()
        self._apply_schedule(optimizer)
        self.log("train/loss", summed[0] / num_ranks(), prog_bar=True)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step the optimiser, then apply prior updates (M-step) and the annealed norm weights."""
        super().optimizer_step(*args, **kwargs)
        self._update_priors(apply=self._overflows_in_a_row == 0)
        self._set_step(self.trainer.global_step + 1)

    def _scaler_may_skip(self) -> bool:
        scaled = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        return scaled and self._overflows_in_a_row < MAX_OVERFLOWS_IN_A_ROW

    def scheduled(self) -> ScheduleValues:
        """Return the learning rate and beta1 of the next optimiser step."""
        length, warmup = self._lengths()
        return schedule_values(
            self.schedule,
            self.trainer.global_step,
            peak_lr=self.lr,
            total_steps=length,
            warmup_steps=warmup,
            cycle_momentum=self.cycle_momentum,
        )

    def _apply_schedule(self, optimizer: Optimizer) -> None:
        values = self.scheduled()
        beta1 = self.betas[0] if values.beta1 is None else values.beta1
        for group in optimizer.param_groups:
            group["lr"], group["betas"] = values.lr, (beta1, self.betas[1])
        self.log_dict({"lr": values.lr, "beta1": beta1})

    def _update_priors(self, *, apply: bool) -> None:
        """Sum the M-step statistics over the ranks and apply them; discard them unless `apply`."""
        layers: list[Any] = [m for m in self.modules() if hasattr(m, "prior_statistics")]
        every = [(layer, layer.prior_statistics()) for layer in layers]
        collected = [(layer, statistics) for layer, statistics in every if statistics is not None]
        if not collected:
            return
        flat = sum_over_ranks(torch.cat([statistics.flatten() for _, statistics in collected]))
        if not apply:
            flat.zero_()
        parts = flat.split([statistics.numel() for _, statistics in collected])
        for (layer, statistics), part in zip(collected, parts, strict=True):
            layer.apply_prior_update(part.view_as(statistics))

    # ---- error reports -----------------------------------------------------------------------

    def _describe_non_finite(self, loss_is_bad: bool) -> str:
        """Return one line for every rank: step, samples, first bad module of each bad rank."""
        mine = self._describe_my_window() if loss_is_bad else None
        reports = [report for report in gather_objects(mine) if report is not None]
        step = self.trainer.global_step
        if reports:
            return f"the loss is not finite at step {step}: {'; '.join(reports)}. {_UNCHANGED}"
        ids = gather_objects([i for _, b, _ in self._window for i in b["sample_ids"].tolist()])
        name = next((n for n in gather_objects(first_bad_gradient(self)) if n), None)
        scaled = (
            f" in {MAX_OVERFLOWS_IN_A_ROW} steps in a row"
            if self._overflows_in_a_row >= MAX_OVERFLOWS_IN_A_ROW
            else ""
        )
        return (
            f"a gradient is not finite at step {step}{scaled}: first bad parameter {name}, samples "
            f"{describe_samples(i for r in ids for i in r)}. {_UNCHANGED}"
        )

    def _describe_anomaly(self, found: str) -> str:
        """Return one line for this rank without communication: other ranks are in backward."""
        step, mine = self.trainer.global_step, self._describe_my_window()
        if mine is not None:
            return f"the loss is not finite at step {step}: {mine}. {_UNCHANGED}"
        samples = describe_samples(self._window[-1][1]["sample_ids"].tolist())
        return (
            f"a gradient is not finite at step {step}: {found.rstrip('.')}, samples {samples}. "
            f"{_UNCHANGED}"
        )

    def _describe_my_window(self) -> str | None:
        for micro_step, batch, loss in self._window:
            if bool(loss.isfinite()):
                continue

            def run(micro_step: int = micro_step, batch: Batch = batch) -> None:
                self.reseed(micro_step)
                with self.trainer.precision_plugin.forward_context():
                    self.batch_loss(batch)

            module = first_bad_module(self, run) or "none (the loss itself)"
            samples = describe_samples(batch["sample_ids"].tolist())
            return (
                f"rank {self.global_rank}, loss {float(loss)}, first bad module {module}, "
                f"samples {samples}"
            )
        return None

    # ---- checkpoints -------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store training state other than weights and optimiser."""
        checkpoint["training"] = {
            "overflows_in_a_row": self._overflows_in_a_row,
            "accumulate_grad_batches": self.trainer.accumulate_grad_batches,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the training state.

        Raises:
            DataError: the data differ from those of training; Lightning compares them only after
                the weights, whose shapes depend on the data.
            ValueError: training resumes with a different number of micro-batches per step, which
                would change the position in the data, counted in micro-batches.
        """
        state = checkpoint.get("training", {})
        self._overflows_in_a_row = state.get("overflows_in_a_row", 0)
        trainer, data = self.trainer_or_none, self.datamodule
        if data is not None and type(data).__qualname__ in checkpoint:
            data.load_state_dict(checkpoint[type(data).__qualname__])
        if trainer is None or not trainer.training:
            return
        now = trainer.accumulate_grad_batches
        before = state.get("accumulate_grad_batches", now)  # converted weights have no position
        if before != now:
            raise ValueError(
                f"the checkpoint was written with trainer.accumulate_grad_batches {before}, "
                f"received {now}: resume with {before}"
            )
