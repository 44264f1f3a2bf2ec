"""Results files: durable, readable after an interrupted write, never silently damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lit_probattn.base.errors import ConfigError
from profiling.measure.rows import read_rows, row_store, to_frame, write_tables
from profiling.sweep.plan import make_plan
from profiling.sweep.points import measure_point
from tests.profiling.helpers import append_rows, sweep


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
    assert read_rows(path) == [row for rows in groups for row in rows]


def test_cut_at_every_byte_loses_only_the_last_point(tmp_path, groups):
    path = tmp_path / "rows.jsonl"
    content = write(path, groups)
    ends = [len(write(tmp_path / f"{i}.jsonl", groups[:i])) for i in (1, 2)]
    for cut in [*range(ends[0], len(content), 97), ends[1] - 1, ends[1], len(content) - 1]:
        path.write_bytes(content[:cut])
        expected = groups[0] + (groups[1] if cut >= ends[1] else [])
        store = row_store(path)
        assert store.rows == expected
        store.add(*groups[2])
        assert store.rows == read_rows(path) == expected + groups[2]
        assert path.read_bytes().startswith(content[: ends[1] if cut >= ends[1] else ends[0]])


def test_point_of_which_rows_are_missing_is_dropped(tmp_path, groups):
    path = tmp_path / "rows.jsonl"
    lines = write(path, groups[:2]).splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    assert read_rows(path) == groups[0]


def test_damage_in_the_middle_is_an_error(tmp_path, groups):
    path = tmp_path / "rows.jsonl"
    lines = write(path, groups).splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[1][:40] + b"\n", *lines[2:]]))
    with pytest.raises(ConfigError, match=r"rows\.jsonl: .* \(line 2;"):
        read_rows(path)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"macs": -5}, "macs: .* greater than or equal to 0"),
        ({"macs": "many"}, "macs: .* valid integer"),
        ({"time_median_s": 0.0}, "time_median_s: .* greater than 0"),
        ({"seq_len": 0}, "seq_len: .* greater than or equal to 1"),
        ({"variant": None}, "variant: .* valid string"),
        ({"mac": 5}, "mac: unknown key; did you mean 'macs'"),
    ],
)
def test_numbers_that_cannot_be_are_named_by_line_and_field(tmp_path, groups, change, problem):
    path = tmp_path / "rows.jsonl"
    first, *others = write(path, groups).splitlines(keepends=True)
    first = json.dumps({**json.loads(first), **change}).encode() + b"\n"
    path.write_bytes(b"".join([first, *others]))
    with pytest.raises(ConfigError, match=rf"rows\.jsonl: {problem}.* \(line 1;") as error:
        read_rows(path)
    assert "pydantic" not in str(error.value)
    assert "\n" not in str(error.value)


def test_a_point_that_stands_there_twice_is_refused(tmp_path, groups):
    path = tmp_path / "rows.jsonl"
    write(path, [*groups, [row.model_copy(update={"macs": 1}) for row in groups[0]]])
    with pytest.raises(ConfigError, match=f"two results of {groups[0][0].point_id}"):
        read_rows(path)


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_rows(tmp_path / "none.jsonl")
    assert row_store(tmp_path / "none.jsonl").rows == []


def test_tables_keep_integers_and_gaps(tmp_path, groups):
    import pandas as pd

    rows = [row for rows in groups for row in rows]
    write_tables(rows, tmp_path)
    for table in (pd.read_csv(tmp_path / "rows.csv"), pd.read_parquet(tmp_path / "rows.parquet")):
        assert len(table) == len(rows)
        assert sorted(table["macs"].tolist()) == sorted(row.macs for row in rows)
        assert table["time_median_s"].isna().all()
    assert to_frame(rows, ["softmax", "mgk"])["variant"].iloc[0] == "softmax"
