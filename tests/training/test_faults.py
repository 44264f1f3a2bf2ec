"""What clusters do to a run: full disks, folders that cannot be written, devices that are gone."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import re
import resource
import shutil
import subprocess
import sys
from multiprocessing import resource_sharer
from pathlib import Path

import pytest
import torch

from lit_probattn.cli import errors as cli_errors
from lit_probattn.cli.app import main
from lit_probattn.tasks import SequenceClassifier
from lit_probattn.training.checkpoints import list_checkpoints, load_checkpoint, step_of
from tests.support.runs import (
    arguments,
    error_of,
    fingerprint,
    in_child,
    in_ranks,
    newest_state,
    only_version,
    run,
)

SHORT = ("--trainer.max_steps", "4", "--trainer.val_check_interval", "4")
SHORT += ("--run.checkpoint_every", "2")
TWO = ("--trainer.devices", "2", "--trainer.strategy", "ddp")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    run(arguments("fit", folder, *SHORT))
    return folder


def the_error(captured: str) -> str:
    (line,) = [text for text in captured.splitlines() if text.startswith("error")]
    return line


def test_a_disk_that_fills_up_stops_the_run_and_loses_nothing(
    undisturbed, tmp_path, monkeypatch, capfd
):
    """From step 3 on the kernel refuses to write more than a few bytes into any file."""
    train = SequenceClassifier.training_step

    def step(self, batch, batch_idx):
        if batch_idx == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
        return train(self, batch, batch_idx)

    with monkeypatch.context() as context:
        context.setattr(SequenceClassifier, "training_step", step)
        assert in_child(lambda: main(arguments("fit", tmp_path, *SHORT))) == 2
    line = the_error(capfd.readouterr().err)
    assert re.search(r"cannot write checkpoint .*-00000004.ckpt: .*File too large", line), line
    assert "--run.root" in line
    folder = only_version(tmp_path) / "checkpoints"
    assert [step_of(path) for path in list_checkpoints(folder, "step")] == [2]
    assert load_checkpoint(list_checkpoints(folder, "step")[0])["global_step"] == 2
    assert not list(folder.glob(".*"))  # no half file is left behind
    run(arguments("fit", tmp_path, *SHORT, "--ckpt_path", "last"))
    assert fingerprint(only_version(tmp_path)) == fingerprint(only_version(undisturbed))


NEW_MOUNTS = 0x20000  # CLONE_NEWNS of unshare(2)


def on_small_disk(folder: Path, options: str, command: list[str]) -> int:
    """Exit status of a command that sees a small file system of its own at `folder`."""
    mounts = (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", options, "tmpfs", str(folder)])

    def confined() -> int:
        if ctypes.CDLL(None).unshare(NEW_MOUNTS) != 0:
            return 99
        if any(subprocess.run(["mount", *words], check=False).returncode for words in mounts):
            return 99
        return main(command)

    status = in_child(confined)
    if status == 99:
        pytest.skip("mounting is not permitted here")
    return status


CANNOT_MOUNT = sys.platform != "linux" or os.getuid() != 0 or shutil.which("mount") is None


@pytest.mark.skipif(CANNOT_MOUNT, reason="needs the right to mount")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("size=256k", r"[Nn]o space left on device.*--run\.root"),
        ("size=1m,ro", r"read-only file system: \S*runs.*--run\.root"),
    ],
    ids=["full", "read-only"],
)
def test_a_real_file_system_that_refuses(tmp_path, capfd, options, expected):
    (tmp_path / "disk").mkdir()
    command = arguments("fit", tmp_path)
    command[command.index("--run.root") + 1] = str(tmp_path / "disk" / "runs")
    assert on_small_disk(tmp_path / "disk", options, command) == 2
    told = capfd.readouterr().err
    assert re.search(expected, the_error(told)), told
    assert "Traceback" not in told


def test_what_the_disk_refuses_is_one_line(tmp_path, monkeypatch, capsys):
    def refusal(code):
        return OSError(code, os.strerror(code), "runs/a/0/metrics.csv")

    def refuse(*args, **kwargs):
        raise refusal(errno.EDQUOT)

    monkeypatch.setattr("lit_probattn.cli.app.write_record", refuse)
    line = error_of(arguments("fit", tmp_path), capsys).removeprefix("error: ")
    assert line == cli_errors.explain(refusal(errno.EDQUOT))[0]
    for code, advice in cli_errors._STORAGE.items():
        expected = f"{os.strerror(code).lower()}: runs/a/0/metrics.csv; {advice}"
        assert cli_errors.explain(refusal(code)) == (expected, 2)


def kill_loaders(monkeypatch):
    train = SequenceClassifier.training_step

    def step(self, batch, batch_idx):
        if batch_idx == 1:
            for worker in multiprocessing.active_children():
                worker.kill()
        return train(self, batch, batch_idx)

    monkeypatch.setattr(SequenceClassifier, "training_step", step)


def reset_connection(monkeypatch):
    """What is seen of it while the process still counts as alive."""

    def detach(self):
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    monkeypatch.setattr(resource_sharer.DupFd, "detach", detach)


@pytest.mark.parametrize("fault", [kill_loaders, reset_connection])
def test_a_killed_loader_process_is_one_line(tmp_path, monkeypatch, capfd, fault):
    fault(monkeypatch)
    command = arguments("fit", tmp_path, "--data.init_args.num_workers", "1")
    assert in_child(lambda: main(command)) == 2
    line = the_error(capfd.readouterr().err)
    assert re.search(
        r"a loader process( \(\d+\))? was killed, most likely because memory ran out", line
    )
    assert "lower --data.init_args.num_workers or --data.init_args.batch_size" in line


def test_a_file_where_the_folder_of_runs_should_be(tmp_path, capsys):
    (tmp_path / "runs").touch()
    line = error_of(arguments("fit", tmp_path), capsys)
    assert "runs" in line
    assert "--run.root" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--trainer.accelerator", "gpu"], "No supported gpu backend found"),
        (["--trainer.accelerator", "cuda", "--trainer.devices", "2"], "CUDAAccelerator.*not av"),
        (["--trainer.devices", "0"], "devices"),
    ],
    ids=["no-gpu", "no-cuda", "no-device"],
)
def test_a_device_that_is_not_there(tmp_path, capsys, more, expected):
    line = error_of(arguments("fit", tmp_path, *more), capsys)
    assert re.search(expected, line), line


def test_a_gradient_of_one_rank_stops_all_before_the_update(tmp_path, monkeypatch, capfd):
    """NaN enters the backward pass of rank 1; both ranks stop with unchanged weights."""
    loss = SequenceClassifier.batch_loss

    def poisoned(self, batch):
        value = loss(self, batch)
        if self.global_rank == 1 and self.trainer.global_step == 2:
            value.register_hook(lambda gradient: gradient * float("nan"))
        return value

    monkeypatch.setattr(SequenceClassifier, "batch_loss", poisoned)
    work = arguments("fit", tmp_path, *TWO, "--run.checkpoint_every", "1")
    assert in_ranks(lambda: main(work), timeout=100) == [1, 1]
    told = capfd.readouterr().err
    for prefix in ("error", "error on rank 1"):
        assert re.search(rf"{prefix}: a gradient is not finite at step 2: first bad param", told)
    assert "samples " in told
    state = newest_state(only_version(tmp_path))
    assert state["global_step"] == 2
    assert all(tensor.isfinite().all() for tensor in state["state_dict"].values())
