"""The table of promises names tests that exist, one or more for each."""

from __future__ import annotations

import re

from tests.support.paths import ROOT

TEXT = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TEXT)))


def test_named_tests_exist():
    missing = []
    for path, name in NAMED:
        source = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).is_file() else ""
        if (f"\ndef {name}(" if name else "\ndef test_") not in source:
            missing.append(f"{path}::{name}")
    assert missing == []


def test_every_promise_has_a_test():
    rows = re.findall(r"^\| R(\d+) \|(.*)$", TEXT, flags=re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 21))
    assert [number for number, text in rows if "tests/" not in text] == []
