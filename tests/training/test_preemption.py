"""SIGTERM, Ctrl-C and SLURM's SIGUSR1 save the step and end the run, which goes on exactly."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lit_probattn.cli.app import main
from lit_probattn.tasks import SequenceClassifier
from lit_probattn.training.checkpoints import list_checkpoints, load_checkpoint
from lit_probattn.training.preemption import (
    StopSignals,
    agree_on_restart,
    is_restart,
    job_name,
    requeue,
)
from lit_probattn.training.run_record import read_starts
from lit_probattn.training.saving import RunCheckpoint
from tests.support.runs import (
    arguments,
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

# Accumulation, dropout, warm-up and M-step priors; validation after steps 4 and 8.
OPTIONS = (
    *("--trainer.accumulate_grad_batches", "2", "--trainer.val_check_interval", "8"),
    *("--trainer.log_every_n_steps", "1", "--run.checkpoint_every", "4"),
    *("--trainer.max_steps", "8"),
)
TWO = ("--trainer.devices", "2", "--trainer.strategy", "ddp")
SLURM = {
    **{"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "listops", "SLURM_NTASKS": "1"},
    **{"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "1"},
}


def command(folder, *more):
    attention = write_attention(folder, "MGKAttention", dropout=0.2, e_step="soft")
    return arguments("fit", folder, *OPTIONS, *more, attention=attention)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    run(command(folder))
    return only_version(folder)


def signal_in_training(monkeypatch, number, micro_batch, rank=0):
    train = SequenceClassifier.training_step

    def step(self, batch, batch_idx):
        if batch_idx == micro_batch and self.global_rank == rank:
            os.kill(os.getpid(), number)
        return train(self, batch, batch_idx)

    monkeypatch.setattr(SequenceClassifier, "training_step", step)


def signal_in_validation(monkeypatch, rank=0):
    validate = SequenceClassifier.validation_step

    def step(self, batch, batch_idx):
        if self.trainer.global_step == 4 and batch_idx == 1 and self.global_rank == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        validate(self, batch, batch_idx)

    monkeypatch.setattr(SequenceClassifier, "validation_step", step)


def assert_equal_runs(resumed, expected):
    assert fingerprint(resumed) == fingerprint(expected)
    assert metrics(resumed) == metrics(expected)
    names = [sorted(p.name for p in (v / "checkpoints").iterdir()) for v in (resumed, expected)]
    assert names[0] == names[1]


@pytest.mark.parametrize(
    ("interrupt", "step"),
    [
        pytest.param(lambda m: signal_in_training(m, signal.SIGTERM, 4), 3, id="mid-accumulation"),
        pytest.param(lambda m: signal_in_training(m, signal.SIGTERM, 6), 4, id="validation-next"),
        # Resuming after a stop in a validation's test split: curves/test_test_scores.py
        pytest.param(signal_in_validation, 4, id="in-validation", marks=pytest.mark.slow),
    ],
)
def test_sigterm_saves_this_step_and_ends(
    uninterrupted, tmp_path, monkeypatch, capfd, interrupt, step
):
    with monkeypatch.context() as context:
        interrupt(context)
        assert in_child(lambda: main(command(tmp_path))) == 128 + signal.SIGTERM
    told = capfd.readouterr().out
    assert f"stopped by SIGTERM after step {step}; saved" in told
    newest = list_checkpoints(only_version(tmp_path) / "checkpoints", "step")[0]
    assert newest.name == f"step-{step:08d}.ckpt"
    run(command(tmp_path, "--ckpt_path", "last"))
    assert_equal_runs(only_version(tmp_path), uninterrupted)


def test_sigterm_in_a_validation_saves_its_step_and_ends(tmp_path, monkeypatch, capfd):
    signal_in_validation(monkeypatch)
    assert in_child(lambda: main(command(tmp_path))) == 128 + signal.SIGTERM
    assert "stopped by SIGTERM after step 4; saved" in capfd.readouterr().out
    version = only_version(tmp_path)
    newest = list_checkpoints(version / "checkpoints", "step")[0]
    assert load_checkpoint(newest)["global_step"] == 4
    assert not any(row.get("val/accuracy") for row in metrics(version)), "it ends there"


def test_ctrl_c_saves_this_step_and_ends(tmp_path, monkeypatch, capfd):
    """SIGTERM's checkpoint of this step is resumed above."""
    signal_in_training(monkeypatch, signal.SIGINT, 4)
    assert in_child(lambda: main(command(tmp_path))) == 130
    told = capfd.readouterr()
    assert "stopped by SIGINT after step 3; saved" in told.out
    assert told.err.count("SIGINT: saving at the next optimiser step") == 1
    newest = list_checkpoints(only_version(tmp_path) / "checkpoints", "step")[0]
    assert newest.name == "step-00000003.ckpt"
    assert load_checkpoint(newest)["global_step"] == 3


