"""Tables of the user's own: CSV, TSV, JSON lines, Parquet; their columns, named or guessed."""

from __future__ import annotations

import csv
import io
import json
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_probattn.base.errors import DataError, MissingDataError, nearest

__all__ = ["TABLES", "Table", "labels_of", "read_released", "read_table", "read_utf8"]

TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
_LONGEST_FIELD = (1 << 31) - 1
# A column with more classes than this, most of them different, holds no classes.
_MANY_CLASSES = 20
_WHOLE = re.compile(r"(0|-?[1-9]\d*)(?:\.0)?")


@dataclass(frozen=True)
class Table:
    """A table in memory.

    Args:
        columns: Values of each column, all of one length; text where the format knows nothing else.
            Columns that were not asked for have no values.
        first_line: Line (or row) of the first values, for messages.
        unit: What places are counted in: `line` or `row`.
        notes: What looks odd, one line each.
    """

    path: Path
    columns: dict[str, list[Any]]
    places: Sequence[int]
    unit: str = "line"
    notes: list[str] = field(default_factory=list)

    def place(self, row: int) -> str:
        """Return what messages call a row."""
        return f"{self.path}, {self.unit} {self.places[row]}"

    def column(self, given: str | None, setting: str, guesses: Sequence[str]) -> str:
        """Return the name of a column: the one given, or the first guess that is there.

        Args:
            setting: Name of the setting that gives it, `text_column` or the like.
            guesses: Usual names in lower case, the likeliest first.

        Raises:
            DataError: There is no such column; it names those that are there.
        """
        names = list(self.columns)
        listed = ", ".join(names)
        if given is not None:
            if given not in names:
                raise DataError(
                    f"{self.path} has no column {given!r}, its columns are {listed}"
                    f"{nearest(given, names, lists=False)}"
                )
            return given
        lower = {name.strip().lower(): name for name in reversed(names)}
        for guess in guesses:
            if guess in lower:
                return lower[guess]
        raise DataError(f"{self.path}: which column? set {setting} to one of {listed}")

    def strings(self, name: str, released: bool = False) -> list[str]:
        """Return a column of texts; a DataError names the first that is not text, or is empty.

        Args:
            released: Whether the table is that of a release: columns are given, texts may be empty.
        """
        remedy = "correct the row" if released else "set another column, or correct the row"
        for row, value in enumerate(self.columns[name]):
            if not isinstance(value, str):
                raise DataError(
                    f"{self.place(row)}: {name} is {_kind(value)}, expected text; {remedy}"
                )
            if not released and not value.strip():
                raise DataError(f"{self.place(row)}: {name} is empty; remove the row or fill it")
            if not value.isascii() and value != value.encode("utf-8", "ignore").decode():
                raise DataError(f"{self.place(row)}: {name} is not valid Unicode; correct the row")
        return self.columns[name]


def _kind(value: object) -> str:
    if value is None:
        return "missing"
    names = {bool: "a truth value", int: "a number", float: "a number", str: "text"}
    return names.get(type(value), f"a {type(value).__name__}")


# ---- labels ------------------------------------------------------------------------------------


def labels_of(table: Table, name: str) -> list[str]:
    """Return the labels of a column as text.

    Whole numbers that are written as `1` and as `1.0` are one label. Where a number is written in
    another way, as `01` or `1e3`, labels are codes, and stay as they are written.

    Raises:
        DataError: A label is missing, words and numbers are mixed, or nearly all labels differ.
    """
    found: list[str] = []
    codes = any(_is_code(value) for value in table.columns[name])
    first: dict[str, int] = {}  # kind -> row where it is first seen
    for row, value in enumerate(table.columns[name]):
        kind, label = _label(value)
        if label is None:
            what = _kind(value) if kind != "text" else "empty"
            raise DataError(
                f"{table.place(row)}: label {name!r} is {what}; fill it or remove the row"
            )
        first.setdefault(kind, row)
        found.append(value.strip() if codes and isinstance(value, str) else label)
    if len(first) > 1:
        (kind, row), (other, later) = list(first.items())[:2]
        raise DataError(
            f"{table.place(later)}: label {name!r} is {other} ({found[later]!r}), but {kind} "
            f"({found[row]!r}) in {table.unit} {table.places[row]}; write all labels in one way"
        )
    different = len(set(found))
    if different > _MANY_CLASSES and 2 * different > len(found):
        raise DataError(
            f"{table.path}: column {name} has {different} different values in {len(found)} rows, "
            f"so they are no classes; set label_column to another of {', '.join(table.columns)}"
        )
    return found


def _label(value: object) -> tuple[str, str | None]:
    """Return the kind of a label, and the label as text; None if there is none."""
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
    """Whether a label is a number that is not written as numbers are printed."""
    if not isinstance(value, str) or _label(value)[0] != "a number":
        return False
    text = value.strip()
    return _WHOLE.fullmatch(text) is None and text != repr(float(text))


# ---- reading -----------------------------------------------------------------------------------


def read_table(path: Path) -> Table:
    """Read a table by the end of its name.

    Raises:
        DataError: It is empty, not UTF-8, damaged, or its rows differ in their columns.
    """
    if not path.is_file():
        raise MissingDataError(f"{path}: no such file")
    readers: dict[str, Callable[[Path], Table]] = {
        ".csv": _read_csv,
        ".tsv": _read_csv,
        ".jsonl": _read_json_lines,
        ".ndjson": _read_json_lines,
        ".parquet": _read_parquet,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path}: not a table; expected a name that ends in {', '.join(TABLES)}")
    table = reader(path)
    if not table.places:
        raise DataError(f"{path} has no rows")
    return table


