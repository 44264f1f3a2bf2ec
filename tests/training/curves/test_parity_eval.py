"""Evaluation as in the authors' code, in real runs: which samples, which number, after a kill."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from datamodules.core.order import RotatingOrder
from lit_probattn.cli.app import main
from lit_probattn.tasks import SequenceClassifier
from tests.support.runs import (
    arguments,
    at_micro_batch,
    fingerprint,
    in_child,
    in_ranks,
    kill_me,
    metrics,
    only_version,
    rewound,
    run,
    write_attention,
)

# 40 validation and 42 test samples, batches of 8: a validation of 3 batches moves on by 24.
BATCH, BATCHES, NUM_VAL, SEED = 8, 3, 40, 0
TWO = ("--trainer.devices", "2", "--trainer.strategy", "ddp")
PARITY = ("--data.init_args.parity_eval", str(BATCHES))
# Validations after steps 2, 4 and, out of turn, 5.
LENGTH = ("--trainer.max_steps", "5", "--trainer.val_check_interval", "2")
TESTED = ("--run.test_during_training", "all")


def command(folder: Path, *more: str, name: str = "fit") -> list[str]:
    attention = write_attention(folder, dropout=0.2)
    words = ("--model.init_args.lr", "0.01", *LENGTH, *PARITY, *TESTED, *more)
    given = {"attention": attention, "cache_dir": folder.parent / "cache"}
    return arguments(name, folder, *words, task="tiny/lra_listops", **given)


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


Seen = dict[tuple[str, int], list[tuple[int, bool]]]


@contextmanager
def recorded() -> Iterator[Seen]:
    """What `evaluate` sees: by split and step, the samples and whether each one is right."""
    found: Seen = {}
    evaluate = SequenceClassifier.evaluate

    def record(self, batch, split):
        if not self.trainer.sanity_checking:
            right = self(batch).argmax(-1) == batch["target"]
            rows = zip(batch["sample_ids"].tolist(), right.tolist(), strict=True)
            place = found.setdefault((split, self.trainer.global_step), [])
            place += [(sample, ok) for sample, ok in rows if sample >= 0]
        evaluate(self, batch, split)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SequenceClassifier, "evaluate", record)
        yield found


@pytest.fixture
def seen():
    with recorded() as found:
        yield found


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, Seen]:
    """A folder with a run, and what its validations saw."""
    folder = tmp_path_factory.mktemp("whole")
    with recorded() as found:
        run(command(folder))
    return folder, found


def mean_of_batches(rows: list[tuple[int, bool]]) -> float:
    """Mean of the accuracies of batches of 8, as the authors' code takes it."""
    parts = [rows[first : first + BATCH] for first in range(0, len(rows), BATCH)]
    assert {len(part) for part in parts} == {BATCH}
    return float(np.mean([np.mean([right for _, right in part]) for part in parts]))


OTHER_ROWS = pytest.param("other rows at a time", marks=pytest.mark.slow)  # tests/datamodules/lra


@pytest.mark.parametrize("rows", ["their batches", OTHER_ROWS])
def test_validations_see_the_samples_of_the_oracle_and_say_its_number(tmp_path, whole, rows):
    (folder, seen), steps = whole, (2, 4, 5)
    if rows == "other rows at a time":
        folder, steps = tmp_path, (2, 4)
        other = ("--data.init_args.eval_batch_size", "5", "--trainer.max_steps", "4")
        with recorded() as seen:
            run(command(folder, *other, "--run.test_during_training", "null"))
    expected = oracle(3)
    logged = {row["step"]: row for row in metrics(only_version(folder)) if row["val/accuracy"]}
    assert list(logged) == [str(step) for step in steps]
    for number, step in enumerate(steps):
        found = seen["val", step]
        assert [sample for sample, _ in found] == [i for part in expected[number] for i in part]
        told = float(logged[str(step)]["val/accuracy"])
        assert told == pytest.approx(mean_of_batches(found), abs=1e-6)
    assert sorted(seen["val", 2] + seen["val", 4])[0] != sorted(seen["val", 4])  # it moves on


def test_the_incomplete_last_batch_of_the_test_split_is_left_out(whole, seen):
    """42 samples: 5 batches of 8, during training, and at the end."""
    folder, trained = whole
    run(command(folder, "--ckpt_path", "last", name="test"))
    told = json.loads((only_version(folder) / "test-step-00000005.json").read_text())
    during, found = trained["test", 5], seen["test", 0]  # the command counts no steps
    assert during == found
    assert [sample for sample, _ in found] == list(range(40))
    assert told["num_samples"] == 40
    assert told["test/accuracy"] == pytest.approx(mean_of_batches(found), abs=1e-6)
    assert (told["parity_eval"], told["test_samples_left_out"]) == (BATCHES, 2)


@pytest.mark.slow  # results without it: ../test_evaluation.py
def test_without_it_whole_splits_are_scored_and_nothing_is_said(whole, seen):
    folder, _ = whole
    without = ("--data.init_args.parity_eval", "null", "--ckpt_path", "last")
    run(command(folder, *without, name="test"))
    assert [sample for sample, _ in seen["test", 0]] == list(range(42))
    (path,) = only_version(folder).glob("test-step-00000005-*.json")
    told = json.loads(path.read_text(encoding="utf-8"))
    assert told["num_samples"] == 42
    assert "parity_eval" not in told


@pytest.mark.slow  # the orders of the data: tests/datamodules/lra/test_parity_eval.py
def test_validate_and_predict_read_whole_splits(whole):
    folder, _ = whole
    for name in ("validate", "predict"):
        run(command(folder, "--ckpt_path", "last", name=name))
    (path,) = only_version(folder).glob("validate-*.json")
    assert json.loads(path.read_text(encoding="utf-8"))["num_samples"] == NUM_VAL
    (path,) = only_version(folder).glob("predictions-*.parquet")
    assert len(pd.read_parquet(path)) == 42


def test_the_rotation_goes_on_in_a_resumed_run(whole, tmp_path):
    version = rewound(only_version(whole[0]), 4, tmp_path)
    with recorded() as found:
        run(command(tmp_path, "--ckpt_path", "last"))
    assert found == {place: rows for place, rows in whole[1].items() if place[1] == 5}
    assert fingerprint(version) == fingerprint(only_version(whole[0]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "where",
    [
        pytest.param({"number": 4}, id="between validations"),
        pytest.param({"number": 2, "hook": "validation_step", "step": 5}, id="in a validation"),
    ],
)
def test_the_rotation_goes_on_after_a_kill(whole, tmp_path, monkeypatch, where):
    with monkeypatch.context() as context:
        at_micro_batch(context, act=kill_me, **where)
        assert in_child(lambda: main(command(tmp_path))) == -signal.SIGKILL
    run(command(tmp_path, "--ckpt_path", "last"))
    undisturbed = only_version(whole[0])
    assert metrics(only_version(tmp_path)) == metrics(undisturbed)
    assert fingerprint(only_version(tmp_path)) == fingerprint(undisturbed)


@pytest.mark.slow  # the data: tests/datamodules/lra/test_parity_eval.py
def test_two_processes_see_what_one_sees(tmp_path):
    """In double precision, where rounding changes no prediction; a validation after each step."""
    more = ("--trainer.max_steps", "4", "--model.init_args.dropout", "0.0")
    more += ("--trainer.precision", "64-true")
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
