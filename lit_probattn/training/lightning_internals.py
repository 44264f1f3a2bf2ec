"""All uses of private Lightning APIs.

Each use has a test in `tests/training/test_lightning_internals.py` that fails when Lightning
changes it, and a test of the package rejects such names in any other module.
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
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from lit_probattn.base.torch_internals import loopback_store

__all__ = [
    "BareCLI",
    "ModuleInstantiator",
    "TrainingBar",
    "form_process_group",
    "leave_out_sigterm_question",
    "meet_on_loopback",
    "returns_results",
    "set_logged_step",
    "shard_over",
    "validate_now",
    "write_step_metrics",
]


def set_logged_step(trainer: pl.Trainer, step: int) -> None:
    """Set the step number of the next log entries, which Lightning counts separately."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = step


def write_step_metrics(trainer: pl.Trainer) -> None:
    """Write the metrics of the current training step to the loggers now."""
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
    """Disable Lightning's exchange between ranks about SIGTERM before every batch."""
    loop: Any = trainer.fit_loop.epoch_loop
    if hasattr(loop, "_broadcast_sigterm_tensor"):
        loop._broadcast_sigterm_tensor = lambda: None


def shard_over(strategy: ModelParallelStrategy, num_ranks: int) -> None:
    """Set the number of ranks that share the parameters, before the strategy forms its mesh."""
    strategy._data_parallel_size = num_ranks


def form_process_group(strategy: ModelParallelStrategy) -> None:
    """Form the process group without a model and a mesh."""
    strategy._setup_distributed()


def returns_results(trainer: pl.Trainer) -> bool:
    """Whether processes train and return weights to this one: `ddp_spawn`, `ddp_fork`."""
    return isinstance(trainer.strategy.launcher, _MultiProcessingLauncher)


def meet_on_loopback(trainer: pl.Trainer) -> Any:
    """Let the ranks that Lightning starts on this machine rendezvous on the loopback interface.

    Returns:
        An object to keep alive as long as the ranks; None if they rendezvous differently.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if (
        isinstance(environment, LightningEnvironment)
        and isinstance(trainer.strategy.launcher, _SubprocessScriptLauncher)
        and trainer.num_nodes == 1
        and "LOCAL_RANK" not in os.environ  # not a rank started by the first one
        and environment.main_address == "127.0.0.1"
    ):
        return loopback_store(environment.main_port)
    return None


class TrainingBar(RichProgressBar):
    """A progress bar without epochs."""

    def _get_train_description(self, current_epoch: int) -> str:
        return "training"


class BareCLI(LightningCLI):
    """LightningCLI without settings from checkpoints, and with replaceable instantiation."""

    def add_instantiators(self) -> None:
        """Register the classes that instantiate model and data."""
        raise NotImplementedError

    def part(self, config: Any, key: str) -> Any:
        """Return a part of the current command's configuration, such as `trainer`."""
        return self._get(config, key)

    def command_parser(self) -> Any:
        """Return the parser of the current command."""
        return self._parser(self.subcommand)

    def _parse_ckpt_path(self) -> None:
        """Do nothing: hyperparameters of a checkpoint do not override the configuration."""

    def _add_instantiators(self) -> None:
        self.add_instantiators()
