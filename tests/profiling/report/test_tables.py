"""Tables and sentences of a report, on numbers that are worked out by hand."""

from __future__ import annotations

import pandas as pd
import pytest

from profiling.report.tables import (
    crossover_table,
    extremes_table,
    published_table,
    quantity_tables,
)
from profiling.sweep.config import Published
from tests.profiling.helpers import ratio_rows


def trend_of(ratios):
    """The last column of the only line."""
    (line,) = extremes_table(ratio_rows(ratios, grid_heads=None))[2:-1]
    return line.removesuffix(" |").split(" | ")[-1]


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ((1.5, 1.2, 0.75), "falls with"),
        ((0.75, 1.2, 1.5), "rises with"),
        ((0.75, 1.5, 1.2), "not monotonic in"),
        ((0.9, 0.9001, 0.9), "constant in"),
    ],
)
def test_words_for_the_course_of_a_ratio(values, word):
    assert trend_of({(8, 64 * 2**i): value for i, value in enumerate(values)}) == f"{word} N"


def test_courses_that_differ_name_their_places():
    found = trend_of({(8, 64): 0.5, (8, 128): 0.6, (16, 64): 0.9, (16, 128): 0.7})
    assert found == "rises with N at D = 8, falls with N at D = 16; rises with D"


def test_a_line_with_one_point_has_no_course():
    """As where longer sequences of wide models do not fit into memory."""
    assert trend_of({(8, 64): 0.5, (8, 128): 0.6, (16, 64): 0.9}) == "rises with N; rises with D"


@pytest.mark.parametrize("step", [0.1, -0.1])
def test_the_course_along_an_axis_is_that_of_each_line(step):
    """A third axis that varies makes several lines, and not one with jumps."""
    tables = [
        ratio_rows({(8, 64): 0.5, (8, 128): 0.5 + step}, grid_heads=4),
        ratio_rows({(8, 64): 0.9, (8, 128): 0.9 + step}, grid_heads=8),
    ]
    (line,) = extremes_table(pd.concat(tables, ignore_index=True))[2:-1]
    assert line.endswith(f"| {'rises' if step > 0 else 'falls'} with N; rises with H |")


def test_the_smallest_and_the_largest_ratio_have_their_places():
    lines = extremes_table(
        ratio_rows({(8, 64): 0.9, (8, 128): 0.5, (16, 64): 1.25, (16, 128): 0.6})
    )
    assert lines[2:] == [
        "| multiply-adds | attention layer | v / b | eval | counted | 0.500 (D=8, N=128) "
        "| 1.250 (D=16, N=64) | falls with N; rises with D |",
        "",
    ]


def test_ratios_that_are_only_predicted_are_in_the_table():
    """As those of a sweep whose points do not fit into memory."""
    nothing = ratio_rows({(8, 64): float("nan"), (8, 128): float("nan")}, metric="memory_bytes")
    table = nothing.assign(ratio_predicted=[0.9, 0.5])
    (line,) = extremes_table(table)[2:-1]
    assert line.endswith("| predicted | 0.500 (N=128) | 0.900 (N=64) | falls with N |")


def test_alike_modes_share_a_line_and_others_do_not():
    tables = [
        ratio_rows({(8, 64): 0.5, (8, 128): last}, mode=mode)
        for mode, last in (("eval", 0.75), ("train", 0.75), ("forward", 0.8))
    ]
    lines = [line.split(" | ")[3:] for line in extremes_table(pd.concat(tables))[2:4]]
    assert lines == [
        ["eval, train", "counted", "0.500 (N=64)", "0.750 (N=128)", "rises with N |"],
        ["forward", "counted", "0.500 (N=64)", "0.800 (N=128)", "rises with N |"],
    ]


def test_crossovers_that_are_alike_are_one_line():
    rows = pd.concat([ratio_rows({(d, 0): 1.0}) for d in (8, 16)], ignore_index=True)
    for found, expected in (
        (["N ≈ 91", "N ≈ 91"], ["| multiply-adds | v | b | everywhere | N ≈ 91 |"]),
        (
            ["N ≈ 91", "N ≈ 99"],
            [f"| multiply-adds | v | b | D {d} | N ≈ {n} |" for d, n in ((8, 91), (16, 99))],
        ),
    ):
        lines = crossover_table(rows.assign(crossover=found))
        assert [line for line in lines if line.startswith("| multiply-adds")] == expected


def test_ours_stands_over_the_published_number():
    """A ratio of ours of 0.6 and of theirs of 0.75; 3 of our GMAC and 2 of theirs."""
    ratios = ratio_rows({(8, 64): 0.6, (8, 128): 0.9})
    frame = pd.DataFrame(
        {"variant": ["v"], "source": ["measured"], "status": ["ok"], "macs": [3e9], "seq_len": [64]}
    )
    base = {"source": "table 3", "metric": "macs", "variant": "v", "where": {"seq_len": 64}}
    published = [
        Published(what="saving", value=0.75, is_ratio=True, **base),
        Published(what="products", value=2.0, scale=1e9, **base),
        Published(what="elsewhere", value=2.0, **{**base, "where": {"seq_len": 65}}),
    ]
    assert published_table(published, frame, ratios)[2:] == [
        "| saving | 0.75 | 0.6 | 0.800 | table 3 |",
        "| products | 2 | 3 | 1.500 | table 3 |",
        "| elsewhere | 2 | – | – | table 3 |",
        "",
    ]


def test_times_of_two_devices_are_in_rows_that_name_them():
    base = {"embed_dim": 8, "seq_len": 16, "grid_heads": None, "batch_size": 1, "mode": "eval"}
    base |= {"backend": "auto", "dtype": "float32", "scope": "attention", "status": "ok"}
    base |= {"source": "measured", "macs": None, "time_median_s": None}
    counted = {**base, "device_name": "meta tensors"}
    found = quantity_tables(
        pd.DataFrame(
            [
                {**counted, "variant": "b", "macs": 2e9},
                {**counted, "variant": "v", "macs": 1e9},
                {**base, "variant": "b", "device_name": "x", "time_median_s": 0.002},
                {**base, "variant": "v", "device_name": "y", "time_median_s": 0.001},
            ]
        ),
        ratio_rows({(8, 16): 0.5}),
    )
    assert "| 16 | 2 | 1 |" in found, "counts do not depend on the device"
    assert "| 16 | x | 2 | – |" in found
    assert "| 16 | y | – | 1 |" in found
