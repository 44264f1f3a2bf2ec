"""A run that is killed at any moment and resumed equals the uninterrupted one, bit for bit."""

from __future__ import annotations

import random
import signal

import pytest
import torch

from lit_probattn.cli.app import main
from lit_probattn.tasks import SequenceClassifier
from lit_probattn.training import checkpoints
from lit_probattn.training.saving import RunCheckpoint
from tests.support.runs import (
    arguments,
    fingerprint,
    in_child,
    kill_me,
    metrics,
    only_version,
    run,
    write_attention,
)

# Dropout in and outside attention, warm-up and beta1 cycling, accumulation, M-step priors.
OPTIONS = (
    *("--trainer.accumulate_grad_batches", "2"),
    *("--trainer.log_every_n_steps", "1"),
    *("--run.checkpoint_every", "2", "--trainer.max_steps", "10"),
)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    run(command(folder))
    return only_version(folder)


def command(folder, *more):
    attention = write_attention(folder, "MGKAttention", dropout=0.2, e_step="soft")
    return arguments("fit", folder, *OPTIONS, *more, attention=attention)


def kill_before_micro_batch(number):
    def patch(monkeypatch):
        train = SequenceClassifier.training_step

        def step(self, batch, batch_idx):
            if batch_idx == number:
                kill_me()
            return train(self, batch, batch_idx)

        monkeypatch.setattr(SequenceClassifier, "training_step", step)

    return patch


def kill_in_validation(monkeypatch):
    validate = SequenceClassifier.validation_step

    def step(self, batch, batch_idx):
        if self.trainer.global_step == 8 and batch_idx == 2:
            kill_me()
        validate(self, batch, batch_idx)

    monkeypatch.setattr(SequenceClassifier, "validation_step", step)


def kill_after_best(monkeypatch):
    remove = RunCheckpoint._remove

    def patched(self, trainer, kind, keep):
        if kind == "best" and trainer.global_step == 4:
            kill_me()
        remove(self, trainer, kind, keep)

    monkeypatch.setattr(RunCheckpoint, "_remove", patched)


def kill_after_a_step_checkpoint(monkeypatch):
    """The row of that step must be in metrics.csv by then: nothing would write it later."""
    save = RunCheckpoint._save

    def patched(self, trainer, kind):
        save(self, trainer, kind)
        if kind == "step" and trainer.global_step == 6:
            kill_me()

    monkeypatch.setattr(RunCheckpoint, "_save", patched)


def kill_in_the_middle_of_a_write(monkeypatch):
    save = torch.save

    def half(value, file):
        save(value, file)
        if value["global_step"] == 8:
            file.truncate(file.tell() // 2)
            file.flush()
            kill_me()

    monkeypatch.setattr(checkpoints.torch, "save", half)


@pytest.mark.parametrize(
    "patch",
    [
        pytest.param(kill_before_micro_batch(17), id="mid-accumulation", marks=pytest.mark.slow),
        pytest.param(kill_before_micro_batch(16), id="after-a-checkpoint", marks=pytest.mark.slow),
        pytest.param(kill_in_validation, id="in-validation", marks=pytest.mark.slow),
        pytest.param(kill_after_best, id="between-best-and-step", marks=pytest.mark.slow),
        pytest.param(kill_after_a_step_checkpoint, id="between-step-and-its-row"),
        pytest.param(kill_in_the_middle_of_a_write, id="mid-write", marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_equals_uninterrupted(uninterrupted, tmp_path, monkeypatch, patch):
    with monkeypatch.context() as context:
        patch(context)
        assert in_child(lambda: main(command(tmp_path))) == -signal.SIGKILL
    run(command(tmp_path, "--ckpt_path", "last"))
    resumed = only_version(tmp_path)
    assert fingerprint(resumed) == fingerprint(uninterrupted)
    assert metrics(resumed) == metrics(uninterrupted)
    names = sorted(path.name for path in (uninterrupted / "checkpoints").glob("*.ckpt"))
    assert sorted(path.name for path in (resumed / "checkpoints").glob("*.ckpt")) == names


def test_the_fingerprint_sees_one_changed_bit(uninterrupted, tmp_path):
    path = checkpoints.list_checkpoints(uninterrupted / "checkpoints", "step")[0]
    state = checkpoints.load_checkpoint(path)
    name = next(iter(state["state_dict"]))
    first = state["state_dict"][name].view(torch.int32).view(-1)
    first[0] ^= 1
    checkpoints.save_checkpoint(state, tmp_path / "checkpoints" / path.name)
    assert fingerprint(tmp_path) != fingerprint(uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_killed_five_times_at_random(uninterrupted, tmp_path, monkeypatch, seed):
    generator = random.Random(seed)
    for _ in range(5):
        with monkeypatch.context() as context:
            kill_before_micro_batch(generator.randrange(5, 20))(context)
            in_child(lambda: main(command(tmp_path, "--ckpt_path", "auto")))
    run(command(tmp_path, "--ckpt_path", "auto"))
    assert fingerprint(only_version(tmp_path)) == fingerprint(uninterrupted)


def test_a_longer_run_goes_on_where_a_shorter_one_ended(uninterrupted, tmp_path):
    """The shorter run ends between two validations and between two checkpoints."""
    run(command(tmp_path, "--trainer.max_steps", "7"))
    run(command(tmp_path, "--ckpt_path", "last"))
    assert fingerprint(only_version(tmp_path)) == fingerprint(uninterrupted)


def test_another_accumulation_is_refused(uninterrupted, tmp_path, capsys):
    path = checkpoints.list_checkpoints(uninterrupted / "checkpoints", "step")[0]
    more = ("--ckpt_path", str(path), "--trainer.accumulate_grad_batches", "1")
    assert main(command(tmp_path, *more, "--trainer.max_steps", "12")) == 2
    assert "accumulate_grad_batches 2, received 1" in capsys.readouterr().err
