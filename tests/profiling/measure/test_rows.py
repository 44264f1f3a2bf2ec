"""Results files: durable, readable after an interrupted write, never silently damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiling.measure.rows import RowsError, append_rows, read_rows, repair, to_frame, write_tables
from profiling.sweep.plan import make_plan
from profiling.sweep.points import measure_point
from tests.profiling.helpers import sweep


@pytest.fixture(scope="module")
def groups():
    """The rows of three points."""
    return [measure_point(p) for p in make_plan(sweep(), Path.cwd())[:3]]


def write(path, groups):
    for rows in groups:
        append_rows(path, rows)
    return path.read_bytes()


def test_rows_come_back_as_written(tmp_path, groups):
    path = tmp_path / "rows.jsonl"
    write(path, groups)
    assert read_rows(path) == ([row for rows in groups for row in rows], 0)


def test_cut_at_every_byte_loses_only_the_last_point(tmp_path, groups):
    path = tmp_path / "rows.jsonl"
    content = write(path, groups)
    ends = [len(write(tmp_path / f"{i}.jsonl", groups[:i])) for i in (1, 2)]
    for cut in [*range(ends[0], len(content), 97), ends[1] - 1, ends[1], len(content) - 1]:
        path.write_bytes(content[:cut])
        expected = groups[0] + (groups[1] if cut >= ends[1] else [])
        assert repair(path) == expected
        assert path.read_bytes() == content[: ends[1] if cut >= ends[1] else ends[0]]
        append_rows(path, groups[2])
        assert read_rows(path)[0] == expected + groups[2]


def test_point_of_which_rows_are_missing_is_dropped(tmp_path, groups):
    path = tmp_path / "rows.jsonl"
    lines = write(path, groups[:2]).splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    assert repair(path) == groups[0]


def test_damage_in_the_middle_is_an_error(tmp_path, groups):
    path = tmp_path / "rows.jsonl"
    lines = write(path, groups).splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[1][:40] + b"\n", *lines[2:]]))
    with pytest.raises(RowsError, match="line 2 is not a row"):
        read_rows(path)


def test_missing_file(tmp_path):
    with pytest.raises(RowsError, match="cannot read"):
        read_rows(tmp_path / "none.jsonl")
    assert repair(tmp_path / "none.jsonl") == []


def test_tables_keep_integers_and_gaps(tmp_path, groups):
    import pandas as pd

    rows = [row for rows in groups for row in rows]
    write_tables(rows, tmp_path)
    for table in (pd.read_csv(tmp_path / "rows.csv"), pd.read_parquet(tmp_path / "rows.parquet")):
        assert len(table) == len(rows)
        assert sorted(table["macs"].tolist()) == sorted(row.macs for row in rows)
        assert table["time_median_s"].isna().all()
    assert to_frame(rows, ["softmax", "mgk"])["variant"].iloc[0] == "softmax"
