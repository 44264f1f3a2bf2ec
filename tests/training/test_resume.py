"""However a run ends, the run that resumes it equals the uninterrupted one, bit for bit."""

from __future__ import annotations

import random
import signal
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import timer

from lit_probattn.cli.app import main
from lit_probattn.training import checkpoints
from lit_probattn.training.saving import RunCheckpoint
from tests.support.runs import (
    at_micro_batch,
    fingerprint,
    in_child,
    kill_me,
    metrics,
    newest_state,
    only_version,
    run,
    stateful,
)
from tests.tasks import test_language_model as of_language_model
from tests.tasks import test_masked_lm as of_masked_words
from tests.tasks import test_series_classifier as of_series
from tests.tasks import tiny
from tests.tasks.decision import test_task as decision


def kill_before_micro_batch(number):
    return lambda patch: at_micro_batch(patch, number, kill_me)


def kill_in_validation(patch):
    at_micro_batch(patch, 2, kill_me, hook="validation_step", step=4)


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
        if kind == "step" and trainer.global_step == 2:
            kill_me()

    monkeypatch.setattr(RunCheckpoint, "_save", patched)


def kill_in_the_middle_of_a_write(monkeypatch):
    save = torch.save

    def half(value, file):
        save(value, file)
        if value["global_step"] == 6:
            file.truncate(file.tell() // 2)
            file.flush()
            kill_me()

    monkeypatch.setattr(checkpoints.torch, "save", half)


@pytest.mark.parametrize(
    "patch",
    [
        pytest.param(kill_before_micro_batch(9), id="mid-accumulation", marks=pytest.mark.slow),
        pytest.param(kill_before_micro_batch(8), id="after-a-checkpoint", marks=pytest.mark.slow),
        pytest.param(kill_in_validation, id="in-validation", marks=pytest.mark.slow),
        pytest.param(kill_after_best, id="between-best-and-step", marks=pytest.mark.slow),
        pytest.param(kill_after_a_step_checkpoint, id="between-step-and-its-row"),
        pytest.param(kill_in_the_middle_of_a_write, id="mid-write", marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_equals_uninterrupted(uninterrupted, tmp_path, monkeypatch, patch):
    with monkeypatch.context() as context:
        patch(context)
        assert in_child(lambda: main(stateful("fit", tmp_path))) == -signal.SIGKILL
    run(stateful("fit", tmp_path, "--ckpt_path", "last"))
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
            kill_before_micro_batch(generator.randrange(3, 12))(context)
            in_child(lambda: main(stateful("fit", tmp_path, "--ckpt_path", "auto")))
    run(stateful("fit", tmp_path, "--ckpt_path", "auto"))
    assert fingerprint(only_version(tmp_path)) == fingerprint(uninterrupted)


@pytest.mark.parametrize("make", [tiny.task, of_language_model.task, decision.make_task])
def test_another_accumulation_is_refused(make, uninterrupted):
    """Also by tasks that load more than the base."""
    task = make()
    task._trainer = SimpleNamespace(training=True, accumulate_grad_batches=1)
    with pytest.raises(ValueError, match="accumulate_grad_batches 2, received 1"):
        task.on_load_checkpoint(newest_state(uninterrupted))


@pytest.mark.parametrize("make", [tiny.task, of_series.task, of_masked_words.make_task])
def test_the_optimiser_of_a_resumed_run_has_its_own_settings(make):
    """PyTorch loads those of the checkpoint; other weight decay or epsilon were without effect."""
    before, now = make(weight_decay=0.25).configure_optimizers(), make(weight_decay=0.5, eps=1e-3)
    resumed = now.configure_optimizers()
    expected = [group["weight_decay"] for group in resumed.param_groups]
    assert 0.5 in expected
    resumed.load_state_dict(before.state_dict())
    assert [group["weight_decay"] for group in resumed.param_groups] == expected
    assert {group["eps"] for group in resumed.param_groups} == {1e-3}


def test_groups_that_a_callback_adds_to_the_optimiser_are_resumed():
    """As BackboneFinetuning does; they have the settings of the checkpoint."""
    before, resumed = tiny.task().configure_optimizers(), tiny.task().configure_optimizers()
    for optimizer, decay in ((before, 0.5), (resumed, 0.0)):
        more = torch.nn.Parameter(torch.zeros(1))
        optimizer.add_param_group({"params": [more], "weight_decay": decay})
    resumed.load_state_dict(before.state_dict())
    assert resumed.param_groups[-1]["weight_decay"] == 0.5


# ---- ended early -------------------------------------------------------------------------------

NO_CHECKPOINTS_DUE = ("--run.checkpoint_every", "1000")


def stop(task):
    """Ask Lightning to stop, as its callbacks do."""
    task.trainer.should_stop = True


@pytest.mark.parametrize(
    ("where", "step", "more"),
    [
        pytest.param({"number": 4}, 3, (), id="first half of a step"),
        pytest.param({"number": 5}, 3, (), id="second half"),
        pytest.param({"number": 99}, 5, (), id="max_steps"),
        pytest.param({"number": 4}, 3, ("--trainer.limit_val_batches", "0"), id="no validation"),
        pytest.param(
            {"number": 0, "hook": "validation_step", "step": 4}, 4, (), id="in a validation"
        ),
    ],
)
@pytest.mark.slow  # of a run whose time is over: below
def test_the_last_step_is_saved(uninterrupted, tmp_path, monkeypatch, where, step, more):
    """Of a run that is shorter than the one that resumes it."""
    with monkeypatch.context() as context:
        at_micro_batch(context, act=stop, **where)
        shorter = (*NO_CHECKPOINTS_DUE, "--trainer.max_steps", "5")
        run(stateful("fit", tmp_path, *shorter, *more))
    (saved,) = checkpoints.list_checkpoints(only_version(tmp_path) / "checkpoints", "step")
    assert saved.name == f"step-{step:08d}.ckpt"
    run(stateful("fit", tmp_path, *more, "--ckpt_path", "last"))
    resumed = only_version(tmp_path)
    assert fingerprint(resumed) == fingerprint(uninterrupted)
    losses = [
        [row["train/loss"] for row in metrics(version) if row["train/loss"]]
        for version in (resumed, uninterrupted)
    ]
    assert losses[0] == losses[1]


def test_a_run_that_was_stopped_early_is_not_trained_on(tmp_path, capsys):
    """Of the validations after steps 4 and 6, the first ends the run."""
    name, limit = (
        "lightning.pytorch.callbacks.EarlyStopping",
        "--trainer.callbacks.stopping_threshold",
    )
    watch = ("--trainer.callbacks.monitor", "val/accuracy", "--trainer.callbacks.mode", "max")
    more = ("--trainer.callbacks+", name, *watch, limit, "-1.0")
    run(stateful("fit", tmp_path, *more))
    version = only_version(tmp_path)
    ended, rows = fingerprint(version), metrics(version)
    assert newest_state(version)["global_step"] == len(rows) == 4
    capsys.readouterr()
    run(stateful("fit", tmp_path, *more, "--ckpt_path", "last"))
    assert fingerprint(version) == ended
    assert metrics(version) == rows
    assert "nothing to train: the run was stopped early at step 4: " in capsys.readouterr().out


def test_more_patience_continues_a_run_that_was_stopped_early(tmp_path):
    """Lightning loads the patience of the checkpoint; accuracy does not rise by 2 anywhere."""
    name, prefix = "lightning.pytorch.callbacks.EarlyStopping", "--trainer.callbacks"
    watch = (f"{prefix}.monitor", "val/accuracy", f"{prefix}.mode", "max")
    often = ("--trainer.val_check_interval", "4", f"{prefix}+", name)
    more = (*often, *watch, f"{prefix}.min_delta", "2.0", f"{prefix}.patience")
    run(stateful("fit", tmp_path, *more, "1"))
    ended = only_version(tmp_path)
    assert newest_state(ended)["global_step"] == 4
    run(stateful("fit", tmp_path, *more, "2", "--ckpt_path", "last"))
    (version,) = (path for path in ended.parent.iterdir() if path != ended)
    assert newest_state(version)["global_step"] == 6


def test_a_time_limit_cuts_a_run_into_pieces(uninterrupted, tmp_path, monkeypatch):
    """Each start has the whole time, and saves its last step, which may be half done by then."""
    now, ends = [0.0], []
    monkeypatch.setattr(timer, "time", SimpleNamespace(monotonic=lambda: now[0]))
    limit = ("--trainer.max_time", "00:00:00:01", "--ckpt_path", "auto")
    for micro_batch, seconds in ((4, 1.1), (8, 0.9)):
        with monkeypatch.context() as context:
            at_micro_batch(context, micro_batch, lambda _, x=seconds: now.append(now.pop() + x))
            run(stateful("fit", tmp_path, *NO_CHECKPOINTS_DUE, *limit))
        newest = checkpoints.list_checkpoints(only_version(tmp_path) / "checkpoints", "step")[0]
        ends.append(checkpoints.step_of(newest))
    assert ends == [3, 6]
    assert fingerprint(only_version(tmp_path)) == fingerprint(uninterrupted)


def test_no_time_at_all_is_refused():
    with pytest.raises(ValueError, match=r"trainer\.max_time must be positive"):
        tiny.trainer(4, max_time="00:00:00:00").fit(tiny.task(), tiny.data())
