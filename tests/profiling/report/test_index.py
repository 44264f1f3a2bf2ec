"""The front page of reports: each in a sentence of its own, filters, a page for each."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest
from PIL import Image

from lit_probattn.base.errors import ConfigError
from profiling.cli import main
from profiling.report.findings import finding_of, summary_of, table_sentence
from profiling.report.index import write_index
from tests.support.pages import Page, elements, needs_browser, screenshot
from tests.support.paths import ROOT

SWEEP = """# FiSH, Figure 9: a sweep & more

- **fish4 costs more than softmax8**: time, model, at 1 of 2 places; at most 1.2 times.

- Command: `python -m profiling sweep --config x.yaml`
- Hardware: meta tensors

| variant | baseline |
| --- | --- |
| fish4 | softmax8 |

## The paper says / we find

- The paper: it is less.
- We count: multiply-adds: fish4 / softmax8 = 0.7.
- We count: parameters: fish4 / softmax8 = 0.8.

![a map](figures/a.png)
"""
TABLE = """# MGK, table 1

Command: `lit-probattn reproduce`
Machine: AMD EPYC, 2 cores; python 3.11.

| task | method | seeds | reproduced | note |
| --- | --- | --- | --- | --- |
| listops | Softmax, 8 heads | 2 | 32.40 ± 0.78 | baseline |
| listops | sMGK, 4 heads | 2 | 36.20 ± 1.56 | +3.80 |
"""
SWEEP_SAYS = (
    "We count: multiply-adds: fish4 / softmax8 = 0.7. "
    "fish4 costs more than softmax8: time, model, at 1 of 2 places; at most 1.2 times."
)
TABLE_SAYS = "reproduced – Softmax, 8 heads: 32.40 ± 0.78; sMGK, 4 heads: 36.20 ± 1.56."


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Two reports, one of them two folders deep, and their pages."""
    folder = tmp_path_factory.mktemp("site")
    for name, text in (("sweep", SWEEP), ("tables/first", TABLE)):
        (folder / "reports" / name).mkdir(parents=True)
        (folder / "reports" / name / "report.md").write_text(text, encoding="utf-8")
    (folder / "reports/sweep/figures").mkdir()
    noise = np.random.default_rng(0).integers(0, 255, (600, 900, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "reports/sweep/figures/a.png")
    write_index(folder / "reports", out=folder / "out")
    return folder / "out"


# ---- what a report says of itself ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        (SWEEP, SWEEP_SAYS),
        (TABLE, TABLE_SAYS),
        (f"{SWEEP}\nFinding: it is so.\n", "it is so."),
        (
            "# T\n\n- None spills.\n- Compiled at revision 1a: all\n- 1 untimed rounds\n",
            "None spills.",
        ),
        (f"{SWEEP}\nFinding: 1.2 of 3.4. Made by `fit`. One seed.\n", "1.2 of 3.4."),
        (
            "# Parity\n\n- Command: x\n- Errors are small: yes\n\n| a | b |\n",
            "Errors are small: yes",
        ),
        ("# Studies\n\nCommand: x\nOne seed.\nMachine: y.\n\n## Models\n\n- a: b\n", "One seed."),
        ("# Nothing\n", ""),
    ],
)
def test_the_finding_is_taken_from_the_report(text, finding):
    assert finding_of(text) == finding


def test_names_of_a_table_end_where_results_begin():
    table = "| dropout | variant | s | ratio |\n|---|---|---|---|\n"
    rows = "| 0.1 | a | 4.5 | 1 |\n| 0 | b | 1.5 | 2 |\n"
    assert table_sentence(table + rows) == "s – 0.1, a: 4.5; 0, b: 1.5."
    assert table_sentence("| a | b |\n|---|---|\n| x | y |\n") == ""


def test_a_long_table_is_cut():
    rows = "".join(f"| v{number} | {number}.5 |\n" for number in range(6))
    found = table_sentence("| variant | s |\n|---|---|\n" + rows)
    assert found == "s – v0: 0.5; v1: 1.5; v2: 2.5; v3: 3.5; and 2 more."


def test_variants_paper_and_hardware():
    summary = summary_of(SWEEP)
    assert summary.variants == ("fish", "softmax")
    assert summary.papers == ("FiSH",)
    assert summary.hardware == "meta tensors"
    other = summary_of(TABLE)
    assert (other.variants, other.papers) == (("mgk", "smgk", "softmax"), ("MGK (ICML 2022)",))
    assert other.hardware == "AMD EPYC"


