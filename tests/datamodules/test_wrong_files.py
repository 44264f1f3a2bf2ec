"""Wrong files of every format, each with the message of the page of bad inputs; wrong settings.

The page (`tests/bad_inputs/messages.md`) is the table of wrong files; tests of a format have only
what the page lacks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from datamodules import UEA, ListOps, MaskedText, Retrieval, Synthetic
from lit_probattn.base.errors import DataError
from tests.bad_inputs import all_cases, message_of
from tests.bad_inputs.cases import table_cell
from tests.support.paths import ROOT

PAGE = (ROOT / "tests/bad_inputs/messages.md").read_text(encoding="utf-8")
# Files are read in the areas that name their format in parentheses. Weights of encoders are no
# data, and each case of LM1B writes 149 files: `text/test_sentences.py` has its own.
FORMATS = [
    case
    for case in all_cases()
    if ("(" in case.area or case.area in ("Caches", "Commands of datamodules"))
    and not case.area.startswith(("BERT", "LM1B"))
]
SETTINGS: list[tuple[type, dict[str, Any], str]] = [
    (Synthetic, {"vocab_size": 5}, r"num_classes \+ 2 = 6"),
    (Synthetic, {"max_length": 3}, "max_length=3 is below min_length=32"),
    (ListOps, {"max_length": 5}, "max_length must be at least min_length"),
    (ListOps, {"vocab_size": 16}, "vocab_size must be at least 17, received 16"),
    (ListOps, {"max_length_tokens": 20}, "max_length_tokens=20 would truncate them"),
    (Retrieval, {"max_length_tokens": 10001}, r"at most 10000, .* received 10001"),
    (MaskedText, {"segment_len": 2}, "segment_len must be at least 3"),
    (UEA, {"name": "../Mine"}, "name must not contain folders"),
    (UEA, {"name": "Libras", "val_fraction": 1.0}, "val_fraction must be between 0 and 1"),
    (UEA, {"name": "PEMS"}, "unknown archive 'PEMS'.*did you mean 'PEMS-SF'"),
    (UEA, {"name": "heartbeat"}, "unknown archive 'heartbeat'.*did you mean 'Heartbeat'"),
]


@pytest.mark.parametrize(("cls", "options", "message"), SETTINGS)
def test_wrong_settings_are_one_line(cls: type, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        cls(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("area", dict.fromkeys(case.area for case in FORMATS))
def test_messages_are_those_of_the_page(area: str, tmp_path: Path) -> None:
    for number, case in enumerate(case for case in FORMATS if case.area == area):
        message = message_of(case, tmp_path / str(number))
        row = f"| {table_cell(case.given)} | {table_cell(message)} |"
        assert row in PAGE, f"{area}: {row}\nif it is right: python -m tests.bad_inputs --write"
