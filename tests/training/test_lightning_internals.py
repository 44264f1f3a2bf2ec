"""What Lightning keeps to itself and we use: mend `training/lightning_internals.py` on failure."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import ModelParallelStrategy

from lit_probattn.training import lightning_internals as internals
from tests.support.helpers import LOOPBACK, listening_on
from tests.tasks import tiny


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


class Probe(pl.Callback):
    """Calls the functions in a training, and notes what they do."""

    def __init__(self):
        self.written, self.validations, self.asked = [], 0, []

    def on_train_start(self, trainer, pl_module):
        internals.leave_out_sigterm_question(trainer)
        self.asked.append(trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor())

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        internals.set_logged_step(trainer, 7)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        before = trainer._logger_connector._first_loop_iter
        internals.write_step_metrics(trainer)
        internals.validate_now(trainer)
        assert trainer.training
        assert trainer._logger_connector._first_loop_iter == before

    def on_validation_end(self, trainer, pl_module):
        self.validations += trainer.validating


class Notes(pl.loggers.Logger):
    """Keeps what it is given."""

    name = version = "notes"

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, sorted(metrics)))

    def log_hyperparams(self, *args, **kwargs):
        pass


def test_the_trainer_in_a_training():
    probe, notes = Probe(), Notes()
    trainer = tiny.trainer(1, callbacks=[probe], logger=notes, log_every_n_steps=1)
    trainer.fit(tiny.task(), datamodule=tiny.data())
    assert probe.validations == 1
    assert probe.asked == [None]
    step, names = notes.rows[0]  # written by the callback, one step after the number that was set
    assert step == 7
    assert "train/loss" in names


def test_lightning_asks_about_sigterm_by_this_method():
    assert parameters(_TrainingEpochLoop._broadcast_sigterm_tensor) == ["self"]
    source = inspect.getsource(_TrainingEpochLoop)
    assert "self._broadcast_sigterm_tensor()" in source


def test_the_sharded_strategy():
    strategy = ModelParallelStrategy()
    assert strategy._data_parallel_size == "auto"
    internals.shard_over(strategy, 3)
    assert strategy._data_parallel_size == 3
    assert parameters(ModelParallelStrategy._setup_distributed) == ["self"]
    setup = inspect.getsource(ModelParallelStrategy.setup_environment)
    assert "self._setup_distributed()" in setup
    assert 'if self._data_parallel_size == "auto"' in setup
    assert strategy.lightning_module is None


def test_the_description_of_the_progress_bar():
    assert parameters(RichProgressBar._get_train_description) == ["self", "current_epoch"]
    assert "self._get_train_description(" in inspect.getsource(RichProgressBar)
    assert internals.TrainingBar()._get_train_description(3) == "training"


def test_the_hooks_of_the_command_line():
    assert parameters(LightningCLI._get) == ["self", "config", "key", "default"]
    assert parameters(LightningCLI._parser) == ["self", "subcommand"]
    source = inspect.getsource(LightningCLI)
    for hook in ("_parse_ckpt_path", "_add_instantiators"):
        assert parameters(getattr(LightningCLI, hook)) == ["self"]
        assert f"self.{hook}()" in source


def test_the_instantiator_remembers_the_arguments():
    class Model(pl.LightningModule):
        def __init__(self, size: int = 1):
            super().__init__()
            self.save_hyperparameters()

    config = {"model": {"class_path": "made.Model", "init_args": {"size": 3}}}
    cli = SimpleNamespace(_dump_config=lambda: None, config_dump=config)
    make = internals.ModuleInstantiator(cli=cli, key="model")
    assert make.key == "model"
    model = make(Model, size=3, applied_instantiation_links={"model.init_args.other": 5})
    assert model.hparams["_class_path"] == "made.Model"
    assert (model.hparams["size"], model.hparams["other"]) == (3, 5)


def test_a_task_knows_whether_it_has_a_trainer():
    task = tiny.task()
    assert task.trainer_or_none is None
    with pytest.raises(RuntimeError):
        _ = task.trainer
    task.trainer = trainer = tiny.trainer(1)
    assert task.trainer_or_none is trainer
    assert task.device_mesh is None


@pytest.mark.parametrize(("strategy", "on_loopback"), [("ddp", True), ("ddp_fork", False)])
def test_ranks_of_one_machine_meet_on_loopback(strategy, on_loopback, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)
    store = internals.meet_on_loopback(trainer)
    port = trainer.strategy.cluster_environment.main_port
    assert listening_on(port) == [LOOPBACK] * on_loopback
    assert internals.returns_results(trainer) is not on_loopback
    del store
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert internals.meet_on_loopback(trainer) is None
