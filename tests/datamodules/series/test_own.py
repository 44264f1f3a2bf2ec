"""Series with labels in tables, arrays and `.ts` files of one's own."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from datamodules import OwnSeries
from lit_probattn.base.errors import DataError
from tests.datamodules.series.test_ts_file import GOOD

NAMES = ("train", "val", "test")


def cases(count: int = 40) -> dict[str, tuple[list[list[float]], str]]:
    """Series of two features and several lengths, by id."""
    draw = random.Random(0)
    return {
        f"s{i}": ([[round(draw.gauss(0, 1), 3), float(t)] for t in range(10 + i % 3)], "ab"[i % 2])
        for i in range(count)
    }


def write_rows(path: Path, head: list[str], rows: list[list[Any]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([head, *rows])
    return path


def write_long(path: Path, content: dict[str, Any]) -> Path:
    rows = [[i, t, *step, y] for i, (steps, y) in content.items() for t, step in enumerate(steps)]
    random.Random(1).shuffle(rows)
    return write_rows(path, ["id", "time", "left", "right", "label"], rows)


def data(path: Path, **options: Any) -> OwnSeries:
    made = OwnSeries(path=str(path), **{"batch_size": 4, "normalization": "none", **options})
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
    assert (made.num_features, made.num_classes, made.max_seq_len) == (2, 2, 12)
    assert found_in(made) == rounded(cases())
    assert made.notes[0].endswith("series by 'id', steps sorted by 'time', values left, right")


def test_a_wide_table_ends_a_series_with_its_last_value(tmp_path):
    rows = [[f"{i}.5", "2", "" if i % 2 else "7", "", i % 3] for i in range(30)]
    made = data(write_rows(tmp_path / "wide.csv", ["t0", "t1", "t2", "t3", "class"], rows))
    assert (made.num_features, made.max_seq_len, made.classes) == (1, 3, ["0", "1", "2"])
    values = [x for x, _ in found_in(made)]
    assert values[:2] == [[[0.5], [2.0], [7.0]], [[1.5], [2.0]]]


def test_missing_values_inside_are_interpolated(tmp_path):
    rows = [[i, "", i + 2, "xy"[i % 2]] for i in range(20)]
    path = write_rows(tmp_path / "wide.csv", ["t0", "t1", "t2", "y"], rows)
    assert found_in(data(path))[3][0] == [[3.0], [4.0], [5.0]]


def test_arrays_of_numpy_with_labels_that_are_bytes(tmp_path):
    x = np.random.default_rng(0).normal(size=(30, 5, 3)).astype(np.float32)
    np.savez(tmp_path / "mine.npz", x=x, y=np.array([b"up", b"down"] * 15))
    made = data(tmp_path / "mine.npz")
    expected = [(case.round(3).tolist(), ["up", "down"][i % 2]) for i, case in enumerate(x)]
    assert found_in(made) == sorted(expected)


def test_ts_files_of_ones_own(tmp_path):
    for name in ("TRAIN", "TEST"):
        text = GOOD if name == "TRAIN" else GOOD.replace("4,5,6", "4,5,7").replace("+7", "+8")
        (tmp_path / f"Mine_{name}.ts").write_text(text)
    made = OwnSeries(path=str(tmp_path), batch_size=1, allow_overlap=True)
    assert [path.name for path in made.sources()] == ["Mine_TEST.ts", "Mine_TRAIN.ts"]
    assert made.split_off == {"val": 0.1}
    rows = made.read(tmp_path / "Mine_TRAIN.ts")
    assert [series.tolist() for series in rows.values] == [
        [[1, 4], [2, 5], [3, 6]],
        [[-1.5, 0.25], [20, 7]],
    ]
    assert rows.labels == ["Up", "Down"]
    assert [location.rpartition(", ")[2] for location in rows.locations] == ["line 10", "line 11"]


def test_statistics_are_those_of_training(tmp_path):
    made = data(write_long(tmp_path / "mine.csv", cases()), normalization="standardize")
    train: Any = made.split("train")
    steps = np.concatenate([train[i].values for i in range(len(train))])
    np.testing.assert_allclose(steps.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(steps.std(0, ddof=1), 1, atol=1e-6)


# ---- times and numbers ---------------------------------------------------------------------------


def timed(path: Path, times: list[str], count: int = 30) -> Path:
    """Long series of steps 0, 1, …, at these times, their rows in another order."""
    rows = [
        [f"s{i}", time, step + i / 100, "ab"[i % 2]]
        for i in range(count)
        for step, time in enumerate(times)
    ]
    random.Random(2).shuffle(rows)
    return write_rows(path, ["id", "time", "value", "label"], rows)


@pytest.mark.parametrize(
    "times",
    [
        [str(t) for t in range(12)],
        [str(1_600_000_000_000_000_000 + 10 * t) for t in range(12)],  # nanoseconds
        [f"{t / 4}" for t in range(12)],
        [f"2020-{month:02}-01" for month in range(1, 13)],
        ["2019-12-31", "2020-01-01T00:00", "2020-01-01 00:00:10"],
        ["2020-01-01T10:30+02:00", "2020-01-01T09:00+00:00", "2020-01-01T10:00Z"],
        ["08:00", "09:30", "10:00:01"],
    ],
)
def test_steps_are_in_the_order_of_time(tmp_path, times):
    made = data(timed(tmp_path / "mine.csv", times))
    for name in NAMES:
        split: Any = made.split(name)
        for i in range(len(split)):
            steps = split[i].values[:, 0]
            assert np.array_equal(np.floor(steps + 1e-4), np.arange(len(times)))


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([*map(str, range(1, 12)), ""], "time is missing"),
        ([*map(str, range(1, 12)), "nan"], "time is missing"),
        (["1", "2", "2020-01-01"], "is a (number|date), but a (number|date) in line"),
        (["1/2/2020", "2/2/2020", "10/1/2020"], "expected a number or an ISO date"),
        (["2020-01-01", "2020-01-02T00:00Z"], "zone"),
    ],
)
def test_times_that_cannot_be_ordered_are_refused_with_their_line(tmp_path, times, message):
    with pytest.raises(DataError, match=rf"mine\.csv, line \d+: .*{message}"):
        data(timed(tmp_path / "mine.csv", times))


def test_times_of_parquet_are_in_order_when_the_clock_is_set_back(tmp_path):
    """Steps of 40 minutes: 02:00, 02:40, and after that 02:20, local time."""
    start = pd.Timestamp("2020-10-25 00:00", tz="UTC")
    frame = pd.DataFrame(
        {
            "id": i,
            "time": (start + pd.Timedelta(minutes=40 * t)).tz_convert("Europe/Berlin"),
            "value": t + i / 100,
            "label": "ab"[i % 2],
        }
        for i in range(30)
        for t in (3, 1, 0, 2, 4)
    )
    frame.to_parquet(tmp_path / "mine.parquet", index=False)
    train: Any = data(tmp_path / "mine.parquet").split("train")
    assert [round(float(v)) for v in train[0].values[:, 0]] == [0, 1, 2, 3, 4]


def test_dates_of_parquet(tmp_path):
    import datetime as dt

    import pyarrow as pa
    import pyarrow.parquet as pq

    first = dt.datetime(2020, 1, 1)
    rows = [
        {"id": i, "time": first + dt.timedelta(days=t), "value": t + i / 100, "label": "ab"[i % 2]}
        for i in range(30)
        for t in (9, 10, 2, 1)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "mine.parquet")
    train: Any = data(tmp_path / "mine.parquet").split("train")
    assert [round(float(v)) for v in train[0].values[:, 0]] == [1, 2, 9, 10]


@pytest.mark.parametrize("wrong", [np.inf, -np.inf, 1e39])
def test_an_array_of_numbers_that_float32_lacks_is_refused_with_its_series(tmp_path, wrong):
    x = np.random.default_rng(0).normal(size=(30, 5, 2))
    x[7, 2, 1] = wrong
    np.savez(tmp_path / "mine.npz", x=x, y=np.arange(30) % 2)
    with pytest.raises(DataError, match=r"mine\.npz, series 7: feature 2.*float32"):
        data(tmp_path / "mine.npz")


def test_arrays_that_are_no_series_are_told_so(tmp_path):
    same = np.ones((30, 5, 2)) + 1e-12 * np.random.default_rng(0).normal(size=(30, 5, 2))
    for name, x, message in (
        ("same", same, r"1 different samples among 30"),
        ("none", same[:, :, :0], "feature"),
    ):
        np.savez(tmp_path / f"{name}.npz", x=x, y=np.arange(30) % 2)
        with pytest.raises(DataError, match=message):
            data(tmp_path / f"{name}.npz")


@pytest.mark.parametrize("damage", ["encrypted", "unknown compression"])
def test_an_archive_that_numpy_cannot_read_is_named(tmp_path, damage):
    path = tmp_path / "mine.npz"
    np.savez(path, x=np.zeros((30, 5)), y=np.arange(30) % 2)
    raw = bytearray(path.read_bytes())
    local, central = raw.find(b"PK\x03\x04"), raw.find(b"PK\x01\x02")
    if damage == "encrypted":
        raw[local + 6] |= 1
        raw[central + 8] |= 1
    else:
        raw[local + 8] = raw[central + 10] = 99
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"mine\.npz: not a \.npz file"):
        data(path)


def test_ids_are_read_without_the_blanks_around_them(tmp_path):
    path = write_long(tmp_path / "mine.csv", cases())
    lines = path.read_text(encoding="utf-8").splitlines()
    spaced = [line.replace(",", " ,", 1) if i % 2 and i else line for i, line in enumerate(lines)]
    path.write_text("\n".join(spaced) + "\n")
    assert found_in(data(path)) == rounded(cases())


def test_a_wide_table_with_ids_is_not_taken_for_series_of_one_step(tmp_path):
    rows = [[i, i, i + 1, i + 2, "ab"[i % 2]] for i in range(30)]
    write_rows(tmp_path / "wide.csv", ["id", "t0", "t1", "t2", "y"], rows)
    with pytest.raises(DataError, match=r"'id'.*one row.*wide"):
        data(tmp_path / "wide.csv")


def long_table(path: Path, head: str = "id,time,v,label", row: str = "{s},{t},{v},{y}") -> Path:
    lines = [
        row.format(s=f"s{i}", t=t, v=i + t / 10, y="ab"[i % 2], n=3 * i + t)
        for i in range(12)
        for t in range(3)
    ]
    path.write_text("\n".join([head, *lines]) + "\n")
    return path


@pytest.mark.parametrize("kind", ["standardize", "minmax", "per_sample_std"])
def test_other_data_and_new_samples_are_normalised_as_in_training(tmp_path, kind):
    mine = long_table(tmp_path / "mine.csv")
    other = tmp_path / "other.csv"
    other.write_text(mine.read_text().replace(",0.", ",900."))
    trained = data(mine, normalization=kind)
    given = [{"path": other}, {"path": other, "new_path": str(mine)}]
    for options in given:
        made = data(**options, normalization=kind)
        made.load_state_dict(trained.state_dict())
        steps = np.array([[1.0], [5.0]], dtype=np.float32)
        for name in NAMES:
            split, before = made.split(name), trained.split(name)
            np.testing.assert_array_equal(split.normalizer(steps), before.normalizer(steps))
    with pytest.raises(DataError, match=f"trained with normalization={kind}, received none"):
        data(other).load_state_dict(trained.state_dict())


def columns(path: Path, names: list[str]) -> Path:
    """A long table with one column per name, whose values start with the number of the name."""
    numbers = [1 + sorted(names).index(name) for name in names]
    rows = [
        [f"{path.stem}{i}", t, *(10 * x + i + t / 8 for x in numbers), "ab"[i % 2]]
        for i in range(12)
        for t in range(3)
    ]
    return write_rows(path, ["id", "time", *names, "label"], rows)


@pytest.mark.parametrize("option", ["val_path", "test_path", "new_path"])
def test_columns_of_training_precede_usual_names(tmp_path, option):
    """So the additional column, and not one of training, is a feature too many."""
    mine = columns(tmp_path / "mine.csv", ["left", "right"])
    text = mine.read_text(encoding="utf-8").replace("id,time,", "case,date,", 1)
    mine.write_text(text, encoding="utf-8")
    lines = ["id,time," + text.splitlines()[0], *(f"0,0,{x}" for x in text.splitlines()[1:])]
    (tmp_path / "more.csv").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(DataError, match=r"more\.csv: features id, time, left, right;"):
        data(mine, **{option: str(tmp_path / "more.csv")})


@pytest.mark.parametrize("option", ["val_path", "test_path", "new_path"])
def test_features_of_every_file_have_the_order_of_training(tmp_path, option):
    mine = columns(tmp_path / "mine.csv", ["left", "right", "top"])
    values = [
        data(mine, allow_overlap=True, **{option: str(columns(tmp_path / "more.csv", names))})
        .split("val" if option == "val_path" else "test")[0]
        .values
        for names in (["left", "right", "top"], ["top", "left", "right"])
    ]
    np.testing.assert_array_equal(*values)
    for names in (["left", "right", "top "], ["left", "right"]):
        other = columns(tmp_path / "more.csv", names)
        with pytest.raises(DataError, match=rf"more\.csv: features {', '.join(names)}; .*, top;"):
            data(mine, **{option: str(other)})


def test_a_checkpoint_rejects_other_features(tmp_path):
    state = data(columns(tmp_path / "mine.csv", ["left", "right"])).state_dict()
    other = data(columns(tmp_path / "other.csv", ["right", "left"]))
    with pytest.raises(DataError, match=r"features left, right, .* right, left;"):
        other.load_state_dict(state)


@pytest.mark.parametrize("missing", ["", " ", "nan"])
def test_a_row_without_id_is_an_error(tmp_path, missing):
    path = long_table(tmp_path / "mine.csv")
    path.write_text(path.read_text() + f"{missing},7,1,a\n{missing},8,2,a\n")
    with pytest.raises(DataError, match=f"line 38: id is '{missing}', expected"):
        data(path)


def test_a_list_as_id_is_an_error(tmp_path):
    rows = [f'{{"id": [{i}], "v": {i}, "label": "{"ab"[i % 2]}"}}\n' for i in range(12)] * 2
    (tmp_path / "mine.jsonl").write_text("".join(rows))
    with pytest.raises(DataError, match=r"line 1: id is '\[0\]', expected"):
        data(tmp_path / "mine.jsonl")


@pytest.mark.parametrize("name", ["", "Unnamed: 0"])
def test_row_numbers_of_pandas_are_not_a_feature(tmp_path, name):
    path = long_table(tmp_path / "mine.csv", f"{name},id,time,v,label", "{n},{s},{t},{v},{y}")
    with pytest.raises(DataError, match="column 1 has no name"):
        data(path)


def test_labels_of_a_ts_file_are_spelled_as_in_its_header(tmp_path):
    labels = ["Walk", "walk", "Run", "RUN"]
    head = "@univariate true\n@classLabel true Walk Run\n@data\n"
    rows = [f"{i},{i + 0.5}:{labels[i % 4]}\n" for i in range(40)]
    (tmp_path / "mine.ts").write_text(head + "".join(rows))
    assert data(tmp_path / "mine.ts").classes == ["Run", "Walk"]


@pytest.mark.parametrize("shape", [(12, 5), (12, 5, 2)])
def test_missing_steps_at_the_end_shorten_a_series_of_an_array(tmp_path, shape):
    x = np.random.default_rng(0).normal(size=shape)
    x[:, 3:], x[0, 1:] = np.nan, np.nan
    np.savez(tmp_path / "mine.npz", x=x, y=np.arange(12) % 2)
    made = data(tmp_path / "mine.npz")
    lengths = np.concatenate([made.split(name).lengths for name in NAMES])
    assert sorted(lengths) == [1, *[3] * 11]


def test_missing_steps_at_the_end_shorten_a_series_of_a_long_table(tmp_path):
    path = long_table(tmp_path / "mine.csv")
    path.write_text(path.read_text() + "s0,3,,a\ns0,4,,a\n")
    assert data(path).max_seq_len == 3


def test_times_of_day_with_and_without_zone_are_an_error(tmp_path):
    path = long_table(tmp_path / "mine.csv", row="{s},1{t}:00,{v},{y}")
    path.write_text(path.read_text().replace("11:00", "11:00+01:00"))
    with pytest.raises(DataError, match="write all times in one format"):
        data(path)


@pytest.mark.parametrize("value", ['"1_0"', '"\u0661"', str(10**400)])
def test_wrong_numbers_are_errors_of_the_data(tmp_path, value):
    rows = "".join(f'{{"t0": {value}, "t1": {i}, "label": "{"ab"[i % 2]}"}}\n' for i in range(12))
    (tmp_path / "mine.jsonl").write_text(rows, encoding="utf-8")
    with pytest.raises(DataError, match="expected a number"):
        data(tmp_path / "mine.jsonl")


def test_labels_that_are_not_utf8_are_escaped(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(12, 3)), np.array([b"\xe9", b"a"] * 6)
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    assert data(tmp_path / "mine.npz").classes == [r"\xe9", "a"]


def test_setup_returns_to_the_statistics_of_the_training_data(tmp_path):
    mine = long_table(tmp_path / "mine.csv")
    other = tmp_path / "other.csv"
    other.write_text(mine.read_text().replace(",0.", ",900."))
    trained, made = (data(path, normalization="standardize") for path in (mine, other))
    before = made.state_dict()["normalizer"]
    made.load_state_dict(trained.state_dict())
    assert made.state_dict()["normalizer"] == trained.state_dict()["normalizer"] != before
    made.setup("fit")
    assert made.state_dict()["normalizer"] == before
    assert [made.split(name).normalizer.state() for name in NAMES] == [before] * 3


def test_statistics_of_another_number_of_features_are_refused(tmp_path):
    state = data(long_table(tmp_path / "mine.csv"), normalization="standardize").state_dict()
    x = np.random.default_rng(0).normal(size=(12, 5, 3))
    np.savez(tmp_path / "mine.npz", x=x, y=np.array(["a", "b"] * 6))
    made = data(tmp_path / "mine.npz", normalization="standardize")
    with pytest.raises(DataError, match="trained with 1 features per step, the data have 3"):
        made.load_state_dict(state)


def test_a_checkpoint_without_statistics_is_refused(tmp_path):
    made = data(long_table(tmp_path / "mine.csv"), normalization="standardize")
    state = made.state_dict()
    del state["normalizer"]
    with pytest.raises(DataError, match="lacks the statistics of normalization=standardize; train"):
        made.load_state_dict(state)


def test_columns_apply_to_a_new_table_if_training_is_not_a_table(tmp_path):
    x = np.arange(36.0).reshape(12, 3)
    np.savez(tmp_path / "mine.npz", x=x, y=np.array(["a", "b"] * 6))
    new = write_rows(tmp_path / "new.csv", ["t0", "t1", "Outcome"], [[1, 2, "b"], [3, 4, "a"]])
    made = data(tmp_path / "mine.npz", new_path=str(new), label_column="Outcome")
    assert made.split("test").targets.tolist() == [1, 0]


def wide(path: Path, names: list[str], label: str = "label", offset: int = 0) -> Path:
    """A table with one series per row; the column `label` is the last."""
    labels = [0, 1] if label == "Outcome" else ["a", "b"]
    rows = [[*(offset + 10 * i + t for t in range(len(names))), labels[i % 2]] for i in range(12)]
    return write_rows(path, [*names, label], rows)


STEPS = ["t0", "t1", "t2", "t3"]


@pytest.mark.parametrize("option", ["val_path", "test_path", "new_path"])
@pytest.mark.parametrize("names", [STEPS[:2], STEPS, [*STEPS, "t4", "t5"]])
def test_files_of_wide_tables_may_differ_in_the_number_of_steps(tmp_path, option, names):
    mine = wide(tmp_path / "mine.csv", STEPS)
    more = wide(tmp_path / "more.csv", names, offset=1000)
    split: Any = data(mine, **{option: str(more)}).split("val" if option == "val_path" else "test")
    assert {len(split.series(i)) for i in range(len(split))} == {len(names)}


@pytest.mark.parametrize("option", ["val_path", "test_path", "new_path"])
def test_steps_of_wide_tables_in_another_order_are_refused(tmp_path, option):
    mine = wide(tmp_path / "mine.csv", STEPS)
    more = wide(tmp_path / "more.csv", ["t1", "t0", "t2", "t3"], offset=1000)
    with pytest.raises(DataError, match=r"more\.csv: step 1 is column 't1', that of training 't0'"):
        data(mine, **{option: str(more)})


@pytest.mark.parametrize("further", [["t5"], ["t5", "t4"], ["t4", "t6"]])
def test_further_steps_of_wide_tables_leave_out_none(tmp_path, further):
    mine = wide(tmp_path / "mine.csv", STEPS)
    new = wide(tmp_path / "new.csv", [*STEPS, *further], offset=1000)
    with pytest.raises(DataError, match=r"new\.csv: column 't[56]' .*counts by 1"):
        data(mine, new_path=str(new))


@pytest.mark.parametrize(
    "names",
    [
        ["d0", "d10", "d20", "d30"],
        ["d0", "d1", "d5", "d7"],
        ["d-2", "d-1", "d0", "d1"],
        ["d-1", "d-2", "d-3", "d-4"],  # a hyphen
    ],
)
def test_steps_need_not_count_by_one(tmp_path, names):
    """Those that are not evenly numbered can be followed by any number."""
    mine = wide(tmp_path / "mine.csv", names[:3])
    new = wide(tmp_path / "new.csv", names, offset=1000)
    assert len(data(mine, new_path=str(new)).split("test").series(0)) == 4


@pytest.mark.parametrize(
    "names",
    [
        ["202010", "202011", "202012", "202101"],
        ["d20240229", "d20240301", "d20240302", "d20240303"],
        ["d20240129", "d20240130", "d20240131", "d20240201"],
    ],
)
def test_steps_of_wide_tables_may_be_dates(tmp_path, names):
    """The number of the first month or day of the next year or month is not the next number."""
    mine = wide(tmp_path / "mine.csv", names[:3])
    new = wide(tmp_path / "new.csv", names, offset=1000)
    assert len(data(mine, new_path=str(new)).split("test").series(0)) == 4


@pytest.mark.parametrize("given", [{}, {"label_column": "label"}])
def test_labels_of_another_name_are_not_a_step_of_a_wide_table(tmp_path, given):
    mine = wide(tmp_path / "mine.csv", STEPS)
    new = wide(tmp_path / "new.csv", STEPS, "Outcome", offset=1000)
    with pytest.raises(DataError, match=r"new\.csv: column 'Outcome' .*label_column"):
        data(mine, new_path=str(new), **given)
    write_rows(new, STEPS, [[5, 6, 7, 9]])  # without labels
    assert data(mine, new_path=str(new), **given).split("test").targets.tolist() == [-1]


def test_a_checkpoint_rejects_other_steps(tmp_path):
    state = data(wide(tmp_path / "mine.csv", STEPS)).state_dict()
    data(wide(tmp_path / "longer.csv", [*STEPS, "t4"])).load_state_dict(state)
    other = data(wide(tmp_path / "other.csv", STEPS[::-1]))
    with pytest.raises(DataError, match="step 1 is column 't3', that of training 't0'"):
        other.load_state_dict(state)
