"""What a resumed run needs beside weights: the loss scaler, overflows so far, the best score."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping

from lit_probattn.tasks import NonFiniteError
from lit_probattn.training.checkpoints import (
    CheckedCheckpointIO,
    checkpoint_path,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
    step_of,
)
from lit_probattn.training.saving import RunCheckpoint, best_mode
from tests.tasks.tiny import data, loss_scaling, overflow_at, task, trainer


def fit(folder, max_steps: int, ckpt_path=None, scale: float = 64.0, overflows=(4, 7)):
    """The scale doubles after every second step that does not overflow."""
    precision = loss_scaling(init_scale=scale, growth_interval=2)
    module = task()
    overflow_at(module, overflows)
    run = trainer(
        max_steps,
        plugins=[precision, CheckedCheckpointIO()],
        enable_checkpointing=True,
        callbacks=[RunCheckpoint(folder, every_n_steps=5)],
        accumulate_grad_batches=2,
    )
    run.fit(module, data(), ckpt_path=ckpt_path, weights_only=True)
    return module, precision.scaler


def test_checkpoints_of_steps_that_this_run_has_not_reached_are_removed(tmp_path):
    for step in (3, 40, 60):
        save_checkpoint({"global_step": step}, checkpoint_path(tmp_path, "step", step))
    fit(tmp_path, 5)
    assert [step_of(path) for path in list_checkpoints(tmp_path, "step")] == [5, 3]


@pytest.mark.parametrize(
    ("interval", "every", "expected"),
    [
        (2, 3, [3, 6, 7]),
        (2, None, [2, 4, 6, 7]),
        ("00:00:00:00", 3, [3, 6, 7]),  # a duration: after every step
        ("00:00:00:00", None, [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_validations_between_steps_that_are_due_save_nothing(
    tmp_path, monkeypatch, interval, every, expected
):
    """Of 7 steps."""
    saved: list[tuple[str, int]] = []
    saving, save = RunCheckpoint(tmp_path, every_n_steps=every), RunCheckpoint._save

    def noted(self, run, kind):
        saved.append((kind, run.global_step))
        save(self, run, kind)

    monkeypatch.setattr(RunCheckpoint, "_save", noted)
    run = trainer(7, enable_checkpointing=True, callbacks=[saving], val_check_interval=interval)
    run.fit(task(), data())
    steps = [step for kind, step in saved if kind == "step"]
    assert list(dict.fromkeys(steps)) == expected


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("whole"), 10)


def test_the_scaler_goes_on_where_it_was(whole, tmp_path):
    """Without its state the run would differ, so that the comparison can fail."""
    module, scaler = whole
    fit(tmp_path, 5)
    (saved,) = list_checkpoints(tmp_path, "step")
    content = load_checkpoint(saved)
    resumed, again = fit(tmp_path, 10, saved, scale=1.0)
    assert again.state_dict() == scaler.state_dict()
    assert scaler.get_scale() not in (64.0, 1.0)
    expected = module.state_dict()
    assert all(torch.equal(t, expected[name]) for name, t in resumed.state_dict().items())
    (key,) = (key for key in content if "Precision" in key)
    content[key]["scale"] = 1.0
    CheckedCheckpointIO().save_checkpoint(content, saved)
    _, other = fit(tmp_path, 6, saved)
    assert other.get_scale() < 8.0 < scaler.get_scale()


def test_overflows_before_and_after_a_resume_are_in_a_row(tmp_path):
    """Steps 2 to 4 overflow before the checkpoint, 5 to 11 after it."""
    fit(tmp_path, 5, overflows=range(2, 99))
    (path,) = list_checkpoints(tmp_path, "step")
    with pytest.raises(NonFiniteError, match="at step 11 in 10 steps in a row"):
        fit(tmp_path, 20, path, overflows=range(2, 99))


@pytest.mark.parametrize(
    ("mode", "sign"), [("max", 1.0), pytest.param("min", -1.0, marks=pytest.mark.slow)]
)
def test_a_resumed_run_knows_the_best_score(tmp_path, mode, sign):
    """Resumed at step 2, the score is worse at step 4, better than ever at step 6, else NaN."""
    scores = {2: 0.5, 4: 0.25, 6: 0.75}

    def best_after(max_steps):
        module = task()
        module.log_scores = lambda split: module.log(
            f"{split}/score", sign * scores.get(module.trainer.global_step, math.nan)
        )
        run = trainer(
            max_steps,
            val_check_interval=1,
            plugins=[CheckedCheckpointIO()],
            enable_checkpointing=True,
            callbacks=[RunCheckpoint(tmp_path, monitor="val/score", mode=mode)],
        )
        newest = next(iter(list_checkpoints(tmp_path, "step")), None)
        run.fit(module, data(num_val=8), ckpt_path=newest, weights_only=True)
        return [step_of(path) for path in list_checkpoints(tmp_path, "best")]

    assert [best_after(max_steps) for max_steps in (2, 4, 6)] == [[2], [2], [6]]


@pytest.mark.parametrize(
    ("callback", "told"),
    [
        (RunCheckpoint(monitor="val/loss"), "run.monitor_mode max .* worst val/loss.* to min"),
        (RunCheckpoint(mode="min"), "run.monitor_mode min .* worst val/accuracy.* to max"),
        (
            EarlyStopping("val/accuracy"),
            "the mode of EarlyStopping .* min .* val/accuracy.* to max",
        ),
        (EarlyStopping("train/loss", mode="max"), "EarlyStopping .* max .* train/loss.* to min"),
        (EarlyStopping("val/loss"), ""),
        (RunCheckpoint(monitor="val/own_loss"), ""),
    ],
)
def test_the_worst_score_is_not_selected(callback, told):
    """A score that the task does not log, such as that of a subclass, can have any mode."""
    saving = callback if isinstance(callback, RunCheckpoint) else RunCheckpoint()
    run = trainer(callbacks=list({callback: 0, saving: 0}), enable_checkpointing=True)
    with pytest.raises(ValueError, match=told) if told else nullcontext():
        saving.setup(run, task(), "fit")
    saving.setup(run, task(), "test")


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        *(("val/accuracy_top5", "max"), ("val/bleu", "max"), ("val/has_answer_f1", "max")),
        *(("val/score_high", "max"), ("val/return_low", "max"), ("val/return_std_low", None)),
        *(("val/ppl_stride16", "min"), ("val/word_ppl", "min"), ("val/mlm_error", "min")),
        *(("val/nll_bits", "min"), ("val/length_high", None), ("val/best_f1_threshold", None)),
    ],
)
def test_the_best_value_of_a_score(metric, mode):
    assert best_mode(metric) == mode
