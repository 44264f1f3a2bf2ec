"""The page of bad inputs says what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.bad_inputs import Case, all_cases, message_of, page
from tests.bad_inputs.__main__ import main as write_page
from tests.bad_inputs.cases import table_cell
from tests.support.paths import ROOT

PAGE = ROOT / "tests/bad_inputs/messages.md"
ANEW = f"if the new message is right: python -m tests.bad_inputs --write {PAGE.relative_to(ROOT)}"
CASES = all_cases()
# Command lines that build a model or a data set take from a third of a second to two seconds. The
# fast tests take the first one of these areas, and of the others those below, every third, as of
# the weights of encoders and of LM1B, each case of which writes 149 files.
BUILDING = ("Checkpoints", "Sizes and values", "The test split during training")
BUILDING += ("Converting attention", "Configuration files", "Command line")
THIRDS = ("Tables", "Tables of analyses", "Figures of papers", "Options of trajectories")
THIRDS += ("IWSLT'14 and WMT'14", "BPE codes and dictionaries of translation", "BERT", "LM1B")
# Files are read in the areas that name their format in parentheses.
READ = ("(", "Caches", "Commands of datamodules")


def fast_cases() -> dict[str, list[Case]]:
    """Return the cases of each area that the fast tests take."""
    found: dict[str, list[Case]] = {}
    for area in dict.fromkeys(case.area for case in CASES):
        cases = [case for case in CASES if case.area == area]
        if area in BUILDING:
            found[area] = cases[:1]
        elif area.startswith(THIRDS):
            found[area] = cases[::3]
        elif any(part in area for part in READ):
            found[area] = cases
    return found


FAST = fast_cases()

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the page was written without")


def test_only_the_page_is_printed(monkeypatch, capsys):
    def run(folder):
        print("run folder: x")
        return "error: it is wrong"

    case = Case("Area", "a wrong thing", run)
    monkeypatch.setattr("tests.bad_inputs.__main__.all_cases", lambda: [case])
    monkeypatch.setattr("sys.argv", ["bad_inputs"])
    write_page()
    assert capsys.readouterr().out.startswith("# Bad inputs")


def rows(cases: list[Case], folder: Path) -> list[tuple[Case, str]]:
    return [(case, message_of(case, folder / str(n))) for n, case in enumerate(cases)]


@pytest.mark.parametrize("area", FAST)
def test_messages_are_those_of_the_page(area, tmp_path):
    text = PAGE.read_text(encoding="utf-8")
    for case, message in rows(FAST[area], tmp_path):
        row = f"| {table_cell(case.given)} | {table_cell(message)} |"
        assert row in text, f"{row}\n{ANEW}"


@pytest.mark.slow
def test_the_whole_page_is_up_to_date(tmp_path):
    assert page(rows(CASES, tmp_path)) == PAGE.read_text(encoding="utf-8"), ANEW


def test_every_area_is_there_and_every_case_has_a_name_of_its_own():
    assert len(CASES) >= 60
    names = [(case.area, case.given) for case in CASES]
    assert len(set(names)) == len(names)
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"## {area}\n" in text for area in {case.area for case in CASES})
    assert f" {len(CASES)} cases.\n" in text


def test_messages_are_one_line_and_no_traceback():
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    assert len(lines) - 2 * len({case.area for case in CASES}) == len(CASES)
    assert not [line for line in lines if "Traceback" in line or "Error:" in line]
