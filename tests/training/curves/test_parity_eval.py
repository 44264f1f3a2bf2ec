"""Evaluation as in the authors' code, in real runs: which samples, which number, after a kill."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from datamodules.core.order import RotatingOrder
from lit_probattn.cli.app import main
from lit_probattn.tasks import SequenceClassifier
from tests.support.paths import ROOT
from tests.support.runs import (
    fingerprint,
    in_child,
    in_ranks,
    kill_me,
    metrics,
    only_version,
    run,
    write_attention,
)

# 40 validation and 42 test samples, batches of 8: a validation of 3 batches moves on by 24.
BATCH, BATCHES, NUM_VAL, SEED = 8, 3, 40, 0
TWO = ("--trainer.devices", "2", "--trainer.strategy", "ddp")
PARITY = ("--data.init_args.parity_eval", str(BATCHES))
# Validations after steps 4, 8, 12 and, out of turn, 14.
LENGTH = ("--trainer.max_steps", "14", "--trainer.val_check_interval", "4")


def command(folder: Path, *more: str, name: str = "fit") -> list[str]:
    files = ["--config", str(ROOT / "configs/tasks/tiny/lra_listops.yaml")]
    files += ["--config", write_attention(folder, "SoftmaxAttention", dropout=0.2)]
    place = ["--run.root", str(folder / "runs"), "--trainer.accelerator", "cpu"]
    place += ["--data.init_args.cache_dir", str(folder.parent / "cache")]
    if "--trainer.devices" not in more:
        place += ["--trainer.devices", "1"]
    quiet = ["--trainer.enable_progress_bar", "false", "--model.init_args.lr", "0.01"]
    return [name, *files, *place, *quiet, *LENGTH, *PARITY, *more]


def stream() -> Iterator[int]:
    """The authors' endless data set, written out: their order, then an order for every pass."""
    examples = list(range(NUM_VAL))
    place, passes = 0, 0
    orders = RotatingOrder(NUM_VAL, NUM_VAL, SEED, lambda: 0, 8, 0, 1)
    while True:
        if place >= len(examples):
            passes += 1
            examples = orders.samples_at(passes).tolist()
            place = 0
        yield examples[place]
        place += 1


def oracle(number: int) -> list[list[list[int]]]:
    """Samples of every batch of the first so many validations."""
    samples = stream()
    return [[[next(samples) for _ in range(BATCH)] for _ in range(BATCHES)] for _ in range(number)]


@pytest.fixture
def seen(monkeypatch):
    """What `evaluate` sees: by split and step, the samples and whether each one is right."""
    found: dict[tuple[str, int], list[tuple[int, bool]]] = {}
    evaluate = SequenceClassifier.evaluate

    def record(self, batch, split):
        if not self.trainer.sanity_checking:
            right = self(batch).argmax(-1) == batch["target"]
            rows = zip(batch["sample_ids"].tolist(), right.tolist(), strict=True)
            place = found.setdefault((split, self.trainer.global_step), [])
            place += [(sample, ok) for sample, ok in rows if sample >= 0]
        evaluate(self, batch, split)

    monkeypatch.setattr(SequenceClassifier, "evaluate", record)
    return found


def mean_of_batches(rows: list[tuple[int, bool]]) -> float:
    """Mean of the accuracies of batches of 8, as the authors' code takes it."""
    parts = [rows[first : first + BATCH] for first in range(0, len(rows), BATCH)]
    assert {len(part) for part in parts} == {BATCH}
    return float(np.mean([np.mean([right for _, right in part]) for part in parts]))


@pytest.mark.parametrize("rows", ["8", "5"], ids=["their batches", "other rows at a time"])
def test_validations_see_the_samples_of_the_oracle_and_say_its_number(tmp_path, seen, rows):
    run(command(tmp_path, "--data.init_args.eval_batch_size", rows))
    expected = oracle(4)
    logged = {row["step"]: row for row in metrics(only_version(tmp_path)) if row["val/accuracy"]}
    assert list(logged) == ["4", "8", "12", "14"]
    for number, step in enumerate((4, 8, 12, 14)):
        found = seen["val", step]
        assert [sample for sample, _ in found] == [i for part in expected[number] for i in part]
        told = float(logged[str(step)]["val/accuracy"])
        assert told == pytest.approx(mean_of_batches(found), abs=1e-6)
    assert sorted(seen["val", 4] + seen["val", 8])[0] != sorted(seen["val", 8])  # it moves on