def read_released(path: Path, columns: Collection[str]) -> Table:
    """Read a table of a release: JSON lines (`.jsonl`), or lines cut at tabs, never quoted.

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
    places: list[int] = []
    for number, line in enumerate(lines[1:], 2):
        fields = line.rstrip("\r").split("\t")
        if fields != [""]:
            _check_number(path, number, fields, names)
            rows.append([x for name, x in zip(names, fields, strict=True) if name in columns])
            places.append(number)
    return Table(path, _columns(names, rows, columns), places)


def read_utf8(path: Path) -> str:
    """Return a text file; a DataError names the line that is not UTF-8."""
    raw = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if b"\0" in raw:
        line = raw.count(b"\n", 0, raw.index(b"\0")) + 1
        raise DataError(
            f"{path}, line {line}: a NUL, which no text has; convert the file to UTF-8, as from "
            "UTF-16"
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}, line {line}: not UTF-8 ({error.reason}); convert the file to UTF-8"
        ) from None


def _read_csv(path: Path) -> Table:
    text = read_utf8(path)
    if not text.strip():
        raise DataError(
            f"{path} is empty; expected a line with the names of the columns, then rows"
        )
    header = text.split("\n", 1)[0]
    comma = ";" if "," not in header and ";" in header else ","
    csv.field_size_limit(_LONGEST_FIELD)
    separator = "\t" if path.suffix.lower() == ".tsv" else comma
    # Strict: without it, a quote that is left open takes all that follows for one value.
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    rows: list[list[str]] = []
    places: list[int] = []
    spans: list[tuple[int, int]] = []  # lines of a row, and its first, where it has several
    start = 1
    try:
        names = next(lines)
        _check_names(path, names)
        start = lines.line_num + 1
        for row in lines:
            if row:
                remedy = "; put values with separators in double quotes"
                _check_number(path, start, row, names, remedy)
                rows.append(row)
                places.append(start)
            if row and lines.line_num > start:
                spans.append((lines.line_num - start + 1, start))
            start = lines.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{path}, line {start}: a value that begins with a double quote does not end with one "
            f"({error}); close it, and write quotes within it twice"
        ) from None
    notes = []
    if spans:
        most, first = max(spans, key=lambda span: span[0])
        notes.append(
            f"{path.name}: {len(spans)} rows have a quoted value of several lines, the longest, of "
            f"{most} lines, from line {first} on; if that is not one text, a quote is left open"
        )
    return Table(path, _columns(names, rows), places, notes=notes)


def _check_names(path: Path, names: list[str]) -> None:
    """Raise a DataError where a column is there twice, or alone."""
    doubles = sorted({name for name in names if names.count(name) > 1})
    if doubles:
        raise DataError(f"{path}: column {doubles[0]!r} is there twice; rename one of them")
    if len(names) < 2:
        separator = "tab" if path.suffix.lower() in (".tsv", ".txt") else "comma"
        raise DataError(
            f"{path}, line 1: one column {names[0]!r} only; expected names separated by a "
            f"{separator}"
        )


def _check_number(
    path: Path, line: int, row: list[str], names: list[str], remedy: str = ""
) -> None:
    """Raise a DataError where a row has another number of columns than the first line."""
    if len(row) != len(names):
        raise DataError(
            f"{path}, line {line}: columns: {len(row)}, expected {len(names)} "
            f"({', '.join(names)}){remedy}"
        )


def _columns(
    names: Iterable[str], rows: list[list[Any]], columns: Collection[str] | None = None
) -> dict[str, list[Any]]:
    """Return the values of columns; rows have those of `columns` only, in the order of names."""
    found: dict[str, list[Any]] = {name: [] for name in names}
    kept = [name for name in found if columns is None or name in columns]
    return found | {name: [row[place] for row in rows] for place, name in enumerate(kept)}


def _read_json_lines(path: Path, columns: Collection[str] | None = None) -> Table:
    names: list[str] = []
    kept: list[str] = []
    rows: list[list[Any]] = []
    places: list[int] = []
    for number, line in enumerate(read_utf8(path).split("\n"), 1):
        if not line.strip():
            continue
        row = _json_object(line, f"{path}, line {number}")
        if not places:  # the first line
            names = list(row)
            kept = [name for name in names if columns is None or name in columns]
        lacking = [name for name in kept if name not in row]
        if lacking:
            raise DataError(f"{path}, line {number}: no {lacking[0]!r}, which the first line has")
        further = [name for name in row if columns is None and name not in names]
        if further:
            raise DataError(
                f"{path}, line {number}: {further[0]!r}, which the first line has not; write the "
                "same keys in every line, null where there is no value"
            )
        rows.append([row[name] for name in kept])
        places.append(number)
    return Table(path, _columns(names, rows, columns), places)


def _json_object(line: str, place: str) -> dict[str, Any]:
    """Return the object of a line of JSON; a DataError where it is none, or has a key twice."""
    try:
        row = json.loads(line, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise DataError(f"{place}: expected an object {{…}} on each line")
    return row


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {double!r} is there twice")
    return found


def _read_parquet(path: Path) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path).read()
    except (pa.ArrowException, OSError) as error:
        text = " ".join(str(error).split())
        raise DataError(f"{path} is not a Parquet file, or damaged: {text}") from None
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    return Table(path, columns, range(table.num_rows), "row")
