"""Tables, pictures and files that a report is made of."""

from __future__ import annotations

import os
from pathlib import Path

import matplotlib
import pandas as pd
import pytest
from markdown_it import MarkdownIt

from lit_probattn.base import files, provenance
from lit_probattn.experiments.page import Made
from lit_probattn.records.markdown import code_span
from lit_probattn.records.tables import counted, markdown_lines, unequal_sides

matplotlib.use("Agg")


def test_what_is_missing_is_a_dash():
    frame = pd.DataFrame({"n": pd.array([3, None], dtype="Int64"), "x": [0.123456, float("nan")]})
    assert markdown_lines(frame.assign(text=["a", None])) == [
        *("| n | x | text |", "| --- | --- | --- |", "| 3 | 0.1235 | a |", "| – | – | – |"),
    ]


NAME = "<img src=x onerror=alert(1)>|a`\n`b"


def test_a_name_stays_text_in_a_table():
    rendered = (
        MarkdownIt()
        .enable("table")
        .render(
            "\n".join(
                markdown_lines(pd.DataFrame({"run": [NAME, code_span(NAME), "a\\|b", "1 < 2"]}))
            )
        )
    )
    assert "<img" not in rendered
    assert rendered.count("<td>") == 4, "one column"
    assert "<td>&lt;img src=x onerror=alert(1)&gt;|a<code>" in rendered
    assert "<td>a\\|b</td>" in rendered
    assert "<td>1 &lt; 2</td>" in rendered


@pytest.mark.parametrize("text", [NAME, "`", "a ``b`` c", "plain"])
def test_a_command_stays_text_in_a_line(text):
    (line,) = code_span(text).splitlines()
    tokens = MarkdownIt().parseInline(line)[0].children
    assert [token.type for token in tokens] == ["code_inline"]
    assert tokens[0].content == " ".join(text.split())


def test_things_are_counted_in_the_singular_and_plural():
    assert [counted(n, "sequence") for n in (0, 1, 2000)] == [
        *("0 sequences", "1 sequence", "2,000 sequences"),
    ]


def test_sides_are_unequal_where_a_known_setting_differs():
    sides = {
        "base": {"dropout": 0.0, "backend": "sdpa"},
        "a": {"dropout": 0.1, "backend": None},
        "b": {"dropout": 0.1, "backend": "sdpa"},
    }
    baselines = {"base": None, "a": "base", "b": "base", "absent": "base"}
    assert unequal_sides(sides, baselines, "no method alone") == [
        "**Unequal settings: dropout is 0.1 (a, b) and 0.0 (baseline base): no method alone.**"
    ]


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "rows.csv"
    files.replace_text(path, "old\n")

    def interrupted():
        with files.replacing(path) as file:
            file.write(b"ha")
            raise KeyError("interrupted")

    with pytest.raises(KeyError):
        interrupted()
    assert path.read_text(encoding="utf-8") == "old\n"
    with files.replacing(path) as file:
        file.write(b"new\n")
        number = os.fstat(file.fileno()).st_ino
    assert path.read_text(encoding="utf-8") == "new\n"
    assert path.stat().st_ino == number  # renamed, not copied


def test_temporary_names_cannot_be_guessed_and_links_are_not_followed(tmp_path, monkeypatch):
    """Who may write to the folder cannot have a file elsewhere overwritten."""
    target = tmp_path / "mine"
    target.write_text("mine")
    names = []
    for number in range(2):
        with files.replacing(tmp_path / "rows.csv") as file:
            names.append(Path(file.name).name)
            file.write(b"%d" % number)
    assert len(set(names)) == 2
    monkeypatch.setattr(files.secrets, "token_hex", lambda count: "guessed")
    (tmp_path / ".rows.csv.guessed").symlink_to(target)
    with pytest.raises(FileExistsError):
        files.replace_text(tmp_path / "rows.csv", "other")
    assert target.read_text(encoding="utf-8") == "mine"


def test_the_revision_is_that_of_the_checkout(monkeypatch):
    """A package that git does not track has no revision, even inside a repository."""
    git = {"rev-parse": "0123456789abcdef", "status": " M lit_probattn/__init__.py"}
    monkeypatch.delenv("PROFILING_REVISION", raising=False)
    for tracked, status, expected in (
        (None, "", "unknown"),
        ("__init__.py", "", "0123456"),
        ("__init__.py", git["status"], "0123456+"),
    ):
        answers = {**git, "ls-files": tracked, "status": status}
        monkeypatch.setattr(provenance, "_git", lambda *words, a=answers: a[words[0]])
        provenance.git_revision.cache_clear()
        assert provenance.git_revision() == expected
        assert f"revision {expected}." in provenance.machine()
    provenance.git_revision.cache_clear()


def test_the_head_of_a_report_names_how_it_was_made():
    facts = provenance.facts("python -m examples.studies.a", "meta")
    assert list(facts) == ["device", "versions", "git_revision", "command"]
    command, hardware, versions = Made.of(pd.DataFrame([facts]), command=facts["command"]).lines
    assert command == "- Command: `python -m examples.studies.a`"
    assert hardware == "- Hardware: meta tensors"
    assert facts["versions"] in versions
    assert "revision" in versions
