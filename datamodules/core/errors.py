"""Errors of the data: what a user can put right, told in one line."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

__all__ = ["DataError", "MissingDataError", "nearest", "require_at_least", "require_one_of"]


class DataError(ValueError):
    """The data, or a setting of them, is wrong; the message names the place and the remedy.

    It is one line: what a file's names bring along, such as line ends, is shown escaped.
    """

    def __str__(self) -> str:
        return _printable(super().__str__())


class MissingDataError(DataError, FileNotFoundError):
    """Files of a release, or a cache, are not where they are expected."""

    def __str__(self) -> str:
        return _printable(str(self.args[0])) if self.args else ""


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def require_at_least(least: int, **values: int | None) -> None:
    """Raise a DataError that names the first value below `least`; None passes."""
    for name, value in values.items():
        if value is not None and value < least:
            raise DataError(f"{name} must be at least {least}, received {value}")


def require_one_of(valid: Collection[object], **values: object) -> None:
    """Raise a DataError that names the first value that is not among the valid ones."""
    for name, value in values.items():
        if value not in valid:
            raise DataError(
                f"{name} must be one of {', '.join(map(str, valid))}, received {value!r}"
            )


def nearest(given: str, valid: Iterable[str]) -> str:
    """Return `; did you mean …?` with the valid name nearest to a wrong one, or nothing."""
    names = {name.lower(): name for name in valid}
    begins = [lower for lower in names if given and lower.startswith(given.lower())]
    close = begins or difflib.get_close_matches(given.lower(), names, n=1, cutoff=0.4)
    return f"; did you mean {names[close[0]]}?" if close else ""
