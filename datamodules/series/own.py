"""Labelled time series in the user's files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from datamodules.core.base import Split
from datamodules.core.cache import Cache, CacheWriter
from datamodules.core.files import DAMAGED
from datamodules.core.own import OwnSamples, Rows
from datamodules.core.sequences import write_sequences
from datamodules.core.tables import TABLES, Table, labels_in, labels_of, read_table
from datamodules.series.samples import SeriesData, SeriesSplit
from datamodules.series.ts_file import read_ts
from lit_probattn.base.errors import DataError

_LABELS: tuple[str, ...] = ("label", "labels", "class", "target", "category", "activity", "y")
_IDS: tuple[str, ...] = ("id", "series", "series_id", "case", "case_id", "sample", "sample_id")
_UNNAMED = re.compile(r"|Unnamed: \d+|__index_level_\d+__")  # of pandas, for an index
_NUMBER = re.compile(r"\d+")
_SIGNED_NUMBER = re.compile(r"-?\d+")
_TIMES: tuple[str, ...] = ("time", "t", "step", "timestamp", "index", "date")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MISSING = ("", "?", "nan", "na", "null", "none")

Series = npt.NDArray[np.float32]


class OwnSeries(SeriesData, OwnSamples):
    """Labelled series from `.ts`, CSV, TSV, JSON lines, Parquet or NumPy files.

    A table with an id column is long, with one row per step; steps are sorted by the time column:
    numbers, dates in ISO format (2020-01-31, 2020-01-31T10:00+02:00) or times of day. Otherwise a
    table is wide: a row is a series of one feature, and every column except the label is a step. A
    `.npz` file contains `x`, (series, steps) or (series, steps, features), and `y`, the labels.
    Missing values (NaN, empty) are interpolated within each series; in tables and arrays, the last
    steps without any value are dropped.

    Args:
        label_column: Column of the labels. Default: the first usual name, which is reported.
        id_column: Column with the series id of each row of a long table. Default: the first usual
            name, if present.
        time_column: Column that orders the steps of a long table. Default: the first usual name;
            without one, rows are in order.
        **kwargs: Arguments of OwnSamples and SeriesData.
    """

    task = "own_series"
    what = "series"
    suffixes = (".ts", ".npz", *TABLES)
    reader_version = 4

    def __init__(
        self,
        *,
        label_column: str | None = None,
        id_column: str | None = None,
        time_column: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.label_column, self.id_column, self.time_column = label_column, id_column, time_column
        given = [name for name, value in self._columns().items() if value is not None]
        files = [*self.sources(), *([] if self.new_path is None else [self.new_path])]
        if given and not any(path.suffix.lower() in TABLES for path in files):
            raise DataError(
                f"{files[0]}: {given[0]} applies to {', '.join(TABLES)} only; remove it"
            )

    @property
    def num_features(self) -> int:
        """Number of features per step."""
        return int(self.facts["num_features"])

    @property
    def max_seq_len(self) -> int:
        """Longest training series, or `max_length`."""
        return self._max_length or int(self.facts["longest"])

    def _columns(self) -> dict[str, str | None]:
        return {
            "label_column": self.label_column,
            "id_column": self.id_column,
            "time_column": self.time_column,
        }

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the content of the cache."""
        return {**super().settings(), **self._columns()}

    # ---- reading -------------------------------------------------------------------------------

    def read(self, path: Path, labelled: bool = True, train: Rows | None = None) -> Rows:
        """Read a file in the format given by its suffix; `.ts` files always have labels."""
        if path.suffix.lower() == ".ts":
            found = read_ts(path)
            return Rows(found.series, found.labels, [f"{path}, line {n}" for n in found.lines], [])
        if path.suffix.lower() == ".npz":
            return _read_arrays(path, labelled)
        columns = {} if train is None else train.columns
        return self._read_table(read_table(path, 2 if labelled else 1), labelled, columns)

    def _read_table(self, table: Table, labelled: bool, columns: Mapping[str, Any]) -> Rows:
        given = table.like(self._columns(), columns)
        label, labels = labels_in(table, given["label_column"], _LABELS, labelled)
        rest = [name for name in table.columns if name != label]
        known = {name.strip().lower() for name in rest}
        name = None
        if given["id_column"] is not None or known & set(_IDS):
            name = table.column(given["id_column"], "id_column", _IDS)
        source = f"labels from {label!r}" if labels else "no labels"
        note = f"{table.path.name}: {source}"
        time = None
        if given["time_column"] is not None or known & set(_TIMES):
            time = table.column(given["time_column"], "time_column", _TIMES)
        if name is None and time is not None:
            raise DataError(
                f"{table.path}: column {time!r} orders the steps of series, but no column contains "
                f"the id of a series; set id_column, or, if each row is a series, remove {time!r}"
            )
        if name is None:
            locations = [table.location(row) for row in range(len(table.locations))]
            series = list(map(_checked, _matrix(table, rest)[:, :, None], locations))
            notes = [f"{note}, one series per row", *table.notes]
            read = {"label_column": label}
            return Rows(series, labels, locations, notes, steps=rest, columns=read)
        features = [column for column in rest if column not in (name, time)]
        order = "in row order" if time is None else f"sorted by {time!r}"
        note += f", series by {name!r}, steps {order}, values {', '.join(features)}"
        read = {"label_column": label, "id_column": name, "time_column": time}
        return _long(table, name, time, features, labels, note)._replace(columns=read)

    def aligned(self, rows: Rows, train: Rows, path: Path) -> Rows:
        """Sort the columns of a long table like those of training; compare those of a wide one.

        Raises:
            DataError: A long table has other features, or a wide table has other steps.
        """
        _require_steps(rows.steps, train.steps, str(path))
        features = train.features
        if not features or not rows.features:
            return rows
        if sorted(rows.features) != sorted(features):
            raise DataError(
                f"{path}: features {', '.join(rows.features)}; those of training are "
                f"{', '.join(features)}; rename, add or remove columns"
            )
        order = [rows.features.index(name) for name in features]
        return rows._replace(values=[series[:, order] for series in rows.values])

    def key(self, value: Series) -> bytes:
        """Return shape and values as bytes."""
        return repr(value.shape).encode() + value.tobytes()

    def store(
        self, writer: CacheWriter, parts: dict[str, list[Any]], targets: dict[str, list[int]]
    ) -> dict[str, Any]:
        """Add the series; raises DataError if their numbers of features differ."""
        every = [series for part in parts.values() for series in part]
        num_features = _common_features(self.files["train"], every)
        for name, part in parts.items():
            write_sequences(writer, name, part, map(len, part), targets[name], "values")
        return {"num_features": num_features, "longest": max(map(len, parts["train"]))}

    def store_new(
        self, writer: CacheWriter, name: str, values: list[Any], targets: list[int]
    ) -> dict[str, Any]:
        """Add new series; raises DataError unless they have the features of training."""
        found = _common_features(self.new_path, values)
        if found != self.num_features:
            raise DataError(
                f"{self.new_path}: series have {found} features, those of training "
                f"{self.num_features}; remove or add columns"
            )
        write_sequences(writer, name, values, map(len, values), targets, "values")
        return {}

    # ---- splits --------------------------------------------------------------------------------

    def splits_of(self, cache: Cache) -> dict[str, Split]:
        """Open the splits."""
        splits = super().splits_of(cache)
        self.notes.append(f"features per step: {self.num_features}")
        return splits

    def open_split(self, cache: Cache, name: str) -> Split:
        """Open one split in a cache."""
        return SeriesSplit.from_cache(cache, name, self.max_seq_len)

    # ---- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return classes, normalisation and names of features and steps, for checkpoints."""
        names = {"features": self.facts["features"], "steps": self.facts["steps"]}
        return {**super().state_dict(), **names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Use the statistics of a checkpoint until the next `setup`.

        Raises:
            DataError: The data have other features, steps or classes; see also SeriesData.
        """
        before, now = state_dict.get("features", []), self.facts["features"]
        if before and now and before != now:
            raise DataError(
                f"the checkpoint was trained with features {', '.join(before)}, the data have "
                f"{', '.join(now)}; rename or sort the columns, or set new_path to these data"
            )
        path = str(self.files["train"])
        _require_steps(self.facts["steps"], state_dict.get("steps", []), path)
        super().load_state_dict(state_dict)

    # ---- report --------------------------------------------------------------------------------

    def shown(self, name: str, index: int) -> str:
        """Format the first values of a series, without normalisation."""
        series = self.splits[name].series(index)
        shown = ", ".join(f"{value:.4g}" for value in series[:8, 0])
        return f"{len(series)} steps, first feature {shown}, …"


def _require_steps(steps: Sequence[str], train: Sequence[str], path: str) -> None:
    """Raise a DataError unless the steps of a wide table have the names of those of training.

    Tables may differ in the number of steps; further names continue the numbering of training,
    evenly if it is even and each name has one number, of fewer than six digits (a month 202012
    precedes 202101). An empty list has no names to compare.
    """
    if not steps or not train:
        return
    for number, (name, expected) in enumerate(zip(steps, train, strict=False), 1):
        if name != expected:
            raise DataError(
                f"{path}: step {number} is column {name!r}, that of training {expected!r}; write "
                "the columns of the steps with the names and in the order of training"
            )
    for name in steps[len(train) :]:
        if _NUMBER.sub("0", name) != _NUMBER.sub("0", train[-1]):
            raise DataError(
                f"{path}: column {name!r} does not continue the steps of training, which end with "
                f"{train[-1]!r}; remove it, or, if it contains the labels, rename it to the "
                "label_column of training"
            )
    numbers = [_SIGNED_NUMBER.findall(name) for name in steps]
    before = [_SIGNED_NUMBER.findall(name) for name in train]
    for found in (*numbers, *before):
        if len(found) != 1 or len(found[0].lstrip("-")) >= 6:
            return  # such as dates, whose order is not checked
    distances = {int(b) - int(a) for (a,), (b,) in pairwise(before)}
    if len(distances) != 1:
        return
    (distance,) = distances
    for place in range(len(train), len(steps)):
        if int(numbers[place][0]) - int(numbers[place - 1][0]) != distance:
            raise DataError(
                f"{path}: column {steps[place]!r} follows {steps[place - 1]!r}, but the numbering "
                f"of training counts by {distance}; write a column for every step, empty "
                "where a value is missing"
            )


def _common_features(path: Path | None, every: Sequence[Series]) -> int:
    """Return the number of features of all series; raises DataError if they differ."""
    sizes = {series.shape[1] for series in every}
    if len(sizes) > 1:
        shown = " and ".join(map(str, sorted(sizes)))
        raise DataError(f"{path}: series have {shown} features; expected the same number in all")
    return sizes.pop()


def _is_missing(value: object) -> bool:
    return value is None or value != value or str(value).strip().lower() in _MISSING


def _number(text: object) -> float:
    """Parse a number, with NaN for missing values; raises ValueError for anything else."""
    if _is_missing(text):
        return float("nan")
    if isinstance(text, bool) or not isinstance(text, int | float | str):
        raise ValueError
    if isinstance(text, str) and ("_" in text or not text.strip().isascii()):
        raise ValueError
    value = float(text)
    if abs(value) > np.finfo(np.float32).max:
        raise ValueError
    return value


def _matrix(table: Table, names: Sequence[str]) -> npt.NDArray[np.float64]:
    """Return numeric columns, (rows, columns); a DataError gives the first non-number."""
    if not names:
        raise DataError(f"{table.path}: no value columns besides {', '.join(table.columns)}")
    found = np.empty((len(table.locations), len(names)))
    for column, name in enumerate(names):
        if _UNNAMED.fullmatch(name.strip()):
            place = list(table.columns).index(name) + 1
            raise DataError(
                f"{table.path}: column {place} has no name, like the row numbers that pandas "
                "writes; remove it (to_csv(index=False)), or name it"
            )
        for row, value in enumerate(table.columns[name]):
            try:
                found[row, column] = _number(value)
            except (ValueError, OverflowError):
                raise DataError(
                    f"{table.location(row)}: {name} is {str(value)[:40]!r}, expected a number; "
                    "remove the column, or correct the row"
                ) from None
    return found


def _checked(series: npt.NDArray[np.float64], location: str) -> Series:
    """Return a series (num_steps, num_features) without the steps after its last value."""
    known = np.flatnonzero(~np.isnan(series).all(axis=1))
    series = series[: known[-1] + 1 if len(known) else 0]
    empty = np.isnan(series).all(axis=0)
    if not series.shape[1]:
        raise DataError(f"{location}: a step has no features; expected at least one number")
    if not len(series) or empty.any():
        raise DataError(f"{location}: feature {int(empty.argmax()) + 1}: all values are missing")
    beyond = np.abs(series) > np.finfo(np.float32).max
    if beyond.any():
        step, feature = np.argwhere(beyond)[0]
        raise DataError(
            f"{location}: feature {feature + 1} of step {step + 1} is {series[step, feature]}, "
            "which exceeds float32; correct it, or write NaN for a missing value"
        )
    return np.ascontiguousarray(series, dtype=np.float32)


def _long(
    table: Table, name: str, time: str | None, features: list[str], labels: list[str], note: str
) -> Rows:
    """Group the rows of each series."""
    values = _matrix(table, features)
    rows: dict[Any, list[int]] = {}
    for row, number in enumerate(table.columns[name]):
        if _is_missing(number) or isinstance(number, list | dict):
            raise DataError(
                f"{table.location(row)}: {name} is {str(number)[:40]!r}, expected the id of a "
                "series; write it in every row"
            )
        rows.setdefault(number.strip() if isinstance(number, str) else number, []).append(row)
    if len(rows) == len(table.locations):
        raise DataError(
            f"{table.path}: every {name!r} has one row, so series would have one step; if the "
            "table is wide (one series per row), remove that column, otherwise set id_column"
        )
    times = None if time is None else _times(table, time)
    found = Rows([], [], [], [note, *table.notes], features)
    for number, own in rows.items():
        for row in own if labels else ():
            if labels[row] != labels[own[0]]:
                raise DataError(
                    f"{table.location(row)}: series {number} has label {labels[row]!r} here and "
                    f"{labels[own[0]]!r} before; expected one label per series"
                )
        ordered = own if times is None else sorted(own, key=lambda row: times[row])
        if times is not None:
            for one, other in pairwise(ordered):
                if times[one] == times[other]:
                    shown = table.columns[time][other]  # type: ignore[index]
                    raise DataError(
                        f"{table.location(other)}: series {number} has duplicate time {shown!r}"
                    )
        found.values.append(_checked(values[ordered], f"{table.path}, series {number}"))
        found.labels.extend(labels[own[0] : own[0] + 1])
        found.locations.append(f"{table.path}, series {number}")
    return found


def _times(table: Table, name: str) -> list[Any]:
    """Return comparable times; a DataError gives the row of an invalid one."""
    found: list[Any] = []
    first: dict[str, int] = {}  # kind -> first row with it
    for row, value in enumerate(table.columns[name]):
        if _is_missing(value):
            raise DataError(f"{table.location(row)}: {name} is missing; fill it, or remove the row")
        kind, moment = _moment(value)
        if not kind:
            raise DataError(
                f"{table.location(row)}: {name} is {str(value)[:40]!r}, expected a number or an "
                "ISO date such as 2020-01-31; write all times in this format"
            )
        found.append(moment)
        first.setdefault(kind, row)
    if len(first) > 1:
        (kind, row), (other, later) = list(first.items())[:2]
        raise DataError(
            f"{table.location(later)}: {name} is {other}, but {kind} in {table.unit} "
            f"{table.locations[row]}; write all times in one format"
        )
    return found


def _moment(value: object) -> tuple[str, Any]:
    """Return the kind of a time and its comparison key; an empty kind if it is invalid."""
    readers: tuple[Callable[[str], Any], ...]
    readers = int, float, datetime.fromisoformat, time.fromisoformat
    for reader in readers if isinstance(value, str) else ():
        try:
            value = reader(str(value).strip())
            break
        except ValueError:
            continue
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "a number", value
    if not isinstance(value, datetime | time):
        return "", None
    kind = "a date" if isinstance(value, datetime) else "a time of day"
    if value.tzinfo is None:
        return kind, value
    # Python compares times of one zone by its clock, which is set back once a year.
    return f"{kind} with a time zone", value - _EPOCH if isinstance(value, datetime) else value


def _read_arrays(path: Path, labelled: bool) -> Rows:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (*DAMAGED, ValueError, TypeError):  # TypeError: a single unnamed array
        raise DataError(
            f"{path}: not a .npz file of numbers, or corrupt; write it with numpy.savez(x=…, y=…)"
        ) from None
    if not {"x", *(["y"] if labelled else [])} <= set(arrays):
        names = ", ".join(arrays) or "none"
        raise DataError(f"{path}: expected arrays x and y, received {names}")
    x, y = arrays["x"], arrays.get("y")
    if x.ndim == 2:
        x = x[:, :, None]
    if x.ndim != 3 or (y is not None and y.shape != x.shape[:1]) or not len(x):
        shapes = " and ".join(str(array.shape) for array in (arrays["x"], y) if array is not None)
        raise DataError(
            f"{path}: expected x (series, steps) or (series, steps, features) and y (series,), "
            f"received {shapes}"
        )
    if x.dtype.kind not in "fiu":
        raise DataError(f"{path}: x is {x.dtype}, expected numbers")
    numbers = range(len(x))
    labels: list[str] = []
    if y is not None:
        y = np.char.decode(y, "utf-8", "backslashreplace") if y.dtype.kind == "S" else y
        labels = labels_of(Table(path, {"y": y.tolist()}, numbers, "series"), "y")
    locations = [f"{path}, series {number}" for number in numbers]
    series = [_checked(case, location) for case, location in zip(x, locations, strict=True)]
    return Rows(series, labels, locations, [])
