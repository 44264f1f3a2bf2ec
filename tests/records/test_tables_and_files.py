"""Tables, pictures and files that a report is made of."""

from __future__ import annotations

import matplotlib
import pandas as pd
import pytest
from PIL import Image

from lit_probattn.records import provenance
from lit_probattn.records.tables import MAX_BYTES, markdown_lines, panels, save_png

matplotlib.use("Agg")


def test_what_is_missing_is_a_dash():
    frame = pd.DataFrame({"n": pd.array([3, None], dtype="Int64"), "x": [0.123456, float("nan")]})
    assert markdown_lines(frame.assign(text=["a", None])) == [
        *("| n | x | text |", "| --- | --- | --- |", "| 3 | 0.1235 | a |", "| – | – | – |"),
    ]


def test_a_picture_has_its_note_and_a_bounded_size(tmp_path):
    figure, [[axis]] = panels(1, 1, 5, 3)
    axis.plot([0, 1], [0, 1])
    path = save_png(figure, tmp_path / "new" / "a.png", "how it was made " * 9)
    assert 0 < path.stat().st_size <= MAX_BYTES
    assert Image.open(path).size == (600, 360)
    assert figure.get_supxlabel().startswith("how it was made")
    assert "\n" in figure.get_supxlabel()


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "rows.csv"
    provenance.replace_text(path, "old\n")

    def interrupted():
        with provenance.replacing(path) as temporary:
            temporary.write_text("ha")
            raise KeyError("interrupted")

    with pytest.raises(KeyError):
        interrupted()
    assert path.read_text() == "old\n"
    with provenance.replacing(path) as temporary:
        temporary.write_text("new\n")
        number = temporary.stat().st_ino
    assert path.read_text() == "new\n"
    assert path.stat().st_ino == number  # renamed, not copied


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
    facts = provenance.facts("python -m profiling study a", "meta")
    assert list(facts) == ["device", "versions", "git_revision", "command"]
    command, hardware, versions = provenance.head_lines(facts)
    assert command == "- Command: `python -m profiling study a`"
    assert hardware == "- Hardware: meta tensors"
    assert facts["versions"] in versions
    assert "revision" in versions
