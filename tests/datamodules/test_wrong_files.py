"""Wrong files of every format: each message is that of the page of bad inputs.

The page (`tests/bad_inputs/messages.md`) is the table of wrong files; tests of a format have only
what the page lacks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bad_inputs import all_cases, message_of
from tests.bad_inputs.cases import table_cell
from tests.support.paths import ROOT

PAGE = (ROOT / "tests/bad_inputs/messages.md").read_text(encoding="utf-8")
# Files are read in the areas that name their format in parentheses. Weights of encoders are no
# data, and each case of LM1B writes 149 files: `text/test_sentences.py` has its own.
FORMATS = [
    case
    for case in all_cases()
    if ("(" in case.area or case.area == "Caches") and not case.area.startswith(("BERT", "LM1B"))
]


@pytest.mark.parametrize("area", dict.fromkeys(case.area for case in FORMATS))
def test_messages_are_those_of_the_page(area: str, tmp_path: Path) -> None:
    for number, case in enumerate(case for case in FORMATS if case.area == area):
        message = message_of(case, tmp_path / str(number))
        row = f"| {table_cell(case.given)} | {table_cell(message)} |"
        assert row in PAGE, f"{area}: {row}\nif it is right: python -m tests.bad_inputs --write"
