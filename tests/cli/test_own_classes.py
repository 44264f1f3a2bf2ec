"""Models and data of a module of the user: what a run of them requires is one line."""

from __future__ import annotations

import pytest

from lit_probattn.base import allowed_code
from tests.support.helpers import error_of
from tests.support.runs import arguments, run

MODULE = """
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from datamodules import Synthetic

class Model(pl.LightningModule):
    def __init__(self, num_classes: int, seed: int = 0):
        super().__init__()
        self.head = torch.nn.Linear(1, num_classes)

    def training_step(self, batch, batch_idx):
        return self.head(batch["target"][:, None].float()).logsumexp(-1).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

class Data(pl.LightningDataModule):
    num_classes, vocab_size, max_seq_len = 10, 16, 32

    def __init__(self, seed: int = 0, numbered: bool = True):
        super().__init__()
        self.numbered = numbered
        self.ours = Synthetic(num_train=8, num_val=8, min_length=9, max_length=20, vocab_size=16)

    def setup(self, stage=None):
        self.ours.setup()

    def _collate(self, rows):
        batch = self.ours.collate()(rows)
        return batch if self.numbered else {k: v for k, v in batch.items() if k != "sample_ids"}

    def train_dataloader(self):
        return DataLoader(self.ours.split("train"), 4, collate_fn=self._collate)

    def val_dataloader(self):
        return DataLoader(self.ours.split("val"), 4, collate_fn=self._collate)
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Return the command line of a run of a class of a module in the working folder."""
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(allowed_code.VARIABLE, "")

    def make(*more):
        short = ("--trainer.max_steps", "1", "--trainer.val_check_interval", "1")
        return arguments("fit", tmp_path, *short, "--allow_code", "mine", *more)

    return make


def test_a_model_that_is_no_task_is_refused(command):
    line = error_of(command("--model", "mine.Model"))
    assert "model.class_path" in line
    assert "mine.Model" in line
    assert "lit_probattn.tasks.Task" in line
    assert "enable_checkpointing" in line


@pytest.mark.parametrize("flag", ["enable_checkpointing=false", "fast_dev_run=true"])
def test_another_model_trains_without_checkpoints(command, flag):
    run(command("--model", "mine.Model", f"--trainer.{flag}"))


def test_several_processes_that_would_each_read_all_data_are_refused(command):
    two = ("--trainer.devices", "2", "--trainer.strategy", "ddp")
    line = error_of(command("--data", "mine.Data", *two))
    assert "mine.Data" in line
    assert "trainer.use_distributed_sampler" in line


def test_batches_without_numbers_of_samples_are_refused(command):
    line = error_of(command("--data", "{class_path: mine.Data, init_args: {numbered: false}}"))
    assert line.startswith("error: Data: ")
    assert "sample_ids" in line
