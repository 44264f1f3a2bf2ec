"""Errors of the data: what a user can put right, told in one line."""

from __future__ import annotations

__all__ = ["DataError", "MissingDataError", "require_at_least"]


class DataError(ValueError):
    """The data, or a setting of them, is wrong; the message names the place and the remedy."""


class MissingDataError(DataError, FileNotFoundError):
    """Files of a release, or a cache, are not where they are expected."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


def require_at_least(least: int, **values: int | None) -> None:
    """Raise a DataError that names the first value below `least`; None passes."""
    for name, value in values.items():
        if value is not None and value < least:
            raise DataError(f"{name} must be at least {least}, got {value}")
