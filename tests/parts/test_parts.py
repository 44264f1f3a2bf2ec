"""`make test-full`: its parts are all tests, and one that passed is not run again."""

from __future__ import annotations

import pytest

from tests.parts import __main__ as parts
from tests.support.paths import ROOT


def test_every_test_is_in_one_part():
    found = parts.parts()
    for path in (ROOT / "tests").rglob("test_*.py"):
        name = path.relative_to(ROOT)
        around = {name.as_posix(), *(folder.as_posix() for folder in name.parents)}
        assert len(around & set(found)) == 1, name


def test_parts_are_resumed(tmp_path, monkeypatch, capsys):
    ran = []
    status = {"a": 0, "b": 1, "c": None}

    def run(part, hours):
        ran.append(part)
        return {"part": part, "revision": "r", "at": "", "seconds": 1, "status": status[part]}

    for name in status:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(parts, "ROOT", tmp_path)
    monkeypatch.setattr(parts, "RECORD", tmp_path / "record.jsonl")
    monkeypatch.setattr(parts, "run", run)
    monkeypatch.setattr(parts, "revision", lambda: "r")
    assert parts.main(["a", "b/", "c"]) == 1
    assert "1 of 3 parts passed" in capsys.readouterr().out
    status.update(b=0, c=5)
    assert parts.main(["a", "b", "c"]) == 0
    assert ran == ["a", "b", "c", "b", "c"]
    monkeypatch.setattr(parts, "revision", lambda: "another")
    assert parts.main(["a"]) == 1  # what was recorded now is of "r"
    assert ran[-1] == "a"


def test_a_part_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        parts.main(["tests/parts", "parts"])
    assert ended.value.code == 2
    assert "parts does not exist" in capsys.readouterr().err
