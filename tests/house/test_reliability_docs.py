"""The table of promises names tests that exist, one or more for each."""

from __future__ import annotations

import re

import pytest

from tests.support.paths import ROOT

TEXT = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TEXT)))


@pytest.mark.parametrize(("path", "name"), NAMED, ids=lambda value: str(value))
def test_named_test_exists(path, name):
    source = (ROOT / path).read_text(encoding="utf-8")
    assert f"\ndef {name}(" in source if name else "\ndef test_" in source


@pytest.mark.parametrize("number", range(1, 21))
def test_every_promise_has_a_test(number):
    (row,) = [line for line in TEXT.splitlines() if line.startswith(f"| R{number} |")]
    assert "::" in row or "tests/" in row
