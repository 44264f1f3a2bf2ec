"""Tables by name: their order."""

from __future__ import annotations

import random

import yaml

from lit_probattn.compare.tables import kinds


def test_tables_and_figures_are_in_the_order_of_their_numbers(tmp_path):
    names = [
        *("fish_figure2", "fish_figure11", "fish_table2", "fish_table10"),
        *("low_rank_table2", "low_rank_table2b", "mgk_text"),
    ]
    for name in random.Random(0).sample(names, len(names)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"kind": "drawing"}))
    assert list(kinds(tmp_path)) == names
