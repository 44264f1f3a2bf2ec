"""Kinds of data of the user's own, and which of them a file or folder is."""

from __future__ import annotations

from pathlib import Path

from datamodules.core.errors import DataError, MissingDataError, nearest
from datamodules.core.files import expand
from datamodules.core.tables import TABLES, read_table

__all__ = ["KINDS", "kind_of"]

# Kind on the command line -> name in the registry.
KINDS = {"texts": "own_texts", "text": "own_text"}


def kind_of(path: str, given: str | None = None) -> str:
    """Return the kind of the data at a path.

    Raises:
        MissingDataError: There is nothing.
        DataError: `given` is no kind, or the kind cannot be told.
    """
    if given is not None and given not in KINDS:
        raise DataError(
            f"--kind {given}: expected one of {', '.join(KINDS)}{nearest(given, KINDS)}"
        )
    place = expand(path)
    if not place.exists():
        raise MissingDataError(f"{path}: no such file or folder, and no data set has this name")
    if given is not None:
        return given
    found = [place] if place.is_file() else sorted(p for p in place.rglob("*.*") if p.is_file())
    for file in found:
        if file.suffix.lower() in TABLES:
            return _kind_of_table(file)
    from datamodules.text.running import SUFFIXES

    if any(file.suffix.lower() in SUFFIXES for file in found):
        return "text"
    raise DataError(f"{path}: cannot tell what these data are; add --kind {', '.join(KINDS)}")


def _kind_of_table(path: Path) -> str:
    """Tell running text from texts with labels by the columns."""
    return "text" if list(read_table(path).columns) == ["text"] else "texts"
