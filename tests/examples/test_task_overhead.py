"""The overhead of `fit` is measured on steps that compute the same loss."""

from __future__ import annotations

import pandas as pd
import torch

from examples.studies.task_overhead import BothLoops, main
from lit_probattn.models.classifiers import Classifier


def test_rows_of_both_loops(tmp_path, sketches):
    words = "--variants smgk --lengths 32 --batch 2 --steps 7 --out"
    assert main([*words.split(), str(tmp_path)]) == 0
    row = pd.read_csv(tmp_path / "rows.csv").iloc[0]
    assert (row["variant"], row["tokens"], row["batch"]) == ("smgk", 32, 2)
    assert 0 < row["time_over_plain_p20"] <= row["time_over_plain"] <= row["time_over_plain_p80"]


def test_another_loss_is_an_error(monkeypatch):
    forward = Classifier.forward

    def off_by_one(self, *args, **kwargs):
        return forward(self, *args, **kwargs) + torch.arange(10.0)

    start = BothLoops.on_train_start

    def changed(self, trainer, pl_module):
        start(self, trainer, pl_module)
        self.model.forward = off_by_one.__get__(self.model)

    monkeypatch.setattr(BothLoops, "on_train_start", changed)
    words = "--variants softmax --lengths 32 --batch 2 --steps 6"
    assert main(words.split()) == 1
