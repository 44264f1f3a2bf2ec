"""Data of other packages have finite epochs, as have the first batches of `overfit_batches`."""

from __future__ import annotations

from itertools import chain

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lit_probattn.training.checkpoints import CheckedCheckpointIO, list_checkpoints, step_of
from lit_probattn.training.saving import RunCheckpoint
from tests.tasks.tiny import data, softmax, task, trainer


class Shuffled(pl.LightningDataModule):
    """The tiny training split, by PyTorch's own loader: 48 samples, 6 batches an epoch."""

    num_classes, vocab_size, max_seq_len = 5, 13, 32

    def setup(self, stage=None):
        self.ours = data()
        self.ours.setup()

    def _loader(self, name, **options):
        return DataLoader(self.ours.split(name), 8, collate_fn=self.ours.collate(), **options)

    def train_dataloader(self):
        return self._loader("train", shuffle=True)

    def val_dataloader(self):
        return self._loader("val")


class Seen(Callback):
    """The samples of every micro-batch, and torch's random state when it starts."""

    def __init__(self):
        self.samples, self.states = [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.samples.append(batch["sample_ids"].tolist())

    def on_before_zero_grad(self, *_):
        self.states.append(torch.get_rng_state().numpy().tobytes())


def test_each_epoch_is_shuffled_anew():
    seen = Seen()
    trainer(24, callbacks=[seen]).fit(task(softmax), Shuffled())
    epochs = [tuple(chain(*seen.samples[start : start + 6])) for start in range(0, 24, 6)]
    assert all(sorted(epoch) == list(range(48)) for epoch in epochs)
    assert len(set(epochs)) == 4


def test_each_pass_over_the_same_batches_has_its_own_random_numbers():
    seen = Seen()
    trainer(6, overfit_batches=2, callbacks=[seen]).fit(task(softmax, dropout=0.1), data())
    assert len({tuple(samples) for samples in seen.samples}) == 2
    assert len(set(seen.states)) == 6


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (None, "v4 c4 v8 c8 v12 c12 v16 c16"),
        (1, "v4 c4 c8 v10 c12 v16 c16"),  # Lightning counts from the beginning of each epoch
        (2, "c4 c8 v10 c12 c16"),
    ],
)
def test_steps_beyond_the_first_epoch_are_saved_after_their_validation(tmp_path, every, expected):
    """Validations after 4 micro-batches, of which 6 are an epoch, or after 4 of `every` epochs."""
    order = []

    class Order(Callback):
        def on_validation_end(self, trainer, *_):
            order.append(f"v{trainer.global_step}")

        def on_save_checkpoint(self, trainer, *_):
            order.append(f"c{trainer.global_step}")

    checkpoint = RunCheckpoint(tmp_path, every_n_steps=4, monitor="val/none")
    module = task(softmax)
    module.may_omit = lambda metric: True
    options = {"val_check_interval": 4, "plugins": [CheckedCheckpointIO()]}
    options |= {"enable_checkpointing": True, "callbacks": [Order(), checkpoint]}
    options["check_val_every_n_epoch"] = every
    trainer(16, **options).fit(module, Shuffled())
    assert " ".join(order) == expected
    assert [step_of(path) for path in list_checkpoints(tmp_path, "step")] == [16, 12]


def test_an_epoch_that_ends_within_a_step_is_refused():
    with pytest.raises(ValueError, match=r"6 micro-batches .* 4"):
        trainer(6, accumulate_grad_batches=4).fit(task(softmax), Shuffled())
