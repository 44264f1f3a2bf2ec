"""Reader for `.ts` files with line-by-line validation of header and series."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

import numpy as np
import numpy.typing as npt

from datamodules.core.files import read_utf8
from lit_probattn.base.errors import DataError

_BOM = "\ufeff"
_TAGS = (
    *("problemname", "timestamps", "missing", "univariate", "dimensions", "dimension"),
    *("equallength", "serieslength", "classlabel", "targetlabel", "data"),
)
_MISSING = ("?", "nan")
_LARGEST = float(np.finfo(np.float32).max)


@dataclass
class TsHeader:
    """Content of the lines before `@data`; None for missing tags.

    Args:
        classes: Class labels, in the order of the header.
        equal_length: Whether all series have the same length; true by default.
    """

    classes: list[str] = field(default_factory=list)
    num_features: int | None = None
    length: int | None = None
    missing: bool = False
    equal_length: bool = True


class _Location:
    """A file and the current line, for messages."""

    def __init__(self, path: Path) -> None:
        self.path, self.line = path, 0

    def error(self, message: str) -> DataError:
        """Return an error with the current location."""
        location = f"{self.path}:{self.line}" if self.line else str(self.path)
        return DataError(f"{location}: {message}")


def _numbered(file: TextIO, location: _Location) -> Iterator[str]:
    """Yield lines without line ends, and update the current line."""
    for line in file:
        location.line += 1
        yield line.rstrip("\n")


def _read_header(file: TextIO, location: _Location) -> TsHeader:
    """Read up to and including `@data`."""
    header, seen = TsHeader(), set()
    for line in _numbered(file, location):
        if location.line == 1 and line.startswith(_BOM):
            raise location.error(
                "starts with a byte-order mark, which hides the first tag; save the file as UTF-8 "
                "without one"
            )
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if not text.startswith("@"):
            raise location.error(f"expected a tag or @data, received {_shortened(text)}")
        tag, *values = text[1:].split() or [""]
        if not tag:
            raise location.error("expected the name of a tag after @")
        key = tag.lower()
        if key in seen:
            raise location.error(f"duplicate @{tag}")
        seen.add(key)
        if key == "data":
            if values:
                raise location.error(
                    f"@data must be alone on its line, received {_shortened(text)}"
                )
            if not header.classes:
                raise location.error("@data without @classLabel: the classes are not declared")
            if not header.equal_length:
                header.length = None
            return header
        _read_tag(key, tag, values, header, location)
    if location.line == 0:
        raise location.error("the file is empty")
    raise location.error("the file ends without @data")


def _set_features(count: int, header: TsHeader, location: _Location) -> None:
    if header.num_features not in (None, count):
        raise location.error("@univariate true, but @dimensions is larger than one")
    header.num_features = count


def _read_tag(key: str, tag: str, values: list[str], header: TsHeader, location: _Location) -> None:
    if key in ("timestamps", "missing", "univariate", "equallength", "targetlabel"):
        flag = _boolean(tag, values, location)
        if key in ("timestamps", "targetlabel") and flag:
            what = {"timestamps": "series with time stamps", "targetlabel": "regression data"}[key]
            raise location.error(f"@{tag} true: {what} are not supported")
        if key == "missing":
            header.missing = flag
        elif key == "equallength":
            header.equal_length = flag
        elif key == "univariate" and flag:
            _set_features(1, header, location)
    elif key in ("dimensions", "dimension"):
        _set_features(_positive(tag, values, location), header, location)
    elif key == "serieslength":
        header.length = _positive(tag, values, location)
    elif key == "classlabel":
        _read_classes(tag, values, header, location)
    elif key not in _TAGS:
        near = difflib.get_close_matches(key, _TAGS, n=1, cutoff=0.8)
        if near:  # other tags are comments in the release
            raise location.error(f"unknown tag @{tag}; did you mean @{near[0]}?")


def _read_classes(tag: str, values: list[str], header: TsHeader, location: _Location) -> None:
    if not values or values[0].lower() != "true" or len(values) < 2:
        raise location.error(f"@{tag} must be `true` and a list of class labels")
    header.classes = values[1:]
    # Other readers convert labels to lower case, so labels must be distinct regardless of case.
    lower = [label.lower() for label in header.classes]
    doubles = {label for label in header.classes if lower.count(label.lower()) > 1}
    if doubles:
        raise location.error(f"@{tag} has duplicate labels: {', '.join(sorted(doubles))}")


def _boolean(tag: str, values: list[str], location: _Location) -> bool:
    if len(values) != 1 or values[0].lower() not in ("true", "false"):
        raise location.error(
            f"@{tag} must be true or false, received {_shortened(' '.join(values))}"
        )
    return values[0].lower() == "true"


def _positive(tag: str, values: list[str], location: _Location) -> int:
    if len(values) != 1 or not values[0].isdecimal() or int(values[0]) < 1:
        raise location.error(
            f"@{tag} must be a positive number, received {_shortened(' '.join(values))}"
        )
    return int(values[0])


def _shortened(text: str) -> str:
    """Quote a text from the file, truncated to 40 characters."""
    return repr(text if len(text) <= 40 else text[:37] + "...")


@dataclass(frozen=True)
class TsFile:
    """A validated file: `series` are (length, num_features), NaN for missing values."""

    header: TsHeader
    series: list[npt.NDArray[np.float32]]
    labels: list[str]
    lines: list[int]


def read_ts(path: Path) -> TsFile:
    """Read and validate a file.

    Raises:
        DataError: The file is malformed; the message names file and line.
    """
    location = _Location(path)
    found = TsFile(TsHeader(), [], [], [])
    try:
        # Universal newlines: LF and CR LF are equivalent.
        with path.open(encoding="utf-8") as file:
            header = _read_header(file, location)
            for line in _numbered(file, location):
                label, series = _read_case(line, header, location)
                found.series.append(series)
                found.labels.append(label)
                found.lines.append(location.line)
    except UnicodeDecodeError:  # of a block; this names the line
        read_utf8(path)
        raise
    if not found.series:
        raise location.error("no series after @data")
    return replace(found, header=header)


# ---- one series ---------------------------------------------------------------------------------


def _read_case(
    line: str, header: TsHeader, location: _Location
) -> tuple[str, npt.NDArray[np.float32]]:
    """Return label and series (length, num_features); infers what the header does not specify."""
    if not line.strip():
        raise location.error("empty line among the series")
    if ":" not in line:
        raise location.error(
            "missing class label: expected values of each dimension, then `:label`"
        )
    *dimensions, label = line.split(":")
    label = label.strip()
    if header.num_features is None:
        header.num_features = len(dimensions)
    if len(dimensions) != header.num_features:
        raise location.error(
            f"{len(dimensions)} dimensions, expected {header.num_features} and then the label"
        )
    known = {name.lower(): name for name in header.classes}
    if label.lower() not in known:
        raise location.error(
            f"unknown label {_shortened(label)}, expected one of {', '.join(header.classes)}"
        )
    label = known[label.lower()]
    values = [
        _read_values(text, number + 1, header, location) for number, text in enumerate(dimensions)
    ]
    lengths = list(map(len, values))
    if len(set(lengths)) > 1:
        other = next(i for i, length in enumerate(lengths) if length != lengths[0])
        raise location.error(
            f"dimension 1 has {lengths[0]} values and dimension {other + 1} has {lengths[other]}: "
            "expected equal numbers"
        )
    if header.equal_length:
        if header.length is None:
            header.length = lengths[0]
        if lengths[0] != header.length:
            raise location.error(
                f"a series of length {lengths[0]}, expected {header.length}; series of variable "
                "length require `@equalLength false` in the header"
            )
    return label, np.array(values, dtype=np.float32).T.copy()


def _read_values(text: str, dimension: int, header: TsHeader, location: _Location) -> list[float]:
    """Return the values of one dimension, NaN for missing ones."""
    words = text.split(",")
    found = _numbers(text, words)
    if found is not None:
        return found
    found = []
    for position, word in enumerate(map(str.strip, words)):
        number = _numbers(word, [word])
        if word.lower() in _MISSING:
            if not header.missing:
                raise location.error(
                    f"dimension {dimension}, value {position + 1} is {word!r}, but missing values "
                    "require `@missing true` in the header"
                )
        elif number is None:
            raise location.error(
                f"dimension {dimension}, value {position + 1} is not a finite number in float32: "
                f"{_shortened(word)}"
            )
        found.append(float("nan") if number is None else number[0])
    if all(value != value for value in found):
        raise location.error(f"dimension {dimension}: all {len(found)} values are missing")
    return found


def _numbers(text: str, words: list[str]) -> list[float] | None:
    """Parse numbers finite in float32; unlike float(), rejects nan, inf, 1_0, non-ASCII digits."""
    if not text.isascii() or "_" in text or "n" in text.lower():
        return None
    try:
        numbers = list(map(float, words))
    except ValueError:
        return None
    return numbers if max(numbers) <= _LARGEST and min(numbers) >= -_LARGEST else None
