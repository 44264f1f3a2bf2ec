"""SIGTERM, Ctrl-C and SLURM's SIGUSR1 save the step and end the run, which goes on exactly."""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback

from lit_probattn.cli.app import main
from lit_probattn.cli.errors import exit_status
from lit_probattn.training.callbacks import FinalValidation
from lit_probattn.training.checkpoints import (
    CheckedCheckpointIO,
    checkpoint_path,
    list_checkpoints,
)
from lit_probattn.training.logs import RunCSVLogger
from lit_probattn.training.preemption import (
    Preempted,
    StopSignals,
    agree_on_restart,
    is_restart,
    job_name,
    requeue,
)
from lit_probattn.training.run_record import read_starts
from lit_probattn.training.saving import RunCheckpoint, validation_follows
from tests.support.runs import (
    at_micro_batch,
    fingerprint,
    in_child,
    in_ranks,
    kill_me,
    metrics,
    newest_state,
    only_version,
    run,
    send,
    stateful,
)
from tests.tasks import tiny

SLURM = {
    **{"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "listops", "SLURM_NTASKS": "1"},
    **{"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "1"},
}


def command(folder, *more):
    return stateful("fit", folder, *more)


def signal_in_validation(patch, rank=0):
    at_micro_batch(patch, 1, send(signal.SIGTERM), hook="validation_step", step=4, rank=rank)


def assert_equal_runs(resumed, expected):
    assert fingerprint(resumed) == fingerprint(expected)
    assert metrics(resumed) == metrics(expected)
    names = [sorted(p.name for p in (v / "checkpoints").iterdir()) for v in (resumed, expected)]
    assert names[0] == names[1]


@pytest.mark.parametrize(
    "interrupt",
    [
        pytest.param(  # by SLURM's signal: below
            lambda patch: at_micro_batch(patch, 6, send(signal.SIGTERM)),
            id="validation-next",
            marks=pytest.mark.slow,
        ),
        # Without a training: the last test here; in a test split: curves/test_test_scores.py
        pytest.param(signal_in_validation, id="in-validation", marks=pytest.mark.slow),
    ],
)
def test_sigterm_saves_this_step_and_ends(uninterrupted, tmp_path, monkeypatch, capfd, interrupt):
    """A step that is saved in the middle of an interval is resumed by two ranks below."""
    with monkeypatch.context() as context:
        interrupt(context)
        assert in_child(lambda: main(command(tmp_path))) == 128 + signal.SIGTERM
    assert "stopped by SIGTERM after step 4; saved" in capfd.readouterr().out
    version = only_version(tmp_path)
    assert newest_state(version)["global_step"] == 4
    assert not any(row.get("val/accuracy") for row in metrics(version)), "it ends there"
    run(command(tmp_path, "--ckpt_path", "last"))
    assert_equal_runs(version, uninterrupted)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_all_processes_of_a_job_saves_this_step(tmp_path, monkeypatch, capfd, number):
    """SLURM and `kill -- -GROUP` also signal the loader processes, which the step still needs."""

    def job() -> int:
        os.setpgrp()
        return main(command(tmp_path, "--data.num_workers", "1"))

    def to_all(_: object) -> None:
        os.killpg(0, number)
        time.sleep(0.5)  # a loader process that ends is an error here

    at_micro_batch(monkeypatch, 6, to_all)
    assert in_child(job) == 128 + number
    told = capfd.readouterr()
    assert f"stopped by {number.name} after step 4; saved" in told.out
    assert told.err.count(f"{number.name}: saving at the next optimiser step") == 1
    assert newest_state(only_version(tmp_path))["global_step"] == 4


def train_here(folder: Path) -> int:
    """Train three steps that are saved, without a configuration; return the status."""
    callbacks = [StopSignals(), RunCheckpoint(folder / "checkpoints", every_n_steps=1)]
    plugins = [CheckedCheckpointIO()]
    trainer = tiny.trainer(3, callbacks=callbacks, plugins=plugins, enable_checkpointing=True)
    return exit_status(lambda: trainer.fit(tiny.task(), tiny.data()))


def test_ctrl_c_saves_this_step_and_ends(tmp_path, monkeypatch, capfd):
    at_micro_batch(monkeypatch, 0, send(signal.SIGINT))
    assert in_child(lambda: train_here(tmp_path)) == 130
    told = capfd.readouterr()
    assert "stopped by SIGINT after step 1; saved" in told.out
    assert told.err.count("SIGINT: saving at the next optimiser step") == 1
    newest = list_checkpoints(tmp_path / "checkpoints", "step")[0]
    assert newest.name == "step-00000001.ckpt"
    assert newest_state(tmp_path)["global_step"] == 1


def test_a_second_ctrl_c_ends_at_once(tmp_path, monkeypatch):
    interrupt = send(signal.SIGINT)
    at_micro_batch(monkeypatch, 1, lambda task: [interrupt(task) for _ in range(2)])
    assert in_child(lambda: train_here(tmp_path)) == -signal.SIGINT
    (saved,) = list_checkpoints(tmp_path / "checkpoints", "step")
    assert saved.name == "step-00000001.ckpt"


def test_ctrl_c_before_training_is_one_line(capsys):
    def interrupted():
        raise KeyboardInterrupt

    assert exit_status(interrupted) == 130
    assert capsys.readouterr().err == "error: stopped by SIGINT\n"


@pytest.mark.parametrize(
    ("interrupt", "step", "last"),
    [
        pytest.param(
            lambda patch: at_micro_batch(patch, 4, send(signal.SIGTERM), rank=1),
            3,
            5,
            id="training",
        ),
        pytest.param(
            lambda patch: signal_in_validation(patch, rank=1),
            4,
            6,
            id="validation",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_sigterm_on_one_rank_ends_both_at_the_same_step(
    tmp_path, monkeypatch, interrupt, step, last
):
    """Resumed, they equal uninterrupted ranks; by commands: tasks/distributed/test_ddp.py."""
    quiet, interrupted = tmp_path / "quiet", tmp_path / "interrupted"

    def work() -> int:
        """Train to the signal, resume, and train without: in processes that start once."""
        with monkeypatch.context() as context:
            interrupt(context)
            status = train_a_rank(interrupted, last)
        assert status == 128 + signal.SIGTERM
        assert newest_state(interrupted)["global_step"] == step
        return train_a_rank(interrupted, last, resumed=step) or train_a_rank(quiet, last)

    assert in_ranks(work, timeout=60) == [0, 0]
    assert_equal_runs(interrupted, quiet)


def train_a_rank(version: Path, last: int, resumed: int | None = None) -> int:
    """Train as one of two ranks like `stateful`, without a configuration; return the status."""
    folder = version / "checkpoints"
    signals, logger = StopSignals(), RunCSVLogger(version, resumed or 0)
    if resumed is not None and os.environ["RANK"] == "0":
        logger.load()
    callbacks = [signals, FinalValidation(), RunCheckpoint(folder, every_n_steps=2)]
    every = {"accumulate_grad_batches": 2, "val_check_interval": 8, "log_every_n_steps": 1}
    two = {"devices": 2, "strategy": "ddp", "plugins": [CheckedCheckpointIO()], "logger": logger}
    trainer = tiny.trainer(last, callbacks=callbacks, enable_checkpointing=True, **two, **every)
    start = None if resumed is None else checkpoint_path(folder, "step", resumed)
    task = tiny.task(partial(tiny.soft_mgk, dropout=0.2), dropout=0.1, warmup_steps=2)
    return exit_status(lambda: trainer.fit(task, tiny.data(), ckpt_path=start))


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """A stand-in for SLURM's command, which notes how it was called."""
    folder, calls = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    program = folder / "scontrol"
    program.write_text(f'#!/bin/sh\necho "$@" >> "{calls}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return calls


def test_slurm_requeues_into_the_same_run_folder(
    uninterrupted, tmp_path, monkeypatch, scontrol, capfd
):
    """After a step that is followed by a validation, which the second start makes."""
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as context:
        at_micro_batch(context, 6, send(signal.SIGUSR1))
        assert main(command(tmp_path)) == 128 + signal.SIGUSR1
    assert scontrol.read_text(encoding="utf-8").splitlines() == ["requeue 4711"]
    told = capfd.readouterr().out
    assert "requeued job 4711" in told
    assert "stopped by SIGUSR1 after step 4; saved" in told
    version = only_version(tmp_path)
    assert newest_state(version)["global_step"] == 4
    assert not any(row.get("val/accuracy") for row in metrics(version)), "it ends there"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run(command(tmp_path))  # the same command, as SLURM runs it
    assert only_version(tmp_path) == version
    assert_equal_runs(version, uninterrupted)
    first, second = json.loads((version / "versions.json").read_text(encoding="utf-8"))["starts"]
    assert first["job"] == second["job"] == "slurm 4711"
    assert second["checkpoint"].endswith("step-00000004.ckpt")
    assert not list(Path.cwd().glob("hpc_ckpt*"))


@pytest.mark.slow  # what `auto` takes: test_run_folder.py; rows: curves/test_logs.py
def test_a_run_that_died_after_steps_but_before_a_checkpoint_begins_again(
    uninterrupted, tmp_path, monkeypatch
):
    """With `auto` in its own folder: its rows of metrics.csv are written once more, the same."""
    again = command(tmp_path, "--ckpt_path", "auto")
    with monkeypatch.context() as context:
        context.setattr(RunCheckpoint, "_save", lambda *_: kill_me())
        assert in_child(lambda: main(again)) == -signal.SIGKILL
    version = only_version(tmp_path)
    assert "backends" in read_starts(version)[0]  # a step was trained
    run(again)
    assert only_version(tmp_path) == version
    starts = read_starts(version)
    assert [(start["checkpoint"], start["saved"]) for start in starts] == [
        (None, False),
        (None, True),
    ]
    assert_equal_runs(version, uninterrupted)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("other", [False, True])
def test_a_restart_of_one_rank_is_one_of_all(own, other, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(int(own)))
    monkeypatch.setattr("lit_probattn.training.preemption.gather_objects", lambda _: [own, other])
    agree_on_restart()
    assert is_restart() == (own or other)


def test_requeue_says_what_failed(monkeypatch, tmp_path):
    assert requeue() == ""
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "12")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert job_name() == "slurm 12_3"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "scontrol is not on the PATH" in requeue()


def test_requeue_gives_the_error_of_scontrol_in_one_line(monkeypatch, scontrol):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    program = scontrol.parent / "bin" / "scontrol"
    program.write_text("#!/bin/sh\nprintf 'slurm error:\\n  denied\\n' >&2\nexit 1\n")
    assert "job 4711: slurm error: denied;" in requeue()


def test_a_stop_signal_is_announced_once_and_the_handlers_are_restored(capfd):
    before = signal.getsignal(signal.SIGTERM)
    task, signals = SimpleNamespace(stop_requested=0), StopSignals()
    signals.on_fit_start(None, task)
    try:
        for announced in (1, 0):
            os.kill(os.getpid(), signal.SIGTERM)
            assert task.stop_requested == signal.SIGTERM
            assert capfd.readouterr().err.count("SIGTERM: saving") == announced
    finally:
        signals.restore()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("sanity", [0, 1])
def test_our_handlers_are_there_in_the_first_validation_and_in_training(sanity):
    """Lightning has replaced them before the first of these."""
    signals, seen = StopSignals(), []

    class Look(Callback):
        def on_validation_batch_start(self, *_):
            seen.append(signal.getsignal(signal.SIGTERM))

        on_train_batch_start = on_validation_batch_start

    look = Look()
    run = tiny.trainer(1, callbacks=[signals, look], num_sanity_val_steps=sanity)
    try:
        run.fit(tiny.task(), tiny.data())
    finally:
        signals.restore()
    assert seen == [signals._note] * (sanity + 1)


@pytest.mark.parametrize(
    ("has_folder", "checks_sanity", "command"),
    [(False, False, "fit"), (True, True, "fit"), (True, False, "validate")],
)
def test_only_a_validation_of_a_training_that_saves_is_left(
    has_folder, checks_sanity, command, tmp_path
):
    trainer = SimpleNamespace(sanity_checking=checks_sanity, state=SimpleNamespace(fn=command))
    task = SimpleNamespace(stop_requested=signal.SIGTERM, device=torch.device("cpu"))
    RunCheckpoint(tmp_path if has_folder else None).leave_if_asked(trainer, task)
    assert not hasattr(task, "stop_agreed")
    assert not list(tmp_path.iterdir())


def test_a_signal_in_a_validation_saves_its_step_and_has_it_repeated(tmp_path):
    done = []
    progress = SimpleNamespace(reset=lambda: done.append("reset"))
    loop = SimpleNamespace(val_loop=SimpleNamespace(batch_progress=progress))
    trainer = SimpleNamespace(sanity_checking=False, state=SimpleNamespace(fn="fit"))
    trainer.global_step, trainer.max_steps, trainer.is_global_zero = 4, 6, False
    trainer.fit_loop = SimpleNamespace(epoch_loop=loop)
    trainer.save_checkpoint = lambda path, weights_only: done.append(path.name)
    task = SimpleNamespace(stop_requested=signal.SIGTERM, device=torch.device("cpu"))
    checkpoint = RunCheckpoint(tmp_path)
    with pytest.raises(Preempted, match="stopped by SIGTERM after step 4"):
        checkpoint.on_validation_batch_end(trainer, task)
    assert done == ["reset", "step-00000004.ckpt"]
    assert checkpoint.state_dict()["validation_is_due"]


@pytest.mark.parametrize("validates", [True, False])
def test_where_a_validation_follows_is_where_lightning_has_one(validates):
    """Every second micro-batch, and where training is stopped, the fifth."""
    said, came = [], []

    class Watch(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.should_stop = batch_idx == 4
            said.append(validation_follows(trainer))
            came.append(False)

        def on_validation_start(self, *_):
            came[-1] = True

    more = {} if validates else {"limit_val_batches": 0}
    run = tiny.trainer(9, callbacks=[Watch()], val_check_interval=2, **more)
    run.fit(tiny.task(), tiny.data())
    assert said == came == [validates and place in (1, 3, 4) for place in range(5)]
