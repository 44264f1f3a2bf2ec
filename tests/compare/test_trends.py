"""Verdicts on trends, on numbers made by hand; how reports show them."""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd
import pytest
from scipy import stats

from lit_probattn.compare.report import Report
from lit_probattn.compare.tables import read_table
from lit_probattn.compare.trends import (
    agreements,
    draw_trends,
    rank_correlation,
    trend_lines,
)
from tests.compare.test_report import COUNTS, keep
from tests.compare.tiny import TABLE, tiny_runs, write_tables

PRINTED = {"r1": 10.0, "r2": 11.0, "r4": 13.0}
ROW = {**TABLE["rows"]["softmax_2"], "published": {}}


def table_of(folder, printed=PRINTED, **trend):
    rows = {
        name: {**ROW, "published": {"listops": value}, "spread": {"listops": {"test": 0.5}}}
        for name, value in printed.items()
    }
    trend = {"over": "heads", "rows": {n: int(n[1:]) for n in rows}, "says": "rises", **trend}
    content = {**TABLE, "tasks": ["listops"], "rows": rows, "baseline": "r1", "trends": [trend]}
    return read_table("tiny", write_tables(folder, content))


def found(table, scores):
    """The trend of scores by row, a list over seeds; None is a run that is not finished."""
    rows = [
        {"task": "listops", "row": row, "seed": seed, "value test": value}
        for row, values in scores.items()
        for seed, value in enumerate(values)
        if value is not None
    ]
    (one,) = agreements(table, pd.DataFrame(rows))
    return one


@pytest.mark.parametrize(
    ("scores", "verdict"),
    [
        ({"r1": [1.0, 1.1, 1.0], "r2": [2.0, 2.1, 2.1], "r4": [4.0, 4.1, 4.0]}, "agrees"),
        ({"r1": [4.0, 4.1, 4.0], "r2": [2.0, 2.1, 2.1], "r4": [1.0, 1.1, 1.0]}, "differs"),
        ({"r1": [1.0, 3.0, 2.0], "r2": [2.0, 2.1, 2.1], "r4": [4.0, 2.0, 3.0]}, "same direction"),
        (
            {"r1": [4.0, 2.0, 3.0], "r2": [2.0, 2.1, 2.1], "r4": [1.0, 3.0, 2.0]},
            "inconclusive",
        ),
        ({"r1": [1.0], "r2": [2.0], "r4": [3.0]}, "same direction"),
        ({"r1": [4.0], "r2": [2.0], "r4": [3.0]}, "inconclusive"),
        ({"r1": [1.0, 1.0], "r2": [2.0, 2.0]}, "only 2 of 3 rows are available"),
        (
            {"r1": [1.0, None], "r2": [None, 2.0], "r4": [1.0, 2.0]},
            "no seed has all rows",
        ),
        (
            {"r1": [1.0, 1.0, None], "r2": [2.0, 2.0, 9.0], "r4": [4.0, 4.0, 9.0]},
            "agrees",  # without any spread; the third seed lacks a row
        ),
        ({"r1": [1.0, 1.0], "r2": [1.0, 1.0], "r4": [1.0, 1.0]}, "differs"),  # equal at every seed
    ],
)
def test_verdicts(tmp_path, scores, verdict):
    one = found(table_of(tmp_path), scores).finding
    assert verdict in (one.verdict, one.measured)
    assert one.verdict == (verdict if one.estimate else "inconclusive")


def test_printed_scores_that_are_equal_say_nothing(tmp_path):
    table = table_of(tmp_path, dict.fromkeys(PRINTED, 10.0))
    one = found(table, {name: [1.0, 2.0] for name in PRINTED})
    assert one.finding.measured == "the printed scores are equal"


def test_numbers_of_a_trend(tmp_path):
    scores = {"r1": [1.0, 2.0], "r2": [3.0, 2.5], "r4": [2.0, 5.0]}
    one = found(table_of(tmp_path), scores)
    seeds = list(zip(*scores.values(), strict=True))
    slopes = [stats.linregress([10, 11, 13], y).slope for y in seeds]
    assert one.slopes == pytest.approx(slopes)
    half = stats.t.ppf(0.975, 1) * abs(slopes[0] - slopes[1]) / 2
    slope = one.finding.estimate
    assert slope.value == pytest.approx(sum(slopes) / 2)
    assert (slope.high - slope.low) / 2 == pytest.approx(half)
    entry = one.entry()
    assert (entry["printed"], entry["ours"], entry["rows"], entry["seeds"]) == (
        *("+1.00", "+0.75", 3, 2),
    )
    assert entry["ours with printed"] == "+0.75"
    assert entry["slope"] == str(slope)


def test_rows_are_in_the_order_of_what_they_differ_in(tmp_path):
    falling = {"r4": 10.0, "r1": 13.0, "r2": 11.0}
    one = found(table_of(tmp_path, falling), {"r4": [1.0], "r1": [3.0], "r2": [2.0]})
    assert (one.rows, one.x, one.printed) == (("r1", "r2", "r4"), (1, 2, 4), (13, 11, 10))
    assert one.entry()["printed"] == "-1.00"
    assert rank_correlation([1, 2, 3], [5.0, 5.0, 5.0]) is None


@pytest.mark.usefixtures("sketches")
def test_the_report_and_the_picture_show_trends(tmp_path):
    _, runs = tiny_runs(tmp_path)
    own = table_of(tmp_path / "tables", {"r1": 1.0, "r2": 2.0, "r4": 3.0})
    runs = [
        replace(run, row=replace(row, name=name), seed=run.seed)
        for run in runs[::2]
        for name, row in own.rows.items()
    ]
    for run in runs:
        COUNTS.setdefault(run.row.name, (1000, 4000))
        # Rows of one model are one run: name the files by row.
        run.__dict__["digest"] = f"{run.row.name}{run.seed}"
        keep(run, 10.0 * run.seed + int(run.row.name[1:]) + 0.1 * run.seed)
    report = Report(own, runs, "command")
    report.write(tmp_path / "out")
    written = (tmp_path / "out/report.md").read_text(encoding="utf-8")
    assert "## Trends" in written
    (line,) = [line for line in written.splitlines() if line.endswith("| agrees |")]
    assert line.startswith("| listops | test | heads | rises | 3 | 2 | +1.00 | +1.00 | +1.00 |")
    assert (tmp_path / "out/figures/trends.png").is_file()
    assert "| 1.00 ± 0.50 |" in written  # as printed
    figure = draw_trends(report.agreements)
    upper, lower = figure.axes
    assert [line.get_ydata().tolist() for line in lower.lines[:2]] == report.agreements[
        0
    ].ours.tolist()
    handles, labels = lower.get_legend_handles_labels()
    assert labels == ["one seed", "mean over seeds"]
    assert handles == [lower.lines[0], lower.lines[2]]  # of two seeds one is named
    assert "agrees" in upper.get_title()
    assert lower.get_xlabel() == "heads"
    assert trend_lines([]) == []
    assert math.isnan(replace(report.agreements[0], spread=(math.nan,) * 3).spread[0])
    draw_trends([replace(report.agreements[0], spread=(math.nan,) * 3)])
