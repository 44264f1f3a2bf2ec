"""Classes of pairs: one sequence, what is logged and written, and that it learns."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import torch

from lit_probattn.tasks import TextClassifier
from tests.datamodules.text.fine_tuning import made
from tests.datamodules.text.fine_tuning.test_pairs import data_of
from tests.support.runs import metrics, only_version, run
from tests.tasks.tiny import command, softmax, trainer


@pytest.mark.parametrize("types", [0, 2])
def test_the_loss_is_that_of_the_model_with_its_types(types):
    torch.manual_seed(1)
    sizes = {"vocab_size": 13, "max_seq_len": 8, "embed_dim": 8, "head_dim": 4, "num_layers": 1}
    task = TextClassifier(softmax, num_classes=3, num_token_types=types, mlp_dim=8, **sizes)
    task = task.eval().double()
    batch = {
        "inputs": torch.randint(13, (2, 8)),
        "key_mask": torch.ones(2, 8, dtype=torch.bool),
        "token_types": (torch.arange(8) > 3).long().expand(2, 8),
        "target": torch.tensor([2, 0]),
        "sample_ids": torch.arange(2),
    }
    more = {"token_types": batch["token_types"]} if types else {}
    logits = task.model(batch["inputs"], key_mask=batch["key_mask"], **more)
    expected = -sum(logits.log_softmax(-1)[row, target] for row, target in enumerate((2, 0))) / 2
    torch.testing.assert_close(task.batch_loss(batch), expected, rtol=1e-12, atol=0)


def test_mismatched_is_predicted(tmp_path):
    data = data_of(made.write_mnli(tmp_path / "text"), "mnli")
    sizes = {"vocab_size": data.vocab_size, "max_seq_len": data.max_seq_len, "mlp_dim": 8}
    task = TextClassifier(softmax, num_classes=3, embed_dim=8, head_dim=4, num_layers=1, **sizes)
    found = [x for batch in trainer().predict(task, data) for x in batch["target"].tolist()]
    assert found == [n % 3 for n in range(200, 209) if n != 201]


@pytest.mark.slow  # commands: tests/convert/test_transformers_tuning.py
def test_mismatched_is_tested_and_predicted_by_commands(tmp_path):
    made.write_mnli(tmp_path / "text", train=48)
    data = {"path": tmp_path / "text", "cache_dir": tmp_path / "cache"}
    short = ("--trainer.max_steps", "2", "--trainer.val_check_interval", "2")
    last = ("--ckpt_path", "last")
    for name, more in (("fit", ()), ("test", last), ("predict", last)):
        run(command(name, "mnli", tmp_path, *short, *more, **data))
    version = only_version(tmp_path)
    assert any(row["val/accuracy"] for row in metrics(version))
    report = json.loads((version / "test-step-00000002.json").read_text(encoding="utf-8"))
    assert report["num_samples"] == 8
    assert not report["selected_on_test"]
    assert "test/accuracy" in report
    table = pd.read_parquet(version / "predictions-step-00000002.parquet")
    assert table["target"].tolist() == [n % 3 for n in range(200, 209) if n != 201]
    assert not list(version.glob("predictions-*.json"))
