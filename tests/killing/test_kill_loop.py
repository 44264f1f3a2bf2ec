"""SIGKILL at random moments: the short form of `python -m tests.killing.kill_loop`."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.killing import kill_loop
from tests.killing.victims import VICTIMS, Victim


@pytest.mark.slow
def test_two_kills_leave_no_trace(capsys):
    assert kill_loop.main(["--kills", "2", "--kinds", "checkpoint writing", "sweep"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 of 2"


def test_work_that_does_not_survive_is_seen(tmp_path, monkeypatch):
    """Appends a line per start: killed and started again, it leaves two."""

    def run(folder: Path, say) -> int:
        with (folder / "lines").open("a") as file:
            file.write("a line\n")
        say("working")
        kill_loop.time.sleep(0.1)
        return 0

    victim = Victim(
        run, lambda folder: (folder / "lines").read_text(encoding="utf-8"), "working", 0.02
    )
    monkeypatch.setitem(VICTIMS, "careless", victim)
    reference = kill_loop.undisturbed(victim, tmp_path)
    same, line = kill_loop.round_of("careless", reference, random.Random(0), tmp_path / "0")
    assert not same
    assert line.endswith("DIFFERENT")


def test_work_that_ends_before_most_kills_is_killed_in_time(tmp_path, monkeypatch):
    delays = []

    def killed(victim: Victim, place: Path, moment: int, delay: float) -> bool:
        delays.append(delay)
        return delay < 0.001

    victim = Victim(lambda folder, say: 0, lambda folder: "", "working", 60.0)
    monkeypatch.setitem(VICTIMS, "short", victim)
    monkeypatch.setattr(kill_loop, "killed", killed)
    same, line = kill_loop.round_of("short", ("", 1), random.Random(0), tmp_path)
    assert same, line
    assert delays == sorted(delays, reverse=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_kills_leave_no_trace(capsys):
    assert kill_loop.main(["--kills", "20", "--seed", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "20 of 20"
