"""What an interrupted evaluation or step has summed is not part of the next one, in every task."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lit_probattn.base.config_files import named_files
from lit_probattn.configs import compose, instantiate, link_sizes
from tests.datamodules.images.made import write_images
from tests.datamodules.lra.files import write_pairs
from tests.datamodules.text import made
from tests.datamodules.text.fine_tuning import made as tuning
from tests.tasks.contract.test_options import TASKS
from tests.tasks.tiny import trainer

# Task -> its configuration, the option that names its files, what writes them, other settings.
Row = tuple[str, str, Callable[[Path], object], dict[str, object]]
SMALL: dict[str, object] = {"data.init_args.batch_size": 4, "data.init_args.eval_batch_size": 2}
SHORT: dict[str, object] = {"data.init_args.eval_max_tokens": 32}
ROWS: dict[str, Row] = {
    "DecisionMaking": ("d4rl", "", Path, SMALL),
    "ImageClassifier": ("imagenet_swin_tiny", "data_dir", write_images, SMALL),
    "LanguageModeling": ("wikitext103_small", "data_dir", made.write, SMALL),
    "MaskedLanguageModeling": ("masked_lm", "data_dir", made.write, SMALL),
    "PairClassifier": ("lra_retrieval", "data_dir", write_pairs, SMALL),
    "QuestionAnswering": ("squad", "path", tuning.write_squad, SMALL),
    "ReleasedLanguageModeling": ("wikitext103_small", "data_dir", made.write, SMALL),
    "SequenceClassifier": ("lra_listops", "data_dir", Path, SMALL),
    "SeriesClassifier": ("uea", "", Path, {**SMALL, "model.init_args.norm": "layer"}),
    "TextClassifier": ("mnli", "path", tuning.write_mnli, SMALL),
    "Translation": ("translation", "", Path, SHORT),
}
EVERY_TASK = pytest.mark.parametrize("name", TASKS)


class Stop(Exception):
    """The interruption."""


class StopAfter(pl.Callback):
    """Stops after a batch."""

    def __init__(self, number: int) -> None:
        self.number = number

    def _stop(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int, *_: Any):
        if index == self.number:
            raise Stop

    on_train_batch_end = on_validation_batch_end = on_test_batch_end = _stop


def built(name: str, folder: Path) -> tuple[pl.LightningModule, pl.LightningDataModule]:
    """A tiny task, with priors by the M-step, and its data."""
    config, option, write, settings = ROWS[name]
    write(folder)
    files = [named_files("task")[f"tiny/{config}"], named_files("attention")["mgk_soft_e"]]
    task = {"model.class_path": f"lit_probattn.tasks.{name}"}
    place = {f"data.init_args.{option}": str(folder)} if option else {}
    found = compose(files, {**settings, **task, **place})
    data = instantiate(pl.LightningDataModule, found["data"])
    link_sizes(found["model"], data)
    torch.manual_seed(0)
    return instantiate(pl.LightningModule, found["model"]), data


@EVERY_TASK
def test_an_evaluation_does_not_count_an_interrupted_one(name, tmp_path):
    task, data = built(name, tmp_path)
    for stage in ("validate", "test"):

        def scores(*callbacks, stage=stage):
            run = trainer(limit_val_batches=3, limit_test_batches=3, callbacks=list(callbacks))
            return getattr(run, stage)(task, data, verbose=False)

        whole = scores()
        with pytest.raises(Stop):
            scores(StopAfter(1))
        assert scores() == whole


@EVERY_TASK
def test_a_step_does_not_count_an_interrupted_one(name, tmp_path):
    task, data = built(name, tmp_path)
    other = copy.deepcopy(task)

    def trained(module, *callbacks):
        run = trainer(1, accumulate_grad_batches=2, limit_val_batches=0, callbacks=list(callbacks))
        run.fit(module, data)
        return {**run.callback_metrics, **module.state_dict()}

    with pytest.raises(Stop):
        trained(other, StopAfter(0))
    torch.testing.assert_close(trained(other), trained(task), rtol=0, atol=0)