SHORT = ("--trainer.max_steps", "2", "--trainer.val_check_interval", "2")


def test_the_incomplete_last_batch_of_the_test_split_is_left_out(tmp_path, seen):
    """42 samples: 5 batches of 8, during training, and at the end."""
    run(command(tmp_path, *SHORT, "--run.test_during_training", "all"))
    run(command(tmp_path, *SHORT, "--ckpt_path", "last", name="test"))
    (path,) = only_version(tmp_path).glob("test-*.json")
    told = json.loads(path.read_text(encoding="utf-8"))
    during, found = seen["test", 2], seen["test", 0]  # the command counts no steps
    assert during == found
    assert [sample for sample, _ in found] == list(range(40))
    assert told["num_samples"] == 40
    assert told["test/accuracy"] == pytest.approx(mean_of_batches(found), abs=1e-6)
    assert (told["parity_eval"], told["test_samples_left_out"]) == (BATCHES, 2)


def test_without_it_whole_splits_are_scored_and_nothing_is_said(tmp_path, seen):
    whole = (*SHORT, "--data.init_args.parity_eval", "null")
    run(command(tmp_path, *whole))
    run(command(tmp_path, *whole, "--ckpt_path", "last", name="test"))
    assert [sample for sample, _ in seen["val", 2]] == list(range(40))
    (path,) = only_version(tmp_path).glob("test-*.json")
    told = json.loads(path.read_text(encoding="utf-8"))
    assert told["num_samples"] == 42
    assert "parity_eval" not in told


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    run(command(folder))
    return folder


def test_validate_and_predict_read_whole_splits(whole):
    for name in ("validate", "predict"):
        run(command(whole, "--ckpt_path", "last", name=name))
    (path,) = only_version(whole).glob("validate-*.json")
    assert json.loads(path.read_text(encoding="utf-8"))["num_samples"] == NUM_VAL
    (path,) = only_version(whole).glob("predictions-*.parquet")
    assert len(pd.read_parquet(path)) == 42


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(5, id="between validations", marks=pytest.mark.slow),
        pytest.param(12, id="in a validation"),
    ],
)
def test_the_rotation_goes_on_after_a_kill(whole, tmp_path, monkeypatch, step):
    train, validate = SequenceClassifier.training_step, SequenceClassifier.validation_step

    def training_step(self, batch, batch_idx):
        if step == 5 and batch_idx == step:
            kill_me()
        return train(self, batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if step == 12 and self.trainer.global_step == step and batch_idx == 2:
            kill_me()
        validate(self, batch, batch_idx)

    with monkeypatch.context() as context:
        context.setattr(SequenceClassifier, "training_step", training_step)
        context.setattr(SequenceClassifier, "validation_step", validation_step)
        assert in_child(lambda: main(command(tmp_path))) == -signal.SIGKILL
    run(command(tmp_path, "--ckpt_path", "last"))
    assert metrics(only_version(tmp_path)) == metrics(only_version(whole))
    assert fingerprint(only_version(tmp_path)) == fingerprint(only_version(whole))


@pytest.mark.slow  # the data: tests/datamodules/lra/test_parity_eval.py
def test_two_processes_see_what_one_sees(tmp_path):
    """In double precision, where rounding changes no prediction; a validation after each step."""
    more = (
        "--trainer.max_steps",
        "4",
        "--model.init_args.dropout",
        "0.0",
        "--trainer.precision",
        "64-true",
    )
    for name, layout in (
        ("one", ("--trainer.accumulate_grad_batches", "2", "--trainer.val_check_interval", "2")),
        ("two", (*TWO, "--trainer.val_check_interval", "1")),
    ):
        folder = tmp_path / name
        folder.mkdir()
        work = command(folder, *more, *layout)
        assert set(in_ranks(lambda work=work: main(work), 2 if name == "two" else 1)) == {0}
    one, two = (
        [row["val/accuracy"] for row in metrics(only_version(tmp_path / name))]
        for name in ("one", "two")
    )
    assert one == two
    assert len([value for value in one if value]) == 4
