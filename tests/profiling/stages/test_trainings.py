"""Trainings of the GPU plan: which, in what order, forks, saving in time, going on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from lit_probattn.compare.launch import fork
from lit_probattn.compare.runner import logged_step
from lit_probattn.configs import ConfigError
from profiling.stages import trainings
from profiling.stages.place import Place
from profiling.stages.units import Unfinished
from tests.support.paths import ROOT

PROGRAM = "tests.profiling.stages.program"


def test_every_cell_once_and_the_valuable_ones_first(tmp_path):
    place = Place(tmp_path, "cuda")
    cells = trainings.cells_of("listops", place)
    names = [cell.name for cell in cells]
    assert len(names) == len(set(names))
    first = [(cell.row.name, cell.seed) for cell in cells[:20]]
    rows = ["softmax_8", "smgk_4", "mgk_4", "softmax_4"]
    assert first == [(row, seed) for seed in (4096, 0, 1, 2, 3) for row in rows]
    assert {cell.row.name for cell in cells[20:35]} == {"linear_8", "mlk_4", "smlk_4"}
    every = {name: {c.name for c in found} for name, found in _tables(place).items()}
    assert set(names) == set().union(*every.values())
    assert len(every["mgk_table1"]) == len(every["mgk_table2"]) == 55
    assert every["mgk_table1"] & every["mgk_table5"], "the tables share their models of one head"
    (one,) = {cell.config["trainer"]["precision"] for cell in cells}
    assert one == "16-mixed"


def _tables(place):
    return trainings.tables_of("listops", place)


def test_without_its_data_a_task_is_skipped_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("LIT_PROBATTN_DATA", str(tmp_path / "nothing"))
    (phase,) = trainings.training_stage("text", "", 1).phases(Place(tmp_path, "cuda"))
    assert [unit.key for unit in phase.units] == ["data, missing"]
    with pytest.raises(trainings.Skipped, match="aclImdb"):
        phase.units[0].work()


def start(log, *arguments, **environment):
    return fork([], [*map(str, arguments)], log, {**os.environ, **environment}, 0, PROGRAM)


def test_a_fork_is_a_command_of_its_own(tmp_path):
    log = tmp_path / "logs" / "log.txt"
    first = start(log, "a b", 3, GREETING="hello")
    assert first.wait() == first.poll() == first.returncode == 3
    assert start(log, "again", 0).wait() == 0
    lines = log.read_text().splitlines()
    assert lines[0] == f"$ python -m {PROGRAM} 'a b' 3"
    assert lines[1] == "hello True a b 3"
    assert lines[3] == "None True again 0"
    assert "GREETING" not in os.environ
    with pytest.raises(ConfigError, match="torchrun --nproc cannot start"):
        fork(["torchrun", "--nproc"], [], log, {}, 0, PROGRAM)


def test_a_fork_ends_when_asked(tmp_path):
    log = tmp_path / "log.txt"
    log.touch()
    running = start(log, "wait", 0)
    while "True wait" not in log.read_text():
        assert running.poll() is None
        time.sleep(0.02)
    running.terminate()
    assert running.wait() == -signal.SIGTERM


def a_cell(folder, steps, monkeypatch):
    """A cell of the rehearsal with more steps."""
    tiny = {**trainings._TINY, "trainer.val_check_interval": 100000}
    tiny["run.checkpoint_every"] = 100000  # it is saved when it is asked to, not before
    options = trainings.Options(steps=steps, settings=tiny)
    monkeypatch.setattr(trainings, "_options", lambda place: options)
    place = Place(folder / "out", "cpu")
    return trainings.cells_of("listops", place)[0], place


def test_a_training_is_saved_in_time_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    cell, place = a_cell(tmp_path, 400, monkeypatch)
    kept = lambda: list(trainings.unfinished_checkpoints("listops", place))  # noqa: E731
    assert kept() == []
    monkeypatch.setattr(trainings, "_SHORTEST_SECONDS", 0.5)
    monkeypatch.setattr(trainings, "_SAVING_SECONDS", 10.0)
    monkeypatch.setattr(trainings, "seconds_left", lambda: 0.1)
    with pytest.raises(Unfinished, match="no time to begin"):
        trainings._train(cell)
    assert not cell.log_path.exists()
    monkeypatch.setattr(trainings, "seconds_left", lambda: 0.0 if logged_step(cell) else 10.5)
    with pytest.raises(Unfinished, match=r"step \d+ of 400"):
        trainings._train(cell)
    saved = [path.name for path in kept()]
    assert saved[0].startswith("step-")
    assert 1 <= int(saved[0][5:-5]) < 400
    monkeypatch.setattr(trainings, "seconds_left", lambda: float("inf"))
    (row,) = trainings._train(cell)
    assert (row["steps"], row["starts"]) == (400, 2)
    assert kept() == []
    assert trainings._train(cell) == [row], "its result is there: nothing runs"


def test_a_failed_training_says_why(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    tiny = {**trainings._TINY, "model.init_args.no_such_option": 1}
    options = trainings.Options(steps=2, settings=tiny)
    monkeypatch.setattr(trainings, "_options", lambda place: options)
    cell = trainings.cells_of("listops", Place(tmp_path / "bad", "cpu"))[0]
    with pytest.raises(RuntimeError, match=r"the training failed: .*no_such_option"):
        trainings._train(cell)
    assert Path(cell.log_path).exists()
