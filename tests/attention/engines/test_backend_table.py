"""The page's table of backends is the engines' own."""

from __future__ import annotations

from lit_probattn.attention.engines.table import NORMAL_FORM
from tests.attention.engines.backend_table import NEEDS, table, variants_table
from tests.support.paths import ROOT


def test_the_page_has_the_table_of_the_engines():
    assert table() in (ROOT / "docs/backends.md").read_text(encoding="utf-8")


def test_the_page_says_of_variants_what_is_computed():
    """A new variant works without a row; a row that is there is right."""
    text = (ROOT / "docs/backends.md").read_text(encoding="utf-8")
    head, line, *rows = variants_table().split("\n")
    shown = text.split(f"{head}\n{line}\n")[1].split("\n\n")[0].split("\n")
    assert len(shown) > 20
    assert [row for row in shown if row not in rows] == []


def test_every_feature_has_a_row():
    lacks = {feature for engine in NORMAL_FORM.values() for feature in engine.lacks}
    assert lacks == set().union(*NEEDS.values())
