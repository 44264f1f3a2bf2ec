"""Reading `.ts` files: our validator, then aeon's reader.

aeon takes some wrong files without a word (labels that the header does not list, missing
dimensions, `?` without declaration, no data at all), so every line is checked first, and what aeon
returns is held to what was counted. Errors name the file and the line.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from datamodules.core.errors import DataError
from datamodules.series.header import Place, TsHeader, numbered, read_header, shortened

__all__ = ["TsFile", "check_ts", "read_ts"]

_MISSING = ("?", "nan")
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class TsFile:
    """A file that passed.

    Args:
        header: its header.
        series: one array (length, num_features) float32 per series; NaN where a value is missing.
        labels: class label of each series.
        lines: line number of each series.
    """

    header: TsHeader
    series: list[npt.NDArray[np.float32]]
    labels: list[str]
    lines: list[int]


def read_ts(path: Path) -> TsFile:
    """Check a file and read it by aeon.

    Raises:
        DataError: the file is malformed, or aeon is not installed.
    """
    header, shapes, labels, lines = check_ts(path)
    try:
        from aeon.datasets import load_from_ts_file
    except ImportError as error:
        raise DataError(
            f"reading {path.name} needs the optional package aeon, which cannot be imported "
            f'({error}): pip install "lit-probattn[uea]"'
        ) from None
    try:
        values, _ = load_from_ts_file(str(path))
    except Exception as error:  # it raises plain OSError and ValueError for what it checks itself
        raise DataError(f"{path}: aeon refuses the file: {' '.join(str(error).split())}") from None
    series = [np.ascontiguousarray(np.asarray(case).T, dtype=np.float32) for case in values]
    if [case.shape for case in series] != shapes:
        raise DataError(
            f"{path}: aeon read {len(series)} series of other shapes than the {len(shapes)} that "
            f"the file holds; its version does not fit (tested: aeon 1.6)"
        )
    return TsFile(header, series, labels, lines)


def check_ts(path: Path) -> tuple[TsHeader, list[tuple[int, int]], list[str], list[int]]:
    """Check every line of a file.

    Returns:
        The header; and for every series its shape (length, num_features), label and line number.

    Raises:
        DataError: the file is malformed; the message names file and line.
    """
    place = Place(path)
    shapes: list[tuple[int, int]] = []
    labels: list[str] = []
    lines: list[int] = []
    try:
        # Lines may end in LF or CR LF; both are read alike, here and by aeon.
        with path.open(encoding="utf-8") as file:
            header = read_header(file, place)
            for line in numbered(file, place):
                label, shape = _check_case(line, header, place)
                shapes.append(shape)
                labels.append(label)
                lines.append(place.line)
    except UnicodeDecodeError as error:
        place.line = _line_of_wrong_byte(path)
        raise place.error(f"not UTF-8 text ({error.reason})") from None
    if not shapes:
        place.line = header.num_lines
        raise place.error("@data is followed by no series")
    return header, shapes, labels, lines


def _line_of_wrong_byte(path: Path) -> int:
    """Line of the first byte that is not UTF-8; text is decoded in blocks, which hide it."""
    content = path.read_bytes()
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return content.count(b"\n", 0, error.start) + 1
    return 0


# ---- one series ---------------------------------------------------------------------------------


def _check_case(line: str, header: TsHeader, place: Place) -> tuple[str, tuple[int, int]]:
    """Return label and shape (length, num_features); learns what the header leaves open."""
    if not line.strip():
        raise place.error("empty line among the series")
    if ":" not in line:
        raise place.error("no class label: expected values of each dimension, then `:label`")
    *dimensions, label = line.split(":")
    label = label.strip()
    if header.num_features is None:
        header.num_features = len(dimensions)
    if len(dimensions) != header.num_features:
        raise place.error(
            f"{len(dimensions)} dimensions, expected {header.num_features} and then the label"
        )
    known = {name.lower() for name in header.classes}
    if label.lower() not in known:
        raise place.error(
            f"label {shortened(label)} is none of the classes {', '.join(header.classes)}"
        )
    lengths = [
        _check_values(text, number + 1, header, place) for number, text in enumerate(dimensions)
    ]
    if len(set(lengths)) > 1:
        other = next(i for i, length in enumerate(lengths) if length != lengths[0])
        raise place.error(
            f"dimension 1 has {lengths[0]} values and dimension {other + 1} has {lengths[other]}: "
            f"expected the same"
        )
    if header.equal_length:
        if header.length is None:
            header.length = lengths[0]
        if lengths[0] != header.length:
            raise place.error(
                f"a series of length {lengths[0]}, expected {header.length}; series of several "
                f"lengths need `@equalLength false` in the header"
            )
    return label, (lengths[0], header.num_features)


def _check_values(text: str, dimension: int, header: TsHeader, place: Place) -> int:
    """Return the number of values of one dimension."""
    values = text.split(",")
    if _all_numbers(text, values):
        return len(values)
    num_missing = 0
    for position, value in enumerate(values):
        word = value.strip()
        if word.lower() in _MISSING:
            num_missing += 1
            if not header.missing:
                raise place.error(
                    f"dimension {dimension}, value {position + 1} is {word!r}, but missing values "
                    f"need `@missing true` in the header"
                )
        elif not _all_numbers(word, [word]):
            raise place.error(
                f"dimension {dimension}, value {position + 1} is not a finite number in float32: "
                f"{shortened(word)}"
            )
    if num_missing == len(values):
        raise place.error(f"dimension {dimension} has no value at all: all {len(values)} missing")
    return len(values)


def _all_numbers(text: str, values: list[str]) -> bool:
    """Whether all are finite in float32; float() itself takes nan, inf, 1_0 and other digits."""
    if not text.isascii() or "_" in text or "n" in text.lower():
        return False
    try:
        numbers = list(map(float, values))
    except ValueError:
        return False
    return max(numbers) <= _LARGEST and min(numbers) >= -_LARGEST
