"""What clusters do to a run: full disks, folders that cannot be written, devices that are gone."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from multiprocessing import resource_sharer
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lit_probattn.cli import errors as cli_errors
from lit_probattn.cli.app import main
from lit_probattn.tasks import SequenceClassifier
from lit_probattn.training.checkpoints import (
    CheckedCheckpointIO,
    list_checkpoints,
    load_checkpoint,
    step_of,
)
from lit_probattn.training.peers import Heartbeats
from lit_probattn.training.run_folder import RunSettings, plan_fit
from lit_probattn.training.saving import RunCheckpoint
from tests.support.runs import (
    arguments,
    at_micro_batch,
    in_child,
    in_ranks,
    newest_state,
)
from tests.tasks import tiny


def the_error(captured: str) -> str:
    (line,) = [text for text in captured.splitlines() if text.startswith("error")]
    return line


def test_a_disk_that_fills_up_stops_the_run_and_loses_nothing(tmp_path, monkeypatch, capfd):
    """From step 2 on the kernel refuses to write more than a few bytes into any file.

    What is left is what a killed run leaves, which is resumed in `test_resume.py`.
    """

    def limit(_):
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))

    folder = tmp_path / "checkpoints"

    def train() -> None:
        saving, plugins = RunCheckpoint(folder, every_n_steps=1), [CheckedCheckpointIO()]
        trainer = tiny.trainer(3, callbacks=[saving], plugins=plugins, enable_checkpointing=True)
        trainer.fit(tiny.task(), tiny.data())

    at_micro_batch(monkeypatch, 1, limit)
    assert in_child(lambda: cli_errors.exit_status(train)) == 2
    line = the_error(capfd.readouterr().err)
    assert re.search(r"cannot write checkpoint .*-00000002.ckpt: .*File too large", line), line
    assert "--run.root" in line
    assert [step_of(path) for path in list_checkpoints(folder, "step")] == [1]
    assert load_checkpoint(list_checkpoints(folder, "step")[0])["global_step"] == 1
    assert not list(folder.glob(".*"))  # no half file is left behind


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


@pytest.mark.slow  # a file that cannot grow: above; the line of every error: below
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


@pytest.mark.parametrize("code", cli_errors._STORAGE, ids=errno.errorcode.get)
def test_what_the_disk_refuses_is_one_line(code, capsys):
    def refuse():
        raise OSError(code, os.strerror(code), "runs/a/0/metrics.csv")

    assert cli_errors.exit_status(refuse) == 2
    line = f"error: {os.strerror(code).lower()}: runs/a/0/metrics.csv; {cli_errors._STORAGE[code]}"
    assert capsys.readouterr().err == f"{line}\n"


def kill_loaders(monkeypatch):
    for worker in multiprocessing.active_children():
        worker.kill()


def kill_loaders_in_a_lock(monkeypatch):
    """The death is noticed while the queue of the process returns its lock."""

    def notice(frame, event, argument):
        if event == "call" and frame.f_code is threading.Condition.__exit__.__code__:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGCHLD)

    handler = signal.signal(signal.SIGCHLD, lambda *_: None)
    (worker,) = multiprocessing.active_children()
    worker.kill()
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    signal.signal(signal.SIGCHLD, handler)
    sys.setprofile(notice)


def reset_connection(monkeypatch):
    """What is seen of it while the process still counts as alive."""

    def detach(self):
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    monkeypatch.setattr(resource_sharer.DupFd, "detach", detach)


@pytest.mark.parametrize(
    ("collate", "fault"),
    [
        (None, kill_loaders),
        (None, reset_connection),
        (list, kill_loaders_in_a_lock),  # without tensors, which need the process to be read
    ],
)
def test_a_killed_loader_process_is_one_line(monkeypatch, capsys, collate, fault):
    def read():
        loader = iter(DataLoader(range(97), num_workers=1, collate_fn=collate))
        next(loader)
        assert loader._worker_result_queue._poll(60)  # the next batch is there
        fault(monkeypatch)
        for _ in loader:
            pass

    try:
        assert cli_errors.exit_status(read) == 2
    finally:
        sys.setprofile(None)
    line = the_error(capsys.readouterr().err)
    assert re.search(
        r"a loader process( \(\d+\))? was killed, most likely because memory ran out", line
    )
    assert "lower --data.init_args.num_workers or --data.init_args.batch_size" in line


def test_a_file_where_the_folder_of_runs_should_be(tmp_path, capsys):
    (tmp_path / "runs").touch()
    settings = RunSettings(root=str(tmp_path / "runs"))
    assert cli_errors.exit_status(lambda: plan_fit(settings, "name", {}, None)) == 2
    line = the_error(capsys.readouterr().err)
    assert "runs" in line
    assert "--run.root" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"accelerator": "gpu"}, "No supported gpu backend found"),
        ({"accelerator": "cuda", "devices": 2}, "CUDAAccelerator.*not av"),
        ({"accelerator": "cpu", "devices": 0}, "devices"),
    ],
    ids=["no-gpu", "no-cuda", "no-device"],
)
def test_a_device_that_is_not_there(capsys, options, expected):
    assert cli_errors.exit_status(lambda: pl.Trainer(**options)) == 2
    line = the_error(capsys.readouterr().err)
    assert re.search(expected, line), line


@pytest.mark.usefixtures("quick_heartbeats")
def test_a_gradient_of_one_rank_stops_all_before_the_update(tmp_path, monkeypatch, capfd):
    """NaN enters the backward pass of rank 1; both ranks stop with unchanged weights."""
    folder = tmp_path / "checkpoints"
    loss = SequenceClassifier.batch_loss

    def poisoned(self, batch):
        value = loss(self, batch)
        if self.global_rank == 1 and self.trainer.global_step == 1:
            value.register_hook(lambda gradient: gradient * float("nan"))
        return value

    monkeypatch.setattr(SequenceClassifier, "batch_loss", poisoned)

    def train() -> None:
        callbacks = [Heartbeats(), RunCheckpoint(folder, every_n_steps=1)]
        plugins = [CheckedCheckpointIO()]
        two = {"devices": 2, "strategy": "ddp", "enable_checkpointing": True}
        trainer = tiny.trainer(3, callbacks=callbacks, plugins=plugins, **two)
        trainer.fit(tiny.task(), tiny.data())

    assert in_ranks(lambda: cli_errors.exit_status(train), timeout=100) == [1, 1]
    told = capfd.readouterr().err
    for prefix in ("error", "error on rank 1"):
        assert re.search(rf"{prefix}: a gradient is not finite at step 1: first bad param", told)
    assert "samples " in told
    state = newest_state(tmp_path)
    assert state["global_step"] == 1
    assert all(tensor.isfinite().all() for tensor in state["state_dict"].values())
