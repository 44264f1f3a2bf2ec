"""Shards of a command as jobs of submitit: local and debug executors, preemption, refusals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from lit_probattn.base.errors import ConfigError
from lit_probattn.base.processes import RAISED, end_with_parent, finish
from lit_probattn.experiments.launch import Shard, submit
from lit_probattn.reproduce.__main__ import main
from tests.compare.test_runner import arguments
from tests.compare.tiny import run_here
from tests.support.forks import fork_module
from tests.support.helpers import error_of
from tests.support.paths import ROOT

submitit = pytest.importorskip("submitit")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def _root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def forked(monkeypatch):
    """Shards of this process's executor run in forked processes."""
    fork_module(monkeypatch, "lit_probattn.reproduce", main)


@pytest.mark.usefixtures("forked", "sketches")
def test_shards_run_as_jobs_and_the_report_is_written(tmp_path, capsys, monkeypatch):
    """By the local executor: `tests/compare/test_doors.py`."""
    run_here(monkeypatch)
    words = arguments(tmp_path, "--only", "listops", "--seeds", "3")
    more = ["--executor", "debug", "--shards", "2", "--slurm", "timeout_min=10", "partition=x"]
    assert main([*words, *more]) == 0
    printed = capsys.readouterr().out
    for index in (0, 1):
        assert f"shard {index}/2: debug job " in printed
    assert len(list((tmp_path / "runs/reproduce/results").glob("*.jsonl"))) == 2
    assert "report: " in printed
    assert (tmp_path / "runs/reproduce/reports/tiny/report.md").is_file()


@pytest.mark.usefixtures("forked", "sketches")
def test_failed_shard_shows_in_the_exit_status(tmp_path, monkeypatch):
    run_here(monkeypatch)
    words = arguments(tmp_path, "--only", "listops", "--attempts", "1", "--seeds", "3")
    assert main([*words, "--shard", "0/2"]) == 0
    (tmp_path / "FAIL").touch()
    assert main([*words, "--executor", "debug", "--shards", "2"]) == 1
    assert "1 of 2 runs are finished; missing: listops, MGK, 1 head, seed 3" in (
        tmp_path / "runs/reproduce/reports/tiny/report.md"
    ).read_text(encoding="utf-8")


@pytest.fixture
def victim(tmp_path, monkeypatch):
    """A module that saves when it is asked to end, and then has something to go on from."""
    (tmp_path / "victim.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "def save(*_):\n    pathlib.Path('SAVED').touch()\n    sys.exit(130)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "if pathlib.Path('SAVED').exists():\n    print(sys.argv[1:]); sys.exit(0)\n"
        "pathlib.Path('STARTED').write_text(str(os.getppid()))\ntime.sleep(60)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    return tmp_path


def until_it_exists(path, seconds=240.0):
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert path.exists()


def test_a_preempted_shard_saves_and_its_submission_goes_on(victim, capfd):
    """What submitit calls in the job: the shard, `checkpoint` at the signal, the shard again."""
    shard, found = Shard("victim", ["--shard", "0/2"]), []
    job = threading.Thread(target=lambda: found.append(shard()))
    job.start()
    until_it_exists(victim / "STARTED")
    again = shard.checkpoint()
    job.join(20)
    assert found == [130]
    assert (victim / "SAVED").exists()
    assert again.function() == 0
    assert "['--shard', '0/2']" in capfd.readouterr().out


@pytest.mark.slow
def test_preempted_job_saves_and_is_submitted_again(victim):
    """SLURM's signal reaches submitit's process, which asks the shard to end and to go on later."""
    executor = submitit.AutoExecutor(folder=victim / "jobs", cluster="local")
    executor.update_parameters(timeout_min=5)
    job = executor.submit(Shard("victim", ["--shard", "0/2"]))
    until_it_exists(victim / "STARTED")
    time.sleep(0.5)
    os.kill(int((victim / "STARTED").read_text(encoding="utf-8")), signal.SIGUSR2)
    until_it_exists(victim / "SAVED", 20)
    assert job.result() == 0
    assert "['--shard', '0/2']" in job.stdout()


def test_signal_of_the_scheduler_does_not_reach_the_commands(tmp_path):
    code = "import signal; print(signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=end_with_parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True\n"
    assert signal.getsignal(signal.SIGUSR2) is not signal.SIG_IGN


def submit_with(tmp_path, **parameters):
    return submit("m", [], executor="local", count=1, folder=tmp_path, parameters=parameters)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"partitoin": "gpu"}, "Unknown argument 'partitoin' for executor 'slurm'"),
        ({"timeout_min": "long"}, 'Parameter "timeout_min" expected type'),
    ],
)
def test_wrong_parameters_are_one_line(tmp_path, parameters, message):
    with pytest.raises(ConfigError, match="--slurm: ") as caught:
        submit_with(tmp_path, **parameters)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_usage(tmp_path, monkeypatch):
    words = arguments(tmp_path)
    line = error_of([*words, "--executor", "debug", "--shard", "0/2"], main)
    assert "--executor creates the shards: remove --shard" in line
    line = error_of([*words, "--executor", "here", "--shards", "2"], main)
    assert "--shards and --slurm require --executor" in line
    assert "error: --slurm: " in error_of([*words, "--executor", "slurm"], main)
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert 'pip install "lit-probattn[slurm]"' in error_of([*words, "--executor", "debug"], main)


def raised() -> int:
    raise KeyError("lost")


@pytest.mark.parametrize(
    ("work", "status", "told"),
    [
        (lambda: os.system("echo of a child") + 3, 3, "of a child"),
        (raised, RAISED, "KeyError: 'lost'"),
    ],
)
def test_a_forked_process_ends_with_the_status_of_its_work(work, status, told, tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("before\n")
    process = os.fork()
    if not process:
        finish(work, log)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == status
    lines = log.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", told)
