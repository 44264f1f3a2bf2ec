"""A report's first lines: where a variant costs more than its baseline."""

from __future__ import annotations

import json

import pandas as pd

from profiling.report.tables import dearer_lines
from tests.profiling.helpers import ratio_rows


def ratios_of(values):
    tables = (
        ratio_rows({(256, n): ratio for n, ratio in pairs}, variant=variant, baseline="softmax8")
        for variant, pairs in values.items()
    )
    return pd.concat(tables)


def frame_of(variants):
    rows = [
        {
            "variant": name,
            "attention_class": "FiSHAttention",
            "attention_args": json.dumps(arguments),
            "num_heads": 8,
            "head_dim": head_dim,
        }
        for name, arguments in variants.items()
        for head_dim in (16, 128)
    ]
    return pd.DataFrame(rows)


def test_excesses_and_break_even_sizes_are_named():
    mlp = {"mixer": "mlp", "noise": "none", "mixing_bias": "all"}
    frame = frame_of({"gfish4": {**mlp, "num_global_heads": 4}, "fish2": {"num_global_heads": 2}})
    ratios = ratios_of({"gfish4": [(128, 1.25), (512, 0.9)], "fish2": [(128, 0.7)]})
    lines = dearer_lines(frame, ratios)
    assert lines[0] == (
        "**gfish4 costs more than softmax8**: multiply-adds of the attention layer, eval, "
        "at 1 of 2 points, at most 1.25 times (N = 128)."
    )
    assert "head sizes below 25.5, here 16 (" in lines[1]
    assert len(lines) == 2  # fish2 breaks even at 2.67, below every head size


def test_each_number_of_heads_has_its_break_even_size():
    """With half the heads global, it is the number of heads."""
    frame = frame_of({"fish": {"head_ratio": 2.0}})
    frame = pd.concat([frame.assign(num_heads=heads) for heads in (8, 16, 32)])
    lines = dearer_lines(frame, ratios_of({"fish": [(128, 0.7)]}))
    assert [line.partition(" (the")[0].partition(" is larger than in ")[2] for line in lines] == [
        "32-head attention for head sizes below 32, here 16"
    ]


def test_at_most_is_the_largest_of_several_excesses():
    frame = frame_of({}).reindex(columns=["attention_class", "variant", "num_heads"])
    (line,) = dearer_lines(frame, ratios_of({"mgk4": [(128, 1.1), (256, 1.75), (512, 1.5)]}))
    assert line.endswith("at 3 of 3 points, at most 1.75 times (N = 256).")


def test_cheaper_variants_give_no_lines():
    frame = frame_of({}).reindex(columns=["attention_class", "variant", "num_heads"])
    assert dearer_lines(frame, ratios_of({"mgk4": [(128, 0.9), (512, 1.0)]})) == []
    assert dearer_lines(frame, pd.DataFrame()) == []
