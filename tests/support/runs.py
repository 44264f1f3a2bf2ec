"""Running the command line in tests: tiny configurations, killed processes, comparable results."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lit_probattn.base.processes import finish
from lit_probattn.cli.app import main
from lit_probattn.tasks import SequenceClassifier
from lit_probattn.training.checkpoints import list_checkpoints, load_checkpoint, step_of
from tests.cli.sparing import spare_the_commands
from tests.support.paths import ROOT

spare_the_commands()
TASK = str(ROOT / "configs/tasks/tiny/lra_text.yaml")

ATTENTION = """
model:
  init_args:
    attention:
      class_path: lit_probattn.attention.{cls}
      init_args: {args}
"""


def write_attention(folder: Path, cls: str = "SoftmaxAttention", **args: Any) -> str:
    """Write an attention file; returns its path.

    In one piece: ranks that each write their own command line read it while others write it.
    """
    path = folder / "variant.yaml"
    written = folder / f"variant.yaml.{os.getpid()}"
    written.write_text(ATTENTION.format(cls=cls, args={"num_heads": 2, **args}))
    written.replace(path)
    return str(path)


def arguments(
    command: str,
    folder: Path,
    *more: str,
    task: str = "tiny/lra_text",
    attention: str | None = None,
    **data: Any,
) -> list[str]:
    """Command line of a run of a small task on one CPU, in `folder`/runs.

    Args:
        command: its name.
        folder: of the runs.
        more: further words.
        task: name of a configuration.
        attention: its file. None means softmax attention.
        data: arguments of the DataModule.
    """
    files = ["--config", str(ROOT / f"configs/tasks/{task}.yaml")]
    files += ["--config", attention or write_attention(folder)]
    place = ["--run.root", str(folder / "runs"), "--trainer.accelerator", "cpu"]
    if "--trainer.devices" not in more:
        place += ["--trainer.devices", "1"]
    given = [word for key, x in data.items() for word in (f"--data.init_args.{key}", str(x))]
    return [command, *files, *place, *given, "--trainer.enable_progress_bar", "false", *more]


def stateful(command: str, folder: Path, *more: str) -> list[str]:
    """Command line of a run of six steps whose every part has state.

    Dropout in and outside attention, M-step priors, warm-up and beta1 cycling, two micro-batches
    per step, validations after steps 4 and 6, checkpoints after steps 2, 4 and 6.
    """
    attention = write_attention(folder, "MGKAttention", dropout=0.2, e_step="soft")
    short = ("--trainer.max_steps", "6", "--trainer.val_check_interval", "8")
    often = ("--trainer.log_every_n_steps", "1", "--run.checkpoint_every", "2")
    two = ("--trainer.accumulate_grad_batches", "2")
    return arguments(command, folder, *short, *often, *two, *more, attention=attention)


def at_micro_batch(
    patch: pytest.MonkeyPatch,
    number: int,
    act: Callable[[SequenceClassifier], object],
    *,
    hook: str = "training_step",
    step: int | None = None,
    rank: int = 0,
) -> None:
    """Let a classifier call `act` before one micro-batch.

    Args:
        number: of the micro-batch, from 0.
        act: receives the task.
        hook: method of the task that processes the micro-batch.
        step: only after so many optimiser steps. None means at any step.
        rank: only in this process.
    """
    original = getattr(SequenceClassifier, hook)

    def wrapped(self, batch, batch_idx):
        if (batch_idx, self.global_rank) == (number, rank) and (
            step is None or self.trainer.global_step == step
        ):
            act(self)
        return original(self, batch, batch_idx)

    patch.setattr(SequenceClassifier, hook, wrapped)


def send(number: int) -> Callable[[object], None]:
    """Return an action of `at_micro_batch` that sends a signal to its own process."""
    return lambda _: os.kill(os.getpid(), number)


def in_child(work: Callable[[], int], timeout: float = 120.0) -> int | None:
    """Run `work` in a forked process; returns its exit code, negative for a signal."""
    (code,) = _join([_fork(work, {})], timeout)
    return code


def in_ranks(work: Callable[[], int], count: int = 2, timeout: float = 120.0) -> list[int | None]:
    """Run `work` in processes that see what torchrun would tell them; returns their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "test",
    }
    ranks = [{**common, "RANK": str(i), "LOCAL_RANK": str(i)} for i in range(count)]
    return _join([_fork(work, environment) for environment in ranks], timeout)


def _fork(work: Callable[[], int], environment: dict[str, str]) -> Any:
    def target() -> None:
        os.environ.update(environment)
        # What the parent captures in memory would be lost with the process.
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        # A shell starts what runs in its background with SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        finish(work)

    process = multiprocessing.get_context("fork").Process(target=target)
    process.start()
    return process


def _join(processes: list[Any], timeout: float) -> list[int | None]:
    end = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
    if late:
        raise TimeoutError(f"{len(late)} processes did not end within {timeout} s")
    return [process.exitcode for process in processes]


def kill_me(*_: object) -> None:
    """End this process as the kernel would end it: nothing is flushed, nothing cleaned up."""
    os.kill(os.getpid(), signal.SIGKILL)


def run(arguments: list[str]) -> None:
    """Run a command in this process; fails if it does not succeed."""
    status = main(arguments)
    assert status == 0, f"exit status {status}"


def printed_config(command: list[str]) -> dict[str, Any]:
    """The configuration that a command would run with, as it prints it."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as stop:
        main([*command, "--print_config"])
    assert stop.value.code in (0, None)
    found: dict[str, Any] = yaml.safe_load(out.getvalue())
    return found


def rewound(version: Path, step: int, folder: Path) -> Path:
    """Copy a run to `folder`/runs as a kill after the checkpoint of `step` leaves it.

    Raises:
        FileNotFoundError: no checkpoint of that step is kept.
    """
    name = version.parent.name
    copy = Path(shutil.copytree(version, folder / "runs" / name / version.name))
    if not (copy / "checkpoints" / f"step-{step:08d}.ckpt").exists():
        raise FileNotFoundError(f"{version} has no checkpoint of step {step}")
    for path in (copy / "checkpoints").iterdir():
        if step_of(path) > step:
            path.unlink()
    return copy


def only_version(folder: Path) -> Path:
    """The single run folder below `folder`/runs."""
    (version,) = (folder / "runs").glob("*/*")
    return version


def newest_state(version: Path) -> dict[str, Any]:
    """Content of the newest step checkpoint of a run folder."""
    return load_checkpoint(list_checkpoints(version / "checkpoints", "step")[0])


def fingerprint(version: Path) -> str:
    """Hash of weights and optimiser state of the newest step checkpoint, bit for bit."""
    state = newest_state(version)
    digest = hashlib.sha256(str(state["global_step"]).encode())
    _add(digest, state["state_dict"])
    _add(digest, state["optimizer_states"])
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, dict):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            _add(digest, item)
    elif isinstance(value, torch.Tensor):
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    else:
        digest.update(repr(value).encode())


def metrics(version: Path) -> list[dict[str, str]]:
    """Rows of metrics.csv, without the speed."""
    with (version / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if k != "samples_per_second"} for row in rows]
