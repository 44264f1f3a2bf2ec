"""Two processes give what one gives: losses, priors, metrics, predictions, errors, resume."""

from __future__ import annotations

import importlib.util
import json
import signal
import sys

import pytest
import torch

from lit_probattn.cli.app import main
from lit_probattn.tasks import SequenceClassifier
from lit_probattn.training.checkpoints import list_checkpoints
from tests.support.forks import fork_module
from tests.support.fresh import fresh_python
from tests.support.runs import (
    arguments,
    fingerprint,
    in_child,
    in_ranks,
    kill_me,
    metrics,
    newest_state,
    only_version,
    run,
    write_attention,
)

TWO = ("--trainer.devices", "2", "--trainer.strategy", "ddp")
# Validations after steps 2 and 4.
EVERY_STEP = (
    *("--trainer.log_every_n_steps", "1"),
    *("--trainer.max_steps", "4", "--trainer.val_check_interval", "2"),
    *("--run.checkpoint_every", "2"),
)
NO_DROPOUT = ("--model.init_args.dropout", "0.0")  # torch's dropout differs by rank


def command(folder, *more, name="fit"):
    """Attention dropout stays on: it is drawn by sample, so the number of ranks is irrelevant."""
    attention = write_attention(folder, "MGKAttention", dropout=0.3, e_step="soft")
    return arguments(name, folder, *EVERY_STEP, *NO_DROPOUT, *more, attention=attention)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    run(command(folder))
    return folder


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    assert in_ranks(lambda: main(command(folder, *TWO))) == [0, 0]
    return folder


def assert_same_training(one, two):
    rows_one, rows_two = metrics(only_version(one)), metrics(only_version(two))
    assert len(rows_one) == len(rows_two) == 4
    for first, second in zip(rows_one, rows_two, strict=True):
        assert float(second["train/loss"]) == pytest.approx(float(first["train/loss"]), rel=2e-5)
        assert second["val/accuracy"] == first["val/accuracy"]
    before = newest_state(only_version(one))["state_dict"]
    after = newest_state(only_version(two))["state_dict"]
    priors = [name for name in before if "prior" in name]
    assert priors
    for name in priors:
        torch.testing.assert_close(after[name], before[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow  # started by Lightning: below
def test_two_processes_train_like_one(one_process, two_processes):
    assert_same_training(one_process, two_processes)


ACCUMULATED = ("--trainer.accumulate_grad_batches", "2", "--trainer.val_check_interval", "4")


@pytest.mark.slow
def test_two_processes_with_accumulation_train_like_one(one_process, tmp_path):
    assert in_ranks(lambda: main(command(tmp_path, *TWO, *ACCUMULATED))) == [0, 0]
    assert_same_training(one_process, tmp_path)


def test_the_strategy_starts_the_second_process_with_the_same_command(
    one_process, tmp_path, monkeypatch
):
    """As `python -m lit_probattn` would; what Lightning starts is a fork here."""
    words = command(tmp_path, *TWO)

    def work():
        import __main__

        __main__.__spec__ = importlib.util.find_spec("lit_probattn.__main__")
        sys.argv = ["lit_probattn", *words]
        fork_module(monkeypatch, "lit_probattn.__main__", main)
        return main(words)

    assert in_child(work) == 0
    assert_same_training(one_process, tmp_path)


@pytest.mark.slow
def test_two_processes_started_by_the_command_line(one_process, tmp_path):
    """The strategy `ddp`, which starts the second process with the same command."""
    fresh_python("-m", "lit_probattn", *command(tmp_path, *TWO), OMP_NUM_THREADS="1")
    assert_same_training(one_process, tmp_path)


@pytest.mark.slow  # also for the tiny classifier: test_exact_metrics.py
@pytest.mark.parametrize("split", ["validate", "test"])
def test_evaluation_is_exact_for_two_processes(one_process, split):
    """21 samples, the same weights: the accuracy is equal, not only close."""
    values = []
    for more in ((), TWO):
        work = command(one_process, "--ckpt_path", "last", *more, name=split)
        assert set(in_ranks(lambda work=work: main(work), 2 if more else 1)) == {0}
        path = only_version(one_process) / f"{split}-step-00000004.json"
        values.append(json.loads(path.read_text(encoding="utf-8")))
        path.unlink()
    assert [value["num_samples"] for value in values] == [21, 21]
    short = "val" if split == "validate" else "test"
    assert values[1][f"{short}/accuracy"] == values[0][f"{short}/accuracy"]
    assert values[1][f"{short}/loss"] == pytest.approx(values[0][f"{short}/loss"], rel=1e-6)
    assert values[0][f"{short}/accuracy"] * 21 == pytest.approx(
        round(values[0][f"{short}/accuracy"] * 21), abs=1e-5
    )


@pytest.mark.slow
def test_nan_on_one_rank_stops_both(tmp_path, monkeypatch, capfd):
    loss = SequenceClassifier.batch_loss

    def poisoned(self, batch):
        bad = self.global_rank == 1 and self.trainer.global_step == 3
        return loss(self, batch) * (float("nan") if bad else 1.0)

    monkeypatch.setattr(SequenceClassifier, "batch_loss", poisoned)
    work = command(tmp_path, *TWO)
    assert in_ranks(lambda: main(work), timeout=60) == [1, 1]
    told = capfd.readouterr().err
    for prefix in ("error", "error on rank 1"):
        assert f"{prefix}: the loss is not finite at step 3: rank 1" in told
    (last,) = list_checkpoints(only_version(tmp_path) / "checkpoints", "step")
    assert last.name == "step-00000002.ckpt"


@pytest.mark.slow  # the kill: tests/training/test_peers.py; resuming: test_preemption.py there
def test_killed_rank_and_resume_with_two_processes(two_processes, tmp_path, monkeypatch):
    train = SequenceClassifier.training_step

    def step(self, batch, batch_idx):
        if batch_idx == 3 and self.global_rank == 1:
            kill_me()
        return train(self, batch, batch_idx)

    with monkeypatch.context() as context:
        context.setattr(SequenceClassifier, "training_step", step)
        codes = in_ranks(lambda: main(command(tmp_path, *TWO)), timeout=60)
    assert codes[1] == -signal.SIGKILL
    assert codes[0] not in (0, None)
    resume = command(tmp_path, *TWO, "--ckpt_path", "last")
    assert in_ranks(lambda: main(resume)) == [0, 0]
    assert fingerprint(only_version(tmp_path)) == fingerprint(only_version(two_processes))
