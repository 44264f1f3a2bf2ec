"""The user's tables: CSV, TSV, JSON lines, Parquet, with named or inferred columns."""

from __future__ import annotations

import csv
import io
import json
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from datamodules.core.files import read_utf8
from lit_probattn.base.errors import DataError, MissingDataError, nearest

TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
_LONGEST_FIELD = (1 << 31) - 1
# A column with more classes than this, most of them unique, does not contain labels.
_MANY_CLASSES = 20
_WHOLE = re.compile(r"(0|-?[1-9]\d*)(?:\.0)?")


@dataclass(frozen=True)
class Table:
    """A table in memory.

    Args:
        columns: Values of each column, all of equal length; strings if the format is untyped.
            Columns that were not requested are empty.
        locations: Line or row number of each row, for messages.
        unit: Unit of `locations`: `line` or `row`.
        notes: Remarks about suspicious content, one line each.
    """

    path: Path
    columns: dict[str, list[Any]]
    locations: Sequence[int]
    unit: str = "line"
    notes: list[str] = field(default_factory=list)

    def location(self, row: int) -> str:
        """Return the location of a row, for messages."""
        return f"{self.path}, {self.unit} {self.locations[row]}"

    def column(self, given: str | None, setting: str, guesses: Sequence[str]) -> str:
        """Return the name of a column: `given`, or the first of `guesses` that exists.

        Args:
            setting: Name of the setting that selects the column, such as `text_column`.
            guesses: Usual lower-case names, most likely first.

        Raises:
            DataError: There is no such column; the message lists the existing ones.
        """
        found = self.find(given, guesses)
        if found is not None:
            return found
        names = list(self.columns)
        listed = ", ".join(names)
        if given is not None:
            raise DataError(
                f"{self.path}: unknown column {given!r}, expected one of {listed}"
                f"{nearest(given, names, lists=False)}"
            )
        raise DataError(f"{self.path}: ambiguous columns; set {setting} to one of {listed}")

    def find(self, given: str | None, guesses: Sequence[str]) -> str | None:
        """Return the name of a column as `column` does, or None if the column is missing."""
        if given is not None:
            return given if given in self.columns else None
        lower = self._lower()
        return next((lower[guess] for guess in guesses if guess in lower), None)

    def like(
        self, settings: Mapping[str, str | None], columns: Mapping[str, str | None]
    ) -> dict[str, str | None]:
        """Return the column of each setting: as set, or one of `columns` if the table has it.

        `Review` and `review` are one column, as for usual names, unless the table has both.
        """
        lower = self._lower()
        known = {
            name: column if column in self.columns else lower.get(column.strip().lower())
            for name, column in columns.items()
            if column is not None
        }
        return {name: value or known.get(name) for name, value in settings.items()}

    def _lower(self) -> dict[str, str]:
        """Return the first column of each lower-case name."""
        return {name.strip().lower(): name for name in reversed(list(self.columns))}

    def strings(self, name: str, released: bool = False) -> list[str]:
        """Return a text column; raises DataError for the first row that is not text or is empty.

        Args:
            released: Whether the table is part of a release: columns are fixed, empty texts
                allowed.
        """
        remedy = "correct the row" if released else "set another column, or correct the row"
        for row, value in enumerate(self.columns[name]):
            if not isinstance(value, str):
                raise DataError(
                    f"{self.location(row)}: {name} is {_kind(value)}, expected text; {remedy}"
                )
            if not released and not value.strip():
                raise DataError(f"{self.location(row)}: {name} is empty; remove the row or fill it")
            if not value.isascii() and value != value.encode("utf-8", "ignore").decode():
                raise DataError(
                    f"{self.location(row)}: {name} is not valid Unicode; correct the row"
                )
        return self.columns[name]


def _kind(value: object) -> str:
    if value is None:
        return "missing"
    names = {bool: "a truth value", int: "a number", float: "a number", str: "text"}
    return names.get(type(value), f"a {type(value).__name__}")


# ---- labels ------------------------------------------------------------------------------------


def labels_in(
    table: Table, given: str | None, guesses: Sequence[str], required: bool
) -> tuple[str | None, list[str]]:
    """Return the column of the labels and the labels.

    Args:
        given: The setting label_column.
        guesses: Usual lower-case names, most likely first.
        required: Whether a missing or empty column raises a DataError; otherwise, the result is
            None and no labels.
    """
    name = table.column(given, "label_column", guesses) if required else table.find(given, guesses)
    if name is None:
        return None, []
    if not required and all(_label(value)[1] is None for value in table.columns[name]):
        return name, []
    return name, labels_of(table, name)