def test_a_second_ctrl_c_ends_at_once(tmp_path, monkeypatch):
    train = SequenceClassifier.training_step

    def step(self, batch, batch_idx):
        if batch_idx == 10:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return train(self, batch, batch_idx)

    monkeypatch.setattr(SequenceClassifier, "training_step", step)
    assert in_child(lambda: main(command(tmp_path))) == -signal.SIGINT
    assert list_checkpoints(only_version(tmp_path) / "checkpoints", "step")[0].name == (
        "step-00000004.ckpt"
    )


def test_ctrl_c_before_training_is_one_line(tmp_path, monkeypatch, capfd):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(SequenceClassifier, "model_class", interrupted)
    assert in_child(lambda: main(command(tmp_path))) == 130
    told = capfd.readouterr().err
    assert told.strip().endswith("error: stopped by SIGINT")
    assert "Traceback" not in told


@pytest.mark.parametrize("where", ["training", pytest.param("validation", marks=pytest.mark.slow)])
def test_sigterm_on_one_rank_ends_both_at_the_same_step(tmp_path, monkeypatch, where):
    quiet, interrupted = tmp_path / "quiet", tmp_path / "interrupted"
    for folder in (quiet, interrupted):
        folder.mkdir()
    assert in_ranks(lambda: main(command(quiet, *TWO))) == [0, 0]
    with monkeypatch.context() as context:
        if where == "training":
            signal_in_training(context, signal.SIGTERM, 4, rank=1)
        else:
            signal_in_validation(context, rank=1)
        codes = in_ranks(lambda: main(command(interrupted, *TWO)), timeout=60)
    assert codes == [128 + signal.SIGTERM] * 2
    resume = command(interrupted, *TWO, "--ckpt_path", "auto")
    assert in_ranks(lambda: main(resume)) == [0, 0]
    assert_equal_runs(only_version(interrupted), only_version(quiet))


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
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as context:
        signal_in_training(context, signal.SIGUSR1, 5)
        assert in_child(lambda: main(command(tmp_path))) == 128 + signal.SIGUSR1
    assert scontrol.read_text(encoding="utf-8").splitlines() == ["requeue 4711"]
    assert "requeued job 4711" in capfd.readouterr().out
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert in_child(lambda: main(command(tmp_path))) == 0  # the same command, as SLURM runs it
    version = only_version(tmp_path)
    assert_equal_runs(version, uninterrupted)
    first, second = json.loads((version / "versions.json").read_text(encoding="utf-8"))["starts"]
    assert first["job"] == second["job"] == "slurm 4711"
    assert second["checkpoint"].endswith("step-00000003.ckpt")
    assert not list(Path.cwd().glob("hpc_ckpt*"))


def test_a_job_that_died_before_its_first_checkpoint_begins_again(
    uninterrupted, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    first = rewound(uninterrupted, 8, tmp_path)  # an older run
    starts = json.loads((first / "versions.json").read_text(encoding="utf-8"))
    starts["starts"][0]["job"] = "torchrun job-6"
    (first / "versions.json").write_text(json.dumps(starts))
    with monkeypatch.context() as context:
        context.setattr(SequenceClassifier, "training_step", lambda *_: kill_me())
        assert in_child(lambda: main(command(tmp_path))) == -signal.SIGKILL
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    run(command(tmp_path))
    folders = sorted(path.name for path in first.parent.iterdir())
    assert folders == ["0", "1"]
    assert fingerprint(first.parent / "1") == fingerprint(first)


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
