"""Units of the GPU plan: rows on disk at once, deaths noted, failures tried again."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from profiling.stages.units import (
    Session,
    Skipped,
    Unfinished,
    Unit,
    finished,
    read_units,
    run_units,
    seconds_left,
)


def session(name="a", seconds=60.0):
    return Session(name, time.monotonic() + seconds)


def noting(folder, key, result=None):
    """A unit that leaves a file per call: it runs in another process."""

    def work():
        folder.mkdir(exist_ok=True)
        with (folder / key).open("a") as file:
            file.write("x")
        return result() if result else [{"value": key}]

    return Unit(key, work)


def calls(folder):
    return {path.name: len(path.read_text()) for path in folder.iterdir()}


def raises(error):
    def work():
        raise error

    return work


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("jobs", [1, 3])
def test_every_unit_once_and_again_nothing(tmp_path, jobs):
    path, seen = tmp_path / "units.jsonl", tmp_path / "seen"
    units = [noting(seen, key) for key in "abcde"]
    for name in ("first", "second"):
        assert run_units(units, path, session(name), jobs)
        assert calls(seen) == dict.fromkeys("abcde", 1)
        assert sorted(row["value"] for row in read_units(path)) == [*"abcde"]
        assert {row["session"] for row in read_units(path)} == {"first"}
    assert [p.name for p in tmp_path.iterdir() if "running" in p.name] == []


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_death_is_a_row_and_the_rest_goes_on(tmp_path, jobs):
    path, seen = tmp_path / "units.jsonl", tmp_path / "seen"
    units = [noting(seen, "a"), noting(seen, "b", die), noting(seen, "c"), noting(seen, "d")]
    assert run_units(units, path, session("first"), jobs)
    rows = {row["unit"]: row for row in read_units(path)}
    assert {key: row["status"] for key, row in rows.items()} == {
        **dict.fromkeys("acd", "ok"),
        "b": "failed",
    }
    assert "died" in rows["b"]["reason"]
    assert calls(seen) == dict.fromkeys("abcd", 1)
    assert run_units([*units[:1], noting(seen, "b"), *units[2:]], path, session("second"), jobs)
    assert calls(seen) == {**dict.fromkeys("acd", 1), "b": 2}
    assert finished(read_units(path)) == set("abcd")
    assert len(read_units(path)) == 4, "the failed row is gone"


def test_failures_are_tried_again_in_another_session_only(tmp_path):
    path, seen = tmp_path / "units.jsonl", tmp_path / "seen"
    units = [
        noting(seen, "broken", raises(ValueError("no\nreason"))),
        noting(seen, "skipped", raises(Skipped("not here"))),
        noting(seen, "half", lambda: [{"x": 1}, {"x": 2, "status": "failed"}]),
    ]
    for name, number in (("first", 1), ("first", 1), ("second", 2)):
        assert run_units(units, path, session(name))
        assert calls(seen) == {"broken": number, "skipped": 1, "half": number}
    rows = read_units(path)
    assert finished(rows) == {"skipped"}
    assert [row["reason"] for row in rows if row["unit"] == "broken"] == ["ValueError: no reason"]


def test_after_an_error_that_ends_a_gpu_another_process_goes_on(tmp_path):
    path = tmp_path / "units.jsonl"

    def pid():
        return [{"pid": os.getpid()}]

    lost = Unit("b", raises(RuntimeError("CUDA error: an illegal memory access")))
    assert run_units([Unit("a", pid), lost, Unit("c", pid), Unit("d", pid)], path, session())
    rows = {row["unit"]: row for row in read_units(path)}
    assert rows["b"]["status"] == "failed"
    assert rows["a"]["pid"] != rows["c"]["pid"] == rows["d"]["pid"]


def test_after_an_error_that_leaves_the_gpu_the_same_process_goes_on(tmp_path):
    path = tmp_path / "units.jsonl"

    def pid():
        return [{"pid": os.getpid()}]

    text = "CUDA error: not permitted when stream is capturing\nenable device-side assertions"
    units = [Unit("a", pid), Unit("b", raises(RuntimeError(text))), Unit("c", pid)]
    assert run_units(units, path, session())
    rows = {row["unit"]: row for row in read_units(path)}
    assert rows["b"]["status"] == "failed"
    assert rows["a"]["pid"] == rows["c"]["pid"]


def test_nothing_begins_after_the_end(tmp_path):
    path, seen = tmp_path / "units.jsonl", tmp_path / "seen"

    def slow():
        time.sleep(0.6)
        return [{}]

    units = [noting(seen, "a", slow), noting(seen, "b")]
    assert not run_units(units, path, session(seconds=0.3))
    assert calls(seen) == {"a": 1}
    assert not run_units(units, path, session(seconds=-1))
    assert run_units(units, path, session())
    assert calls(seen) == {"a": 1, "b": 1}


def test_half_a_line_is_dropped(tmp_path):
    path, seen = tmp_path / "units.jsonl", tmp_path / "seen"
    run_units([noting(seen, "a")], path, session())
    whole = path.read_text()
    path.write_text(whole + whole[:20])
    assert run_units([noting(seen, "a"), noting(seen, "b")], path, session("other"))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["unit"] for row in rows] == ["a", "b"]
    assert calls(seen) == {"a": 1, "b": 1}


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_saved_itself_goes_on_in_the_next_session(tmp_path, jobs):
    path, seen = tmp_path / "units.jsonl", tmp_path / "seen"

    def first_half():
        if len(calls(seen)["long"]) == 1:
            raise Unfinished("half of it")
        return [{"value": "all of it"}]

    def calls(folder):
        return {p.name: p.read_text() for p in folder.iterdir()}

    units = [noting(seen, "short"), noting(seen, "long", first_half)]
    assert not run_units(units, path, session("first"), jobs)
    rows = {row["unit"]: row["status"] for row in read_units(path)}
    assert rows == {"short": "ok"}, "neither failed nor finished"
    assert run_units(units, path, session("second"), jobs)
    assert {row.get("value") for row in read_units(path)} == {"short", "all of it"}
    assert calls(seen) == {"short": "x", "long": "xx"}


def test_a_unit_knows_how_long_it_may_take(tmp_path):
    path = tmp_path / "units.jsonl"
    assert seconds_left() == float("inf")
    assert run_units([Unit("a", lambda: [{"left": seconds_left()}])], path, session(seconds=40))
    (row,) = read_units(path)
    assert 0 < row["left"] <= 40
    assert seconds_left() == float("inf")