def labels_of(table: Table, name: str) -> list[str]:
    """Return the labels of a column as text.

    Whole numbers written as `1` and as `1.0` are the same label. If any number is written
    differently, such as `01` or `1e3`, labels are treated as codes and kept verbatim.

    Raises:
        DataError: A label is missing, words and numbers are mixed, or most labels are unique.
    """
    found: list[str] = []
    codes = any(_is_code(value) for value in table.columns[name])
    first: dict[str, int] = {}  # kind -> first row with it
    for row, value in enumerate(table.columns[name]):
        kind, label = _label(value)
        if label is None:
            what = _kind(value) if kind != "text" else "empty"
            raise DataError(
                f"{table.location(row)}: label {name!r} is {what}; fill it or remove the row"
            )
        first.setdefault(kind, row)
        found.append(value.strip() if codes and isinstance(value, str) else label)
    if len(first) > 1:
        (kind, row), (other, later) = list(first.items())[:2]
        raise DataError(
            f"{table.location(later)}: label {name!r} is {other} ({found[later]!r}), but {kind} "
            f"({found[row]!r}) in {table.unit} {table.locations[row]}; use one "
            "format for all labels"
        )
    different = len(set(found))
    if different > _MANY_CLASSES and 2 * different > len(found):
        raise DataError(
            f"{table.path}: column {name} has {different} different values in {len(found)} rows, "
            "so it does not contain classes; set label_column to another of "
            f"{', '.join(table.columns)}"
        )
    return found


def _label(value: object) -> tuple[str, str | None]:
    """Return the kind of a label and the label as text; None if it is missing."""
    if isinstance(value, bool):
        return "a truth value", str(value).lower()
    if isinstance(value, int | float):
        if value != value or value in (float("inf"), -float("inf")):
            return "a number", None
        return "a number", str(int(value)) if value == int(value) else repr(value)
    if not isinstance(value, str):
        return "nothing", None
    text = unicodedata.normalize("NFC", value.strip())
    try:
        number = float(text) if text.isascii() and "_" not in text else float("nan")
    except ValueError:
        return "text", text or None
    if number != number or abs(number) == float("inf"):
        return "text", text or None
    whole = _WHOLE.fullmatch(text)
    return "a number", text if whole is None else whole[1]


def _is_code(value: object) -> bool:
    """Whether a label is a number in a non-canonical format."""
    if not isinstance(value, str) or _label(value)[0] != "a number":
        return False
    text = value.strip()
    return _WHOLE.fullmatch(text) is None and text != repr(float(text))


# ---- reading -----------------------------------------------------------------------------------


def read_table(path: Path, least_columns: int = 2) -> Table:
    """Read a table in the format given by its suffix.

    Args:
        least_columns: Minimum number of columns of CSV and TSV files; a smaller number suggests
            another separator.

    Raises:
        DataError: The table is empty, not UTF-8 or corrupt, or its rows have different columns.
    """
    if not path.is_file():
        raise MissingDataError(f"{path}: no such file")
    readers: dict[str, Callable[[Path], Table]] = {
        ".csv": partial(_read_csv, least_columns=least_columns),
        ".tsv": partial(_read_csv, least_columns=least_columns),
        ".jsonl": _read_json_lines,
        ".ndjson": _read_json_lines,
        ".parquet": _read_parquet,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path}: not a table; expected a name ending in {', '.join(TABLES)}")
    table = reader(path)
    if not table.locations:
        raise DataError(f"{path} has no rows")
    return table


def read_released(path: Path, columns: Collection[str]) -> Table:
    """Read a table of a release: JSON lines (`.jsonl`) or unquoted tab-separated lines.

    Args:
        columns: Columns whose values are kept.

    Raises:
        DataError: As in `read_table`.
    """
    if path.suffix == ".jsonl":
        return _read_json_lines(path, columns)
    lines = read_utf8(path).split("\n")
    names = lines[0].rstrip("\r").split("\t")
    _check_names(path, names)
    rows: list[list[Any]] = []
    locations: list[int] = []
    for number, line in enumerate(lines[1:], 2):
        fields = line.rstrip("\r").split("\t")
        if fields != [""]:
            _check_number(path, number, fields, names)
            rows.append([x for name, x in zip(names, fields, strict=True) if name in columns])
            locations.append(number)
    return Table(path, _columns(names, rows, columns), locations)


