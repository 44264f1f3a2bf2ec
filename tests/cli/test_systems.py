"""A system without POSIX's signals, locks, limits and forks, or without UTF-8, simulated."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys

import pytest

from lit_probattn.base.errors import ConfigError
from lit_probattn.base.locks import claim, hold, release
from lit_probattn.base.processes import num_useful
from tests.support.forks import program
from tests.support.paths import ROOT

# What Windows lacks, gone before anything of ours is imported;
# other packages ask for the platform by its name.
WITHOUT = """
import os, platform, signal, sys, types, warnings
import fvcore.nn, lightning.pytorch, rich.console, submitit
connector = lightning.pytorch.trainer.connectors.signal_connector
connector.signal = types.SimpleNamespace(**vars(signal))
for name in ("SIGUSR1", "SIGUSR2", "SIGKILL", "SIGHUP"):
    delattr(signal, name)
for name in ("fork", "register_at_fork", "O_NOFOLLOW", "sched_getaffinity", "getuid"):
    delattr(os, name)
sys.modules["fcntl"] = sys.modules["resource"] = None
"""
PROGRAM = f"""{WITHOUT}
from pathlib import Path
from lit_probattn.tasks import *
import lit_probattn.cli.app, lit_probattn.compare.own
import profiling.cli, profiling.study, profiling.sweep.run
from lit_probattn.base.processes import fork_context
from lit_probattn.base.errors import ConfigError
from lit_probattn.kernels.cpu import library
from lit_probattn.base.locks import claim
platform.system = lambda: "Windows"  # the C library asks; PyTorch has been imported
words = sys.argv[1:]
assert lit_probattn.cli.app.main(words) == 0
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    with claim(Path("locks/x")) as handle:
        assert handle is not None
assert "no file locks" in str(told[0].message)
try:
    fork_context()
except ConfigError as error:
    print(error)
from lit_probattn.experiments.launch import start
command = start([], ["list", "tasks"], Path("log"), dict(os.environ), 0)
assert command.wait() == 0
assert "lra_listops" in Path("log").read_text(encoding="utf-8")
print("all of it")
"""


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL])
def test_file_systems_without_locks_are_one_warning(number, tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(UserWarning, match="no file locks"), claim(tmp_path / "a") as handle:
        assert handle is not None
    with pytest.warns(UserWarning, match="no file locks"):
        assert hold(tmp_path / "b") is None
    release(tmp_path / "b")


def test_other_errors_of_locks_are_errors(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def flock(*_):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="broken"), claim(tmp_path / "a"):
        pass
    with pytest.raises(OSError, match="broken"):
        hold(tmp_path / "b")


def test_without_fork_data_are_generated_by_one_process(monkeypatch):
    monkeypatch.delattr(os, "fork")
    assert num_useful(None, 4) == num_useful(1, 4) == 1
    with pytest.raises(ConfigError, match=r"num_processes 2 requires fork.*: set it to 1"):
        num_useful(2, 4)


def test_without_posix_everything_imports_and_a_model_trains(tmp_path):
    words = ["fit", "--task", "tiny/lra_listops", "--attention", "smgk", "--trainer.max_steps", "2"]
    words += ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]
    words += ["--data.init_args.cache_dir", str(tmp_path / "cache")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # for the command that it starts
    told = program(PROGRAM, tmp_path, *words, environment=environment)
    assert told[-1] == "all of it"
    assert "this command forks processes" in "\n".join(told)


@pytest.mark.parametrize(
    "package",
    [
        *("lit_probattn", "lit_probattn.analysis", "lit_probattn.convert"),
        *("lit_probattn.reproduce", "profiling", "datamodules"),
    ],
)
def test_characters_that_a_terminal_lacks_end_no_command(package, monkeypatch):
    """Each package that `python -m` runs prints `?` for them."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    monkeypatch.setattr(sys, "argv", [package, "no-such-thing"])
    with contextlib.suppress(SystemExit):
        importlib.import_module(f"{package}.__main__").main()
    print("≤", flush=True)
    assert sys.stdout.buffer.getvalue().endswith(b"?\n")
