"""Everything that Lightning keeps to itself and that we use all the same: its one home.

Each use has a test in `tests/training/test_lightning_internals.py` that fails when Lightning
changes it, and a test of the package refuses such names anywhere else.
"""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.cli import _InstantiatorFn as ModuleInstantiator
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from lit_probattn.base.torch_internals import loopback_store

__all__ = [
    "BareCLI",
    "ModuleInstantiator",
    "TrainingBar",
    "form_process_group",
    "leave_out_sigterm_question",
    "meet_on_loopback",
    "set_logged_step",
    "shard_over",
    "validate_now",
    "write_step_metrics",
]


def set_logged_step(trainer: pl.Trainer, step: int) -> None:
    """Set the step number that loggers are given next, which Lightning counts by itself."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = step


def write_step_metrics(trainer: pl.Trainer) -> None:
    """Hand the metrics of the present training step to the loggers now."""
    trainer._logger_connector.update_train_step_metrics()


def validate_now(trainer: pl.Trainer) -> None:
    """Run the validation that Lightning runs after a training batch."""
    connector = trainer._logger_connector
    first_loop_iter = connector._first_loop_iter
    trainer.validating = True
    trainer.fit_loop.epoch_loop.val_loop.run()
    trainer.training = True
    connector._first_loop_iter = first_loop_iter


def leave_out_sigterm_question(trainer: pl.Trainer) -> None:
    """Spare the ranks Lightning's exchange about SIGTERM before every batch."""
    loop: Any = trainer.fit_loop.epoch_loop
    if hasattr(loop, "_broadcast_sigterm_tensor"):
        loop._broadcast_sigterm_tensor = lambda: None


def shard_over(strategy: ModelParallelStrategy, num_ranks: int) -> None:
    """Set how many ranks share the parameters, before the strategy forms its mesh."""
    strategy._data_parallel_size = num_ranks


def form_process_group(strategy: ModelParallelStrategy) -> None:
    """Let the ranks find each other, without a model and a mesh."""
    strategy._setup_distributed()


def meet_on_loopback(trainer: pl.Trainer) -> Any:
    """Have the ranks that Lightning starts on this one machine meet where no other can listen.

    Returns:
        What must be kept as long as the ranks live; None where they meet in another way.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if (
        isinstance(environment, LightningEnvironment)
        and isinstance(trainer.strategy.launcher, _SubprocessScriptLauncher)
        and trainer.num_nodes == 1
        and "LOCAL_RANK" not in os.environ  # a rank that was started by the first
        and environment.main_address == "127.0.0.1"
    ):
        return loopback_store(environment.main_port)
    return None


class TrainingBar(RichProgressBar):
    """A progress bar that does not count epochs."""

    def _get_train_description(self, current_epoch: int) -> str:
        return "training"


class BareCLI(LightningCLI):
    """LightningCLI that takes nothing from checkpoints, and constructs in our own way."""

    def add_instantiators(self) -> None:
        """Register what constructs model and data."""
        raise NotImplementedError

    def part(self, config: Any, key: str) -> Any:
        """Return a part of a configuration of the present command, such as `trainer`."""
        return self._get(config, key)

    def command_parser(self) -> Any:
        """Return the parser of the present command."""
        return self._parser(self.subcommand)

    def _parse_ckpt_path(self) -> None:
        """The configuration decides, not what a checkpoint remembers of another one."""

    def _add_instantiators(self) -> None:
        self.add_instantiators()