def _read_csv(path: Path, least_columns: int) -> Table:
    text = read_utf8(path)
    if not text.strip():
        raise DataError(f"{path} is empty; expected a line with column names, then rows")
    header = text.lstrip("\r\n").split("\n", 1)[0]
    comma = ";" if "," not in header and ";" in header else ","
    csv.field_size_limit(_LONGEST_FIELD)
    separator = "\t" if path.suffix.lower() == ".tsv" else comma
    # Strict: otherwise an unclosed quote makes all following text one value.
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    rows: list[list[str]] = []
    locations: list[int] = []
    spans: list[tuple[int, int]] = []  # number of lines and first line of multi-line rows
    start = 1
    try:
        names = next(row for row in lines if row)  # blank lines are skipped, as between rows
        _check_names(path, names, lines.line_num, least_columns)
        start = lines.line_num + 1
        for row in lines:
            if row:
                remedy = "; put values with separators in double quotes"
                _check_number(path, start, row, names, remedy)
                rows.append(row)
                locations.append(start)
            if row and lines.line_num > start:
                spans.append((lines.line_num - start + 1, start))
            start = lines.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{path}, line {start}: a quoted value does not end with a double quote ({error}); "
            "close it, and double the quotes inside it"
        ) from None
    notes = []
    if spans:
        most, first = max(spans, key=lambda span: span[0])
        notes.append(
            f"{path.name}: {len(spans)} rows have a quoted value of several lines, the longest "
            f"with {most} lines, starting at line {first}; if that is not one text, a quote is "
            "unclosed"
        )
    return Table(path, _columns(names, rows), locations, notes=notes)


def _check_names(path: Path, names: list[str], line: int = 1, least_columns: int = 2) -> None:
    """Raise a DataError for a duplicate column, or if there are too few columns."""
    _check_duplicates(path, names)
    if len(names) < least_columns:
        separator = "tab" if path.suffix.lower() in (".tsv", ".txt") else "comma"
        raise DataError(
            f"{path}, line {line}: only one column, {names[0]!r}; expected names separated by a "
            f"{separator}"
        )


def _check_duplicates(path: Path, names: list[str]) -> None:
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise DataError(f"{path}: duplicate column {doubles[0]!r}; rename one of them")


def _check_number(
    path: Path, line: int, row: list[str], names: list[str], remedy: str = ""
) -> None:
    """Raise a DataError if a row and the header have different numbers of columns."""
    if len(row) != len(names):
        raise DataError(
            f"{path}, line {line}: columns: {len(row)}, expected {len(names)} "
            f"({', '.join(names)}){remedy}"
        )


def _columns(
    names: Iterable[str], rows: list[list[Any]], columns: Collection[str] | None = None
) -> dict[str, list[Any]]:
    """Return the values of columns; rows contain only `columns`, in header order."""
    found: dict[str, list[Any]] = {name: [] for name in names}
    kept = [name for name in found if columns is None or name in columns]
    return found | {name: [row[position] for row in rows] for position, name in enumerate(kept)}


def _read_json_lines(path: Path, columns: Collection[str] | None = None) -> Table:
    names: list[str] = []
    kept: list[str] = []
    rows: list[list[Any]] = []
    locations: list[int] = []
    for number, line in enumerate(read_utf8(path).split("\n"), 1):
        if not line.strip():
            continue
        row = _json_object(line, f"{path}, line {number}")
        if not locations:  # the first line
            names = list(row)
            kept = [name for name in names if columns is None or name in columns]
        lacking = [name for name in kept if name not in row]
        if lacking:
            raise DataError(
                f"{path}, line {number}: missing key {lacking[0]!r}, which the first line has"
            )
        further = [name for name in row if columns is None and name not in names]
        if further:
            raise DataError(
                f"{path}, line {number}: unexpected key {further[0]!r}, missing from the first "
                "line; write the same keys in every line, with null for missing values"
            )
        rows.append([row[name] for name in kept])
        locations.append(number)
    return Table(path, _columns(names, rows, columns), locations)


def _json_object(line: str, location: str) -> dict[str, Any]:
    """Parse a line of JSON as an object; raises DataError for other values or duplicate keys."""
    try:
        row = json.loads(line, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{location}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise DataError(f"{location}: expected an object {{…}} on each line")
    return row


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"duplicate key {double!r}")
    return found


@contextmanager
def readable_parquet(path: Path) -> Iterator[None]:
    """Raise a DataError for what pyarrow raises for a file that it cannot read."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        text = " ".join(str(error).split())
        raise DataError(f"{path} is not a Parquet file or is corrupt: {text}") from None


def _read_parquet(path: Path) -> Table:
    import pyarrow.parquet as pq

    with readable_parquet(path):
        table = pq.ParquetFile(path).read()
    _check_duplicates(path, table.column_names)
    columns = {}
    for name in table.column_names:
        try:
            columns[name] = table.column(name).to_pylist()
        except (ValueError, OverflowError) as error:  # such as a time beyond Python's
            raise DataError(
                f"{path}: column {name!r} has a value that Python does not support ({error}); "
                "correct or remove the column"
            ) from None
    return Table(path, columns, range(table.num_rows), "row")
