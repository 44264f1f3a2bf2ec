"""Types of user-provided data, and how the type of a file or folder is detected."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from datamodules.core.files import expand, is_archive
from datamodules.core.tables import TABLES, read_table
from lit_probattn.base.errors import DataError, MissingDataError, nearest

# Kind on the command line -> name in the registry.
KINDS = {"texts": "own_texts", "text": "own_text", "series": "own_series"}
KINDS["images"], KINDS["translation"] = "own_images", "translation"
_SERIES = (".ts", ".npz")
_LANGUAGE = re.compile(r"train\.(?!ts|md)[a-z]{2}")


def kind_of(path: str, given: str | None = None) -> str:
    """Return the type of the data at a path.

    Raises:
        MissingDataError: The path does not exist.
        DataError: `given` is unknown, or the type cannot be detected.
    """
    if given is not None and given not in KINDS:
        hint = nearest(given, KINDS, lists=False)
        raise DataError(f"--kind {given}: expected one of {', '.join(KINDS)}{hint}")
    place = expand(path)
    if not place.exists():
        raise MissingDataError(f"{path}: no such file, folder or data set")
    if given is not None:
        return given
    if is_archive(place) or _is_parallel(place):
        return "translation"
    from datamodules.images.files import SUFFIXES as IMAGES  # imports NumPy
    from datamodules.text.running import SUFFIXES as TEXTS

    found = [place] if place.is_file() else sorted(p for p in place.rglob("*.*") if p.is_file())
    for file in found:
        suffix = file.suffix.lower()
        if suffix in _SERIES:
            return "series"
        if suffix in IMAGES:
            return "images"
        if suffix in TABLES:
            return _kind_of_table(file)
    if any(file.suffix.lower() in TEXTS for file in found):
        return "text"
    raise DataError(f"{path}: unknown type of data; add --kind {{{','.join(KINDS)}}}")


def _is_parallel(place: Path) -> bool:
    """Whether a folder contains training text in two languages, such as `train.de`, `train.en`."""
    names = [path.name for path in place.glob("train.*")] if place.is_dir() else []
    return sum(_LANGUAGE.fullmatch(name) is not None for name in names) == 2


def _kind_of_table(path: Path) -> str:
    """Distinguish running text, labelled texts and series by the columns."""
    table = read_table(path)
    if list(table.columns) == ["text"]:
        return "text"
    for values in table.columns.values():
        if 2 * sum(map(_is_text, values)) > len(values):
            return "texts"
    numbers = [name for name, values in table.columns.items() if _is_number_or_time(values[0])]
    return "series" if 2 * len(numbers) >= len(table.columns) else "texts"


def _is_text(value: object) -> bool:
    """Whether a value contains a blank and is not a time."""
    return isinstance(value, str) and " " in value.strip() and not _is_number_or_time(value)


def _is_number_or_time(value: object) -> bool:
    if isinstance(value, date | time):  # in Parquet files
        return True
    readers: tuple[Callable[[Any], Any], ...]
    readers = float, datetime.fromisoformat, time.fromisoformat
    for reader in readers:
        with suppress(TypeError, ValueError):
            reader(value)
            return True
    return False
