"""The page's table of backends is the engines' own."""

from __future__ import annotations

from lit_probattn.attention.engines.table import NORMAL_FORM
from tests.attention.engines.backend_table import NEEDS, table, variants_table
from tests.support.paths import ROOT


def test_the_page_has_the_table_of_the_engines():
    assert table() in (ROOT / "docs/kernels.md").read_text(encoding="utf-8")


def test_the_page_has_the_table_of_the_variants():
    assert variants_table() in (ROOT / "docs/kernels.md").read_text(encoding="utf-8")


def test_every_feature_has_a_row():
    lacks = {feature for engine in NORMAL_FORM.values() for feature in engine.lacks}
    assert lacks == set().union(*NEEDS.values())
