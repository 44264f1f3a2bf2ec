"""Series with labels in tables, arrays and `.ts` files of one's own."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datamodules import OwnSeries
from tests.datamodules.series.test_ts_file import GOOD

NAMES = ("train", "val", "test")


def cases(count: int = 40) -> dict[str, tuple[list[list[float]], str]]:
    """Series of two features and several lengths, by id."""
    draw = random.Random(0)
    return {
        f"s{i}": ([[round(draw.gauss(0, 1), 3), float(t)] for t in range(4 + i % 3)], "ab"[i % 2])
        for i in range(count)
    }


def write_long(path: Path, content: dict[str, Any], shuffle: bool = True) -> Path:
    rows = [[i, t, *step, y] for i, (steps, y) in content.items() for t, step in enumerate(steps)]
    if shuffle:
        random.Random(1).shuffle(rows)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["id", "time", "left", "right", "label"], *rows])
    return path


def data(path: Path, **options: Any) -> OwnSeries:
    made = OwnSeries(str(path), **{"batch_size": 4, "normalization": "none", **options})
    made.setup()
    return made


def found_in(made: OwnSeries) -> list[tuple[Any, str]]:
    found = []
    for name in NAMES:
        split: Any = made.split(name)
        found += [
            (split[i].values.round(3).tolist(), made.classes[split[i].target])
            for i in range(len(split))
        ]
    return sorted(found)


def rounded(content: dict[str, Any]) -> list[tuple[Any, str]]:
    made = [(np.array(x, dtype=np.float32).round(3).tolist(), y) for x, y in content.values()]
    return sorted(made)


def test_a_long_table_in_any_order_gives_back_its_series(tmp_path):
    made = data(write_long(tmp_path / "mine.csv", cases()))
    assert (made.num_features, made.num_classes, made.max_seq_len) == (2, 2, 6)
    assert found_in(made) == rounded(cases())
    assert made.notes[0].endswith("series by 'id', steps by 'time', values left, right")


def test_the_order_of_rows_changes_no_split(tmp_path):
    made = [
        data(write_long(tmp_path / f"{shuffle}.csv", cases(), shuffle)) for shuffle in (True, False)
    ]
    for name in NAMES:
        first, second = (m.split(name) for m in made)
        assert len(first) == len(second)
        values = [sorted(x[i].values.tolist() for i in range(len(x))) for x in (first, second)]
        assert values[0] == values[1]


def test_a_wide_table_ends_a_series_with_its_last_value(tmp_path):
    rows = [[f"{i}.5", "2", "" if i % 2 else "7", "", i % 3] for i in range(30)]
    with (tmp_path / "wide.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["t0", "t1", "t2", "t3", "class"], *rows])
    made = data(tmp_path / "wide.csv")
    assert (made.num_features, made.max_seq_len, made.classes) == (1, 3, ["0", "1", "2"])
    values = [x for x, _ in found_in(made)]
    assert values[:2] == [[[0.5], [2.0], [7.0]], [[1.5], [2.0]]]


def test_missing_values_inside_are_interpolated(tmp_path):
    rows = [[i, "", i + 2, "xy"[i % 2]] for i in range(20)]
    with (tmp_path / "wide.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["t0", "t1", "t2", "y"], *rows])
    assert found_in(data(tmp_path / "wide.csv"))[3][0] == [[3.0], [4.0], [5.0]]


def test_arrays_of_numpy(tmp_path):
    x = np.random.default_rng(0).normal(size=(30, 5, 3)).astype(np.float32)
    np.savez(tmp_path / "mine.npz", x=x, y=np.arange(30) % 4)
    made = data(tmp_path / "mine.npz")
    expected = [(case.round(3).tolist(), str(i % 4)) for i, case in enumerate(x)]
    assert found_in(made) == sorted(expected)


def test_ts_files_of_ones_own(tmp_path):
    pytest.importorskip("aeon")
    for name in ("TRAIN", "TEST"):
        text = GOOD if name == "TRAIN" else GOOD.replace("4,5,6", "4,5,7").replace("+7", "+8")
        (tmp_path / f"Mine_{name}.ts").write_text(text)
    made = OwnSeries(str(tmp_path), batch_size=1, allow_overlap=True)
    assert [path.name for path in made.sources()] == ["Mine_TEST.ts", "Mine_TRAIN.ts"]
    assert made.files.shares == {"val": 0.1}
    rows = made.read(tmp_path / "Mine_TRAIN.ts")
    assert {len(rows.values), len(rows.labels), len(rows.places)} == {len(rows.values)}


def test_statistics_are_those_of_training(tmp_path):
    made = data(write_long(tmp_path / "mine.csv", cases()), normalization="standardize")
    train: Any = made.split("train")
    steps = np.concatenate([train[i].values for i in range(len(train))])
    np.testing.assert_allclose(steps.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(steps.std(0, ddof=1), 1, atol=1e-6)