def test_every_report_of_this_repository_says_something():
    for path in sorted((ROOT / "reports").rglob("report.md")):
        summary = summary_of(path.read_text(encoding="utf-8"))
        assert len(summary.finding) > 20, path
        assert summary.variants, path
        assert summary.hardware != "not said", path
        words = set(re.findall(r"[^\s|*]+", path.read_text(encoding="utf-8")))
        said = set(re.findall(r"[^\s|*]+", summary.finding.removesuffix(".")))
        own = {
            word for word in said if word.rstrip(".;:,") not in {w.rstrip(".;:,") for w in words}
        }
        assert own <= {"–", "…", "and", "more"} | {w for w in own if w.isdecimal()}, path


# ---- the pages -----------------------------------------------------------------------------------


def test_a_card_has_title_finding_picture_and_link(site):
    page = Page((site / "index.html").read_text(encoding="utf-8"))
    assert page.texts["h2"] == ["FiSH, Figure 9: a sweep & more", "MGK, table 1"]
    for finding in (SWEEP_SAYS, TABLE_SAYS):
        assert finding in page.texts["p"]
    assert page.attributes("article", "data-variant") == ["fish|softmax", "mgk|smgk|softmax"]
    (picture,) = page.attributes("img", "src")
    assert picture.startswith("data:image/png;base64,")
    links = page.attributes("a", "href")
    assert links == ["sweep/index.html", "sweep/index.html", "tables/first/index.html"]
    assert all((site / link).is_file() for link in links)
    assert set(page.texts["option"]) >= {"all", "fish", "smgk", "FiSH", "meta tensors", "AMD EPYC"}


def test_pages_carry_their_pictures_and_lead_back(site):
    for place, up in (("sweep", "../index.html"), ("tables/first", "../../index.html")):
        page = Page((site / place / "index.html").read_text(encoding="utf-8"))
        own = [address for address in page.addresses() if not address.startswith("data:")]
        assert own == [up]
    assert "http" not in (site / "index.html").read_text(encoding="utf-8")


@needs_browser
def test_the_filter_hides_what_does_not_fit(site, tmp_path):
    shown = {}
    for query, count in (("", "2 of 2"), ("?variant=smgk", "1 of 2"), ("?paper=FiSH", "1 of 2")):
        file = shutil.copytree(site, tmp_path / str(len(shown))) / "index.html"
        page = Page(elements(file, query))
        assert page.texts["output"] == [f"{count} reports"]
        hidden = ["hidden" in given for tag, given in page.tags if tag == "article"]
        shown[query] = hidden
    assert list(shown.values()) == [[False, False], [True, False], [False, True]]


@needs_browser
def test_the_front_page_is_drawn(site, tmp_path):
    pixels = screenshot(site / "index.html", tmp_path / "index.png", (1300, 900))
    colours = len(np.unique(pixels.reshape(-1, 3), axis=0))
    assert colours > 40  # the picture's, and text


# ---- the command ---------------------------------------------------------------------------------


def test_the_command_writes_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reports/one").mkdir(parents=True)
    (tmp_path / "reports/one/report.md").write_text(TABLE, encoding="utf-8")
    assert main(["report", "--index"]) == 0
    assert capsys.readouterr().out == "build/reports/index.html: 1 reports\n"
    assert (tmp_path / "build/reports/one/index.html").is_file()


def test_by_default_it_has_what_compare_and_quickstart_have_just_written(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    names = ("runs/reproduce/reports/compare-x", "runs/quickstart-report")
    for name in names:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "report.md").write_text(TABLE, encoding="utf-8")
    assert main(["report", "--index"]) == 0
    assert capsys.readouterr().out == "build/reports/index.html: 2 reports\n"
    (tmp_path / "reports/quickstart-report").mkdir(parents=True)
    shutil.copy(tmp_path / names[1] / "report.md", tmp_path / "reports/quickstart-report")
    assert main(["report", "--index"]) == 0
    assert capsys.readouterr().out == "build/reports/index.html: 3 reports\n"
    for name in (*names, "reports/quickstart-report"):
        assert (tmp_path / "build/reports" / name / "index.html").is_file()


def test_without_any_report_the_default_names_both_folders(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", "--index"]) == 2
    assert "--index reports runs: no report.md" in capsys.readouterr().err


def test_what_cannot_be_indexed_is_one_line(tmp_path, capsys):
    empty = str(tmp_path)
    assert main(["report", "--index", empty]) == 2
    assert capsys.readouterr().err == f"error: --index {empty}: no report.md in it or below\n"
    assert main(["report", "--index", empty, "--html"]) == 2
    assert "--index takes no --html" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["report", "--index", empty, "--config", "x.yaml"])
    assert "not allowed with" in capsys.readouterr().err


def test_a_picture_that_is_missing_is_named(tmp_path):
    (tmp_path / "report.md").write_text(SWEEP, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"report\.md: .*figures/a\.png"):
        write_index(tmp_path, out=tmp_path / "out")
