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
# fast tests take the first one of these areas, and of the others those below; of the files that
# are read, and of the areas whose commands build nothing, every third.
BUILDING = ("Checkpoints", "Sizes and values", "The test split during training")
BUILDING += ("Converting attention", "Configuration files", "Command line")
QUICK = ("Tables", "Tables of analyses", "Figures of papers")
QUICK += ("Options of trajectories", "IWSLT'14 and WMT'14", "Commands of datamodules")
QUICK += ("BPE codes and dictionaries of translation",)
COMMANDS = [case for case in CASES if "(" not in case.area and case.area != "Caches"]
READERS = [case for case in CASES if case not in COMMANDS]
FIRST = [next(case for case in COMMANDS if case.area == area) for area in BUILDING]
FAST = {
    "readers": READERS[::3],
    "commands": FIRST + [case for case in COMMANDS if case.area in QUICK][::3],
}

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the page was written without")


def test_only_the_page_is_printed(monkeypatch, capsys):
    def tell(folder):
        print("run folder: x")
        return "error: it is wrong"

    case = Case("Area", "a wrong thing", tell)
    monkeypatch.setattr("tests.bad_inputs.__main__.all_cases", lambda: [case])
    monkeypatch.setattr("sys.argv", ["bad_inputs"])
    write_page()
    assert capsys.readouterr().out.startswith("# Bad inputs")


def rows(cases: list[Case], folder: Path) -> list[tuple[Case, str]]:
    return [(case, message_of(case, folder / str(n))) for n, case in enumerate(cases)]


@pytest.mark.parametrize("part", FAST)
def test_messages_are_those_of_the_page(part, tmp_path):
    text = PAGE.read_text(encoding="utf-8")
    for case, message in rows(FAST[part], tmp_path):
        row = f"| {table_cell(case.given)} | {table_cell(message)} |"
        assert row in text, f"{case.area}: {row}\n{ANEW}"


@pytest.mark.slow
def test_the_whole_page_is_up_to_date(tmp_path):
    assert page(rows(CASES, tmp_path)) == PAGE.read_text(encoding="utf-8"), ANEW


def test_every_area_is_there_and_every_case_has_a_name_of_its_own():
    assert len(CASES) >= 60
    names = [(case.area, case.given) for case in CASES]
    assert len(set(names)) == len(names)
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"## {area}\n" in text for area in {case.area for case in CASES})


def test_messages_are_one_line_and_no_traceback():
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:2] == "| "]
    assert len(lines) - 2 * len({case.area for case in CASES}) == len(CASES)
    assert not [line for line in lines if "Traceback" in line or "Error:" in line]
