"""`lit-probattn list`: every name with a line, at once."""

from __future__ import annotations

import sys

import pytest
import yaml

import datamodules
from datamodules import REGISTRY
from lit_probattn import __main__ as door
from lit_probattn.analysis.registry import STUDIES
from lit_probattn.commands.listing import KINDS, WIDTH, lines_of, main
from lit_probattn.compare.tables import kinds
from tests.support.paths import CONFIGS
from tests.support.runs import in_child


def names_of(kind: str) -> set[str]:
    """Return names of files and of entries of bundles, which the tests read on their own."""
    inside = CONFIGS / kind
    names = {path.relative_to(inside).with_suffix("").as_posix() for path in inside.rglob("*.yaml")}
    bundles = {name for name in names if name.endswith(".bundle")}
    for bundle in bundles:
        entries = yaml.safe_load((inside / f"{bundle}.yaml").read_text(encoding="utf-8"))
        names |= set(entries) - {"under", "shared"}
    return names - bundles


NAMES = {
    "tasks": names_of("tasks"),
    "attention": names_of("attention"),
    "trainers": names_of("trainer"),
    "measurements": names_of("profiling"),
    "data": set(REGISTRY),
    "studies": set(STUDIES),
}


def figures() -> set[str]:
    kinds_of = {"figure", "sweep_figure", "drawing"}
    return {name for name, part in kinds().items() if part["kind"] in kinds_of}


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_has_a_line_that_says_something(kind):
    known = {"figures": figures, "tables": lambda: set(kinds()) - figures()}
    names = NAMES[kind] if kind in NAMES else known[kind]()
    width = max(map(len, names))
    found = {line[:width].strip(): line[width:].strip() for line in lines_of(kind)}
    assert found.keys() == names
    assert [name for name, text in found.items() if not 8 <= len(text) <= WIDTH] == []


def test_data_sets_say_what_their_class_says():
    for line in lines_of("data"):
        name, text = line.split(maxsplit=1)
        words = " ".join(getattr(datamodules, REGISTRY[name][1]).__doc__.split())
        assert words.startswith(text.removesuffix(" …"))


def test_own_folders_are_listed(tmp_path, monkeypatch):
    (tmp_path / "attention").mkdir()
    (tmp_path / "attention/mine.yaml").write_text("# My own\n# attention. More of it.\nmodel: {}\n")
    monkeypatch.setenv("LIT_PROBATTN_CONFIGS", str(tmp_path))
    (line,) = [line for line in lines_of("attention") if line.startswith("mine ")]
    assert line.split(maxsplit=1)[1] == "My own attention."


@pytest.mark.parametrize(
    "value", [pytest.param("[" * 30_000, marks=pytest.mark.slow), "- " * 100_000 + "a"]
)
def test_a_file_nested_too_deeply_is_named(value, tmp_path, monkeypatch, capfd):
    (tmp_path / "reproduce").mkdir()
    (tmp_path / "reproduce/deep.yaml").write_text(f"kind: figure\ntitle:\n  {value}\n")
    monkeypatch.setenv("LIT_PROBATTN_CONFIGS", str(tmp_path))

    def listed():
        sys.setrecursionlimit(500)  # the time to reach it grows with its square
        return main(["tables"])

    assert in_child(listed) == 2
    assert "deep.yaml: too deeply nested" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["task"], "cannot list 'task'; did you mean 'tasks'?"), (["zz"], "; valid: attention, data")],
)
def test_an_unknown_kind_is_one_line(words, expected, capsys):
    assert main(words) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert expected in told.err
    assert told.err.count("\n") == 1


def test_without_a_kind_the_kinds_are_listed(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lit-probattn", "list"])
    assert door.main() == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(KINDS)
