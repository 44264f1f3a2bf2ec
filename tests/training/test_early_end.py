"""However a run ends before its last step, that step is saved and the run goes on from it."""

from __future__ import annotations

import time

import pytest

from lit_probattn.cli.app import main
from lit_probattn.tasks import SequenceClassifier
from lit_probattn.training.checkpoints import list_checkpoints, step_of
from tests.support.runs import arguments, fingerprint, metrics, only_version, run, write_attention

# A step is two micro-batches; validation after steps 4 and 8; no checkpoint falls due before.
OPTIONS = (
    *("--trainer.accumulate_grad_batches", "2", "--trainer.val_check_interval", "8"),
    *("--trainer.log_every_n_steps", "1", "--run.checkpoint_every", "1000"),
    *("--trainer.max_steps", "8"),
)


def command(folder, *more):
    attention = write_attention(folder, "MGKAttention", dropout=0.2, e_step="soft")
    return arguments("fit", folder, *OPTIONS, *more, attention=attention)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    run(command(folder))
    return only_version(folder)


def losses(version):
    return [row["train/loss"] for row in metrics(version) if row["train/loss"]]


def stop_in(monkeypatch, hook, where):
    """Ask Lightning to stop, as its callbacks do, where `where(task, batch_idx)` says so."""
    original = getattr(SequenceClassifier, hook)

    def step(self, batch, batch_idx):
        if where(self, batch_idx):
            self.trainer.should_stop = True
        return original(self, batch, batch_idx)

    monkeypatch.setattr(SequenceClassifier, hook, step)


NO_VALIDATION = ("--trainer.limit_val_batches", "0")
SLOW = pytest.mark.slow


def at(micro_batch):
    """Whether this is the micro-batch to stop in."""
    return lambda _, index: index == micro_batch


@pytest.mark.parametrize(
    ("hook", "where", "step", "more"),
    [
        pytest.param("training_step", at(4), 3, (), id="first half of a step"),
        pytest.param("training_step", at(5), 3, (), id="second half", marks=pytest.mark.slow),
        pytest.param(
            "training_step",
            at(4),
            3,
            NO_VALIDATION,
            id="no validation",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "validation_step",
            lambda t, _: t.trainer.global_step == 4,
            4,
            (),
            id="in a validation",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_last_step_is_saved(uninterrupted, tmp_path, monkeypatch, hook, where, step, more):
    with monkeypatch.context() as context:
        stop_in(context, hook, where)
        run(command(tmp_path, *more))
    (saved,) = list_checkpoints(only_version(tmp_path) / "checkpoints", "step")
    assert saved.name == f"step-{step:08d}.ckpt"
    run(command(tmp_path, *more, "--ckpt_path", "last"))
    assert fingerprint(only_version(tmp_path)) == fingerprint(uninterrupted)
    assert losses(only_version(tmp_path)) == losses(uninterrupted)


def test_a_time_limit_cuts_a_run_into_pieces(tmp_path, monkeypatch):
    """Each start has the whole time; the one before does not count."""
    train = SequenceClassifier.training_step

    def step(self, batch, batch_idx):
        if batch_idx == 3:
            time.sleep(1.1)
        return train(self, batch, batch_idx)

    monkeypatch.setattr(SequenceClassifier, "training_step", step)
    ends = [0]
    for _ in range(2):
        run(command(tmp_path, "--trainer.max_time", "00:00:00:01", "--ckpt_path", "auto"))
        newest = list_checkpoints(only_version(tmp_path) / "checkpoints", "step")[0]
        ends.append(step_of(newest))
    assert 0 < ends[1] <= 2 < ends[2]


def test_no_time_at_all_is_refused(tmp_path, capsys):
    assert main(command(tmp_path, "--trainer.max_time", "00:00:00:00")) == 2
    assert "trainer.max_time must be positive" in capsys.readouterr().err
