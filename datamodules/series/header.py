"""The header of a `.ts` file: the tags before `@data`, checked line by line."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from datamodules.core.errors import DataError

__all__ = ["Place", "TsHeader", "numbered", "read_header", "shortened"]

_BOM = "\ufeff"
_TAGS = (
    *("problemname", "timestamps", "missing", "univariate", "dimensions", "dimension"),
    *("equallength", "serieslength", "classlabel", "targetlabel", "data"),
)


@dataclass
class TsHeader:
    """What the lines before `@data` say; None where they do not.

    Args:
        classes: class labels, in the order of the header.
        num_features: dimensions.
        length: length of every series.
        missing: whether values may be missing.
        equal_length: whether all series have one length. A file that does not say so has.
        num_lines: lines before the data.
    """

    classes: list[str] = field(default_factory=list)
    num_features: int | None = None
    length: int | None = None
    missing: bool = False
    equal_length: bool = True
    num_lines: int = 0


class Place:
    """A file and the line that is being read, for messages."""

    def __init__(self, path: Path) -> None:
        self.path, self.line = path, 0

    def error(self, message: str) -> DataError:
        """Return an error that names the place."""
        place = f"{self.path}:{self.line}" if self.line else str(self.path)
        return DataError(f"{place}: {message}")


def numbered(file: TextIO, place: Place) -> Iterator[str]:
    """Yield lines without their ends, and keep the place up to date."""
    for line in file:
        place.line += 1
        yield line.rstrip("\n")


def read_header(file: TextIO, place: Place) -> TsHeader:
    """Read up to and including `@data`.

    Raises:
        DataError: a tag is wrong, or there is no `@data`.
    """
    header, seen = TsHeader(), set()
    for line in numbered(file, place):
        if place.line == 1 and line.startswith(_BOM):
            raise place.error(
                "begins with a byte-order mark, which hides the first tag; save the file as UTF-8 "
                "without one"
            )
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if not text.startswith("@"):
            raise place.error(f"expected a tag or @data, received {shortened(text)}")
        tag, *values = text[1:].split() or [""]
        if not tag:
            raise place.error("expected the name of a tag after @")
        key = tag.lower()
        if key in seen:
            raise place.error(f"@{tag} is given twice")
        seen.add(key)
        if key == "data":
            if values:
                raise place.error(f"@data must stand alone, received {shortened(text)}")
            header.num_lines = place.line
            _check_header(header, place)
            return header
        _read_tag(key, tag, values, header, place)
    if place.line == 0:
        raise place.error("the file is empty")
    raise place.error("the file ends without @data")


def _read_tag(key: str, tag: str, values: list[str], header: TsHeader, place: Place) -> None:
    if key in ("timestamps", "missing", "univariate", "equallength", "targetlabel"):
        flag = _boolean(tag, values, place)
        if key in ("timestamps", "targetlabel") and flag:
            what = {"timestamps": "series with time stamps", "targetlabel": "regression data"}[key]
            raise place.error(f"@{tag} true: {what} are not supported")
        if key == "missing":
            header.missing = flag
        elif key == "equallength":
            header.equal_length = flag
        elif key == "univariate" and flag:
            header.num_features = 1
    elif key in ("dimensions", "dimension"):
        header.num_features = _positive(tag, values, place)
    elif key == "serieslength":
        header.length = _positive(tag, values, place)
    elif key == "classlabel":
        _read_classes(tag, values, header, place)
    elif key not in _TAGS:
        close = difflib.get_close_matches(key, _TAGS, n=1, cutoff=0.8)
        if close:  # other tags are comments of the release
            raise place.error(f"unknown tag @{tag}; did you mean @{close[0]}?")


def _read_classes(tag: str, values: list[str], header: TsHeader, place: Place) -> None:
    if not values or values[0].lower() != "true" or len(values) < 2:
        raise place.error(f"@{tag} must be `true` and a list of class labels")
    header.classes = values[1:]
    # aeon reads labels in lower case, and so must nothing else depend on their case.
    lower = [label.lower() for label in header.classes]
    doubles = {label for label in header.classes if lower.count(label.lower()) > 1}
    if doubles:
        raise place.error(f"@{tag} lists a label twice: {', '.join(sorted(doubles))}")


def _check_header(header: TsHeader, place: Place) -> None:
    if not header.classes:
        raise place.error("@data without @classLabel: the classes are not declared")
    if not header.equal_length:
        header.length = None


def _boolean(tag: str, values: list[str], place: Place) -> bool:
    if len(values) != 1 or values[0].lower() not in ("true", "false"):
        raise place.error(f"@{tag} must be true or false, received {shortened(' '.join(values))}")
    return values[0].lower() == "true"


def _positive(tag: str, values: list[str], place: Place) -> int:
    if len(values) != 1 or not values[0].isdecimal() or int(values[0]) < 1:
        raise place.error(
            f"@{tag} must be a positive number, received {shortened(' '.join(values))}"
        )
    return int(values[0])


def shortened(text: str) -> str:
    """Quote a text from the file, cut to 40 characters."""
    return repr(text if len(text) <= 40 else text[:37] + "...")
