"""The test split scored at validations: logged and told, never chosen by; training is the same."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lit_probattn.base.errors import ConfigError
from lit_probattn.cli.app import main
from lit_probattn.tasks import SequenceClassifier, Task
from lit_probattn.training.checkpoints import CheckedCheckpointIO, list_checkpoints
from lit_probattn.training.evaluation import TestScores as Scores
from lit_probattn.training.logs import RunCSVLogger
from lit_probattn.training.preemption import Preempted
from lit_probattn.training.run_folder import RunSettings
from lit_probattn.training.run_record import read_starts
from lit_probattn.training.saving import RunCheckpoint, reject_test_monitors
from tests.datamodules.text import made as made_text
from tests.support.helpers import error_of
from tests.support.runs import (
    at_micro_batch,
    fingerprint,
    in_child,
    in_ranks,
    kill_me,
    metrics,
    only_version,
    run,
    send,
    stateful,
)
from tests.tasks import test_language_model as of_language_model
from tests.tasks.decision import test_task as decision
from tests.tasks.tiny import data, task, trainer

ALL = ("--run.test_during_training", "all")


def command(folder: Path, *more: str, name: str = "fit") -> list[str]:
    return stateful(name, folder, *more)


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scored")
    run(command(folder, *ALL))
    return folder


def of_test(row: dict[str, str]) -> dict[str, str]:
    return {key: value for key, value in row.items() if key.startswith("test/") and value}


def final_scores(folder: Path, capsys, checkpoint: str, *more: str) -> dict[str, float]:
    run(command(folder, "--ckpt_path", checkpoint, *more, name="test"))
    told = capsys.readouterr().out.splitlines()
    (path,) = [line.removeprefix("results: ") for line in told if line.startswith("results: ")]
    return json.loads(Path(path).read_text(encoding="utf-8"))


def test_training_is_the_same_bit_for_bit(uninterrupted, scored):
    version = only_version(scored)
    assert fingerprint(version) == fingerprint(uninterrupted)
    rows = metrics(version)
    bare = [{k: v for k, v in row.items() if not k.startswith("test/")} for row in rows]
    assert bare == metrics(uninterrupted)
    assert [row["step"] for row in rows if of_test(row)] == ["4", "6"]
    assert all(set(of_test(row)) <= {"test/loss", "test/accuracy"} for row in rows)
    for folder, expected in ((version, "all"), (uninterrupted, None)):
        (start,) = read_starts(folder)
        assert start["test_during_training"] == expected


def test_a_row_has_what_the_command_test_says_of_that_step(scored, capsys):
    """So nothing of a validation, or of an earlier row, is in it."""
    earlier, row = filter(None, map(of_test, metrics(only_version(scored))))
    assert earlier != row
    told = final_scores(scored, capsys, "last", *ALL)
    for name, value in row.items():
        assert float(value) == pytest.approx(told[name], rel=1e-6)
    assert told["test_during_training"] == "all"


def test_a_number_of_batches_is_the_beginning_of_the_split():
    made = task()
    during = trainer(2, val_check_interval=2, callbacks=[Scores(1)])
    during.fit(made, data())
    assert Scores.asked_of(during) == 1
    row = during.callback_metrics["test/loss"].item()
    for limit, is_same in ((1, True), (2, False)):
        (told,) = trainer(limit_test_batches=limit).test(made, data(), verbose=False)
        assert (row == pytest.approx(told["test/loss"], rel=1e-6)) == is_same


# ---- ends and layouts --------------------------------------------------------------------------


def test_a_signal_within_the_test_split_saves_its_step_and_has_the_validation_repeated(tmp_path):
    made, saving = task(), RunCheckpoint(tmp_path)
    score = made.test_step

    def interrupted(batch, batch_idx):
        made.stop_requested = signal.SIGTERM if batch_idx == 1 else 0
        score(batch, batch_idx)

    made.test_step = interrupted
    more = {"plugins": [CheckedCheckpointIO()], "enable_checkpointing": True}
    run_ = trainer(3, val_check_interval=2, callbacks=[Scores("all"), saving], **more)
    with pytest.raises(Preempted, match="stopped by SIGTERM after step 2"):
        run_.fit(made, data())
    assert "test/loss" not in run_.callback_metrics
    (saved,) = list_checkpoints(tmp_path, "step")
    assert saved.name == "step-00000002.ckpt"
    assert saving.state_dict()["validation_is_due"]


@pytest.mark.slow  # the signal: above; repeated validations: ../test_preemption.py
@pytest.mark.parametrize(
    ("do", "number", "status"),
    [  # killed with a checkpoint of an earlier step
        pytest.param(kill_me, 6, -signal.SIGKILL, id="killed"),
        pytest.param(send(signal.SIGTERM), 4, 128 + signal.SIGTERM, id="asked to end"),
    ],
)
def test_a_run_that_ends_within_the_test_split_goes_on_with_the_same_rows(
    scored, tmp_path, monkeypatch, do, number, status
):
    with monkeypatch.context() as context:
        at_micro_batch(context, 1, do, hook="test_step", step=number)
        assert in_child(lambda: main(command(tmp_path, *ALL))) == status
    if do is not kill_me:  # saved, and not validated yet
        assert not any(row.get("val/loss") for row in metrics(only_version(tmp_path)))
        assert (only_version(tmp_path) / "checkpoints/step-00000004.ckpt").is_file()
    run(command(tmp_path, *ALL, "--ckpt_path", "last"))
    assert fingerprint(only_version(tmp_path)) == fingerprint(only_version(scored))
    ours, theirs = (metrics(only_version(folder)) for folder in (tmp_path, scored))
    assert [sorted(row.items()) for row in ours] == [sorted(row.items()) for row in theirs]


def test_two_processes_log_what_one_does(tmp_path):
    """21 samples: the second process has a row that only fills up."""

    def work(count: int) -> int:
        layout = {"devices": count, "strategy": "ddp" if count == 2 else "auto"}
        logger = RunCSVLogger(tmp_path / str(count), 0)
        made = trainer(1, val_check_interval=1, callbacks=[Scores("all")], logger=logger, **layout)
        made.fit(task(), data())
        return 0

    assert (work(1), in_ranks(lambda: work(2))) == (0, [0, 0])
    found = [[of_test(row) for row in metrics(tmp_path / name)] for name in ("1", "2")]
    (one,), (two,) = ([row for row in rows if row] for rows in found)
    assert two["test/accuracy"] == one["test/accuracy"]
    assert float(two["test/loss"]) == pytest.approx(float(one["test/loss"]), rel=1e-5)


def test_random_states_are_as_before():
    class Noisy(SequenceClassifier):
        def evaluate(self, batch, split):
            super().evaluate(batch, split)
            if split == "test":
                tested.append(torch.rand(3))
                random.random()

        def on_validation_epoch_end(self):
            before = torch.get_rng_state(), random.getstate()
            super().on_validation_epoch_end()
            assert torch.equal(torch.get_rng_state(), before[0])
            assert random.getstate() == before[1]

    tested: list[torch.Tensor] = []
    made = task()
    made.__class__ = Noisy
    run_ = trainer(2, val_check_interval=2, callbacks=[Scores("all")])
    run_.fit(made, data())
    assert len(tested) == 3
    assert "test/loss" in run_.callback_metrics


# ---- other tasks -------------------------------------------------------------------------------


def test_a_language_model_is_scored_in_the_form_of_its_validation(tmp_path):
    """The command test slides its window; during training both splits are cut into segments."""
    text = made_text.data(made_text.write(tmp_path), val_stride=None)
    found = scores_of_one_validation(of_language_model.task(), text)
    during = {name for name in found if name.startswith("test/")}
    assert during == {"test/ppl_segments", "test/tokens_segments"}
    assert found["test/ppl_segments"] != found["val/ppl_segments"]
    (told,) = trainer().test(of_language_model.task(), text, verbose=False)
    assert found["test/tokens_segments"] == told["test/tokens_sliding"]


def test_a_decision_transformer_plays_no_episodes_for_it():
    found = scores_of_one_validation(decision.make_task(val_episodes=1), decision.make_data())
    assert {name for name in found if name.startswith("test/")} == {"test/loss", "test/steps"}
    assert "val/return_high" in found


def scores_of_one_validation(made: Task, text: LightningDataModule) -> dict[str, torch.Tensor]:
    run_ = trainer(1, val_check_interval=1, callbacks=[Scores("all")])
    run_.fit(made, text)
    return run_.callback_metrics


# ---- what is refused ---------------------------------------------------------------------------


def test_a_checkpoint_is_not_chosen_by_it(tmp_path):
    line = error_of(command(tmp_path, "--run.monitor", "test/loss"))
    assert "run.monitor test/loss would select by the test split" in line
    assert line.endswith("such as val/loss")
    assert not (tmp_path / "runs").exists()


def test_a_run_does_not_end_by_it():
    told = "the monitor of {} in trainer.callbacks, test/accuracy would select by .*val/accuracy"
    for kind in (EarlyStopping, ModelCheckpoint):
        with pytest.raises(ValueError, match=told.format(kind.__name__)):
            reject_test_monitors([kind(monitor="test/accuracy")])
    reject_test_monitors([EarlyStopping("val/accuracy")])


@pytest.mark.parametrize("number", [0, -3])
def test_a_number_of_batches_is_positive(number):
    told = f"must be all, or a number of batches of at least 1, received {number}"
    with pytest.raises(ConfigError, match=f"run.test_during_training {told}"):
        RunSettings(test_during_training=number)


def test_other_modules_and_other_data_are_refused_by_name():
    with pytest.raises(ValueError, match=r"requires a task of lit_probattn\.tasks, received Light"):
        Scores("all").setup(trainer(), LightningModule(), "fit")
    run_ = trainer()
    run_.datamodule = LightningDataModule()
    with pytest.raises(ValueError, match=r"requires data of this package .*, received Light"):
        Scores("all").on_fit_start(run_, task())
