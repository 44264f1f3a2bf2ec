"""Jobs of any kind: they wait for each other, decide on the status of their steps, run once."""

from __future__ import annotations

import pytest

from lit_probattn.base.errors import ChildError
from lit_probattn.base.processes import Worker
from lit_probattn.experiments.runner import Call, Command, Job, Runner

PROGRAM = """
import sys
from pathlib import Path
place, status = Path(sys.argv[1]), int(sys.argv[2])
with (place.parent / "order").open("a") as file:
    file.write(f"{place.name}\\n")
if not status:
    place.touch()
sys.exit(status)
"""


class Made(Job):
    """A job that makes a file, unless its program ends with a status."""

    def __init__(self, place, called, after=(), status=0):
        super().__init__(called, f"job {called}", place, after=after)
        self.status = status

    def is_done(self):
        return (self.folder / self.name).is_file()

    def work(self):
        status = yield Command([str(self.folder / self.name), str(self.status)], "makes")
        if status:
            raise ChildError(f"status {status}", again=status != 2)
        return "made"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "makes.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def order(folder):
    return (folder / "order").read_text(encoding="utf-8").split()


@pytest.mark.parametrize("num_slots", [1, 3])
def test_a_job_waits_for_all_that_it_begins_with(folder, num_slots):
    first, second = Made(folder, "first"), Made(folder, "second")
    last = Made(folder, "last", (first, second))
    lines = []
    outcome = Runner(num_slots, say=lines.append).run([last, first, second])
    assert (outcome.ran, outcome.failed, outcome.skipped) == (3, {}, {})
    assert order(folder)[-1] == "last"
    assert any(line.endswith("job last: made") for line in lines)
    again = Runner(num_slots, say=lines.append).run([last, first, second])
    assert (again.ran, len(again.finished), len(order(folder))) == (0, 3, 3)


def test_what_waits_for_a_job_that_failed_is_skipped(folder):
    refused, broken = Made(folder, "refused", status=2), Made(folder, "broken", status=3)
    left, other = Made(folder, "left", (refused,)), Made(folder, "other")
    outcome = Runner(say=lambda line: None).run([left, refused, broken, other])
    assert outcome.failed == {"job refused": "status 2", "job broken": "status 3"}
    assert outcome.skipped == {"job left": "it depends on job refused, which failed"}
    assert outcome.finished == [other]
    # What a user got wrong stays wrong; the others are tried again after all.
    assert order(folder) == ["refused", "broken", "other", "broken"]


def test_a_job_without_what_it_begins_with_is_skipped(folder):
    left = Made(folder, "left", (Made(folder, "elsewhere"),))
    outcome = Runner(say=lambda line: None).run([left])
    assert outcome.skipped == {"job left": "it depends on job elsewhere, which is not finished"}
    assert not (folder / "order").exists()


ANSWERS = """
import os, sys
from lit_probattn.base.processes import answer_requests

def answer(request):
    if request == "die":
        os.kill(os.getpid(), 9)
    return [request, os.getpid()]

answer_requests(int(sys.argv[1]), answer)
"""


class Asked(Made):
    """A job that asks a worker, and asks it again where that died."""

    def work(self):
        worker = yield Call(lambda: Worker("answers"), self.name, 30.0)
        try:
            found = worker.answer()
        except ChildError as error:
            found = [str(error), 0]
        (self.folder / self.name).write_text(f"{found[0]} {found[1]}")
        return "asked"


def test_calls_of_a_slot_share_a_worker_until_it_dies(folder):
    (folder / "answers.py").write_text(ANSWERS)
    jobs = [Asked(folder, name) for name in ("one", "two", "die", "three")]
    outcome = Runner(say=lambda line: None).run(jobs)
    assert (outcome.ran, outcome.failed) == (4, {})
    one, two, die, three = (
        (folder / job.name).read_text(encoding="utf-8").rsplit(" ", 1) for job in jobs
    )
    assert [one[0], two[0], three[0]] == ["one", "two", "three"]
    assert one[1] == two[1] != three[1]
    assert "killed (signal 9)" in die[0]
    assert not [*folder.glob("locks/*")]


def test_without_a_receiver_progress_is_one_line_every_ten_seconds(folder, capsys):
    jobs = [Asked(folder, name) for name in ("one", "two", "three")]
    (folder / "answers.py").write_text(ANSWERS)
    assert Runner(say=None, what="points").run(jobs).ran == 3
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "points finished" in line] == ["3 of 3 points finished"]
