"""The page of a report: what is written, what is read again, the front page of all."""

from __future__ import annotations

import shutil

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from lit_probattn.base import provenance
from lit_probattn.base.errors import ConfigError
from lit_probattn.experiments.expectations import Estimate, Finding
from lit_probattn.experiments.page import (
    Made,
    Page,
    as_csv,
    image,
    read,
    together,
    write_front_page,
)
from lit_probattn.records.figures import ReportFigure
from lit_probattn.records.markdown import escaped
from profiling.report.efficiency import efficiency_lines
from tests.support.pages import Page as Shown
from tests.support.paths import ROOT

MADE = Made("python -m a", "a GPU", "torch 2", "abc1234", more={"Data": "made up"})
ROWS = pd.DataFrame({"seed": [0, 1], "value": [1 / 3, 2.0]})


def drawn():
    return plt.figure(figsize=(2, 1))


FIGURE = ReportFigure("It rises [to 3]", "Lines: ours.", drawn)


def page(**change):
    given = {
        **{"kind": "runs", "title": "One <b>", "made": MADE, "finding": "It is so."},
        **{"body": [image("curve_one"), ""], "tables": {"rows": as_csv(ROWS)}},
        "findings": [Finding("3 > 2", "agrees", "it rises", Estimate(1.0, 0.5, 1.5))],
        "figures": {"curve_one": FIGURE},
        "about": {"cells": [1, 2]},
    }
    return Page(**{**given, **change})


def test_what_is_written(tmp_path):
    (tmp_path / "figures").mkdir()
    for name in ("old.png", "old.svg"):
        (tmp_path / "figures" / name).write_text("")
    files = page().write(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in files] == [
        *("report.md", "rows.csv", "report.json"),
        *("figures/curve_one.png", "figures/curve_one.svg"),
    ]
    assert not list(tmp_path.glob("figures/old.*"))
    data = read(tmp_path)
    assert data["made"]["machine"] == "a GPU"
    assert data["findings"] == [
        {
            **{"says": "it rises", "found": "3 > 2", "verdict": "agrees"},
            **{"value": 1.0, "low": 0.5, "high": 1.5},
        }
    ]
    assert (tmp_path / "report.md").read_text(encoding="utf-8").splitlines()[:8] == [
        "# One &lt;b>",
        "",
        "- Command: `python -m a`",
        "- Data: made up",
        "- Hardware: a GPU",
        "- Versions: torch 2; revision abc1234",
        f"- SHA-256: `rows.csv` {data['sha256']['rows.csv'][:12]}",
        "",
    ]
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "![It rises to 3](figures/curve_one.svg)\n\n**It rises" in text
    assert "Lines: ours. Measured on a GPU; revision abc1234, with the command above." in text


def test_nothing_of_an_earlier_report_remains_beside_a_new_one(tmp_path):
    """Other files of the folder do; a corrupt report.json names no tables."""
    pytest.importorskip("markdown_it")
    own = tmp_path / "mine.csv"
    own.write_text("1")
    page(tables={"rows": "1\n", "ratios": "1\n"}).write(tmp_path, html=True)
    assert (tmp_path / "report.html").exists()
    written = page().write(tmp_path)
    left = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {*written, own}
    data = tmp_path / "report.json"
    for content in ("{", "[]", "{}", '{"sha256": ["../x.csv"]}', '{"sha256": ["mine.csv/.."]}'):
        data.write_text(content)
        assert page().write(tmp_path) == written
    assert own.exists()


def test_a_figure_that_is_there_is_copied(tmp_path):
    page().write(tmp_path / "a")
    there = tmp_path / "a/figures/curve_one.png"
    page(figures={"b": there}, body=[image("b")]).write(tmp_path / "b")
    assert (tmp_path / "b/figures/b.png").read_bytes() == there.read_bytes()


@pytest.mark.parametrize("change", ["rows.csv", "report.json", None])
def test_tables_that_were_changed_are_refused(change, tmp_path):
    page().write(tmp_path)
    if change is None:
        (tmp_path / "rows.csv").unlink()
    else:
        (tmp_path / change).write_text("{}")
    with pytest.raises(ConfigError, match=r"report\.json"):
        read(tmp_path)


def test_the_front_page_is_made_of_data_alone(tmp_path):
    with pytest.raises(ConfigError, match=r"no report\.json"):
        write_front_page(tmp_path, "a command")
    page().write(tmp_path / "one")
    page(title="Two", findings=[], finding="").write(tmp_path / "deep/two")
    for path in tmp_path.rglob("report.md"):
        path.unlink()
    lines = write_front_page(tmp_path, "a command").read_text(encoding="utf-8").splitlines()
    two, one = (line for line in lines if line.startswith("| ["))
    assert one == ("| [one](one/report.md) | One &lt;b> | It is so. | 1 agrees | a GPU | abc1234 |")
    assert two.startswith("| [deep/two](deep/two/report.md) | Two |")


def test_the_committed_front_page_has_every_committed_report(tmp_path):
    """At most fifteen folders and 160 files, each report with data that are those of its tables."""
    reports = ROOT / "reports"
    folders = [path for path in reports.iterdir() if path.is_dir()]
    assert len(folders) <= 15
    assert sum(path.is_file() for path in reports.rglob("*")) <= 160
    pages = "".join(
        p.read_text(encoding="utf-8") for p in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    )
    assert [folder.name for folder in folders if folder.name not in pages] == []
    text = (reports / "README.md").read_text(encoding="utf-8")
    for path in reports.rglob("report.md"):
        data = read(path.parent)
        assert path.read_text(encoding="utf-8").split("\n")[0] == f"# {escaped(data['title'])}"
        assert data["finding"], path
        assert f"({path.relative_to(reports).as_posix()})" in text
    shutil.copytree(reports, tmp_path / "reports")
    command = "lit-probattn report --index reports"
    assert (
        write_front_page(tmp_path / "reports", command, efficiency_lines).read_text(
            encoding="utf-8"
        )
        == text
    )


def test_one_page_carries_everything(tmp_path):
    *_, drawn_file = page().write(tmp_path, html=True)
    assert drawn_file.name == "curve_one.svg"
    shown = Shown((tmp_path / "report.html").read_text(encoding="utf-8"))
    (address,) = shown.attributes("img", "src")
    assert address.startswith("data:image/svg+xml;base64,")
    assert shown.texts["title"] == ["One <b>"]


def test_a_terminal_gets_no_figures_and_no_files():
    assert "![" not in page().summary()
    assert "SHA-256" not in page().summary()


def test_where_rows_were_made(monkeypatch):
    rows = pd.DataFrame({"device": ["b", "a", "b"], "made_by": ["c", "c", "c"]})
    columns = {"machine": "device", "command": "made_by"}
    made = Made.of(rows, columns, versions="v", revision="r", reported_by="d")
    assert made.lines[:2] == ["- Command: `c`, then `d`", "- Hardware: a | b"]
    whole = together([made, MADE], "python -m b")
    assert (whole.command, whole.machine) == ("python -m b", "a GPU | a | b")
    monkeypatch.setattr(provenance, "_gpus", lambda: [{"name": "H200"}])
    assert Made.here("x").machine == "H200"
    assert Made.here("x").versions == provenance.versions()
