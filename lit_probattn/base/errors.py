"""Errors that a user can put right, each one line, and the name nearest to a wrong one."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

DEBUG_VARIABLE = "LIT_PROBATTN_DEBUG"  # set: errors of users keep their traceback


class ConfigError(ValueError):
    """A configuration, a command or a file of ours cannot be used as given."""


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


class DamagedError(DataError):
    """A file of the data, or of a cache, is damaged or missing; other files may do."""


class UnsupportedError(NotImplementedError):
    """A model, a layer or a machine does not have what a function needs; the message says what."""


class ChildError(RuntimeError):
    """A process that this one started failed; the message says what it was and why.

    Args:
        again: whether another try may succeed.
    """

    def __init__(self, text: str, *, again: bool = True) -> None:
        super().__init__(text)
        self.again = again


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


def nearest(word: str, candidates: Iterable[str], most: int = 1, *, lists: bool = True) -> str:
    """Return `; did you mean …?` with the names most like a wrong one, whatever their capitals.

    Args:
        word: what was given.
        candidates: valid names.
        most: how many to name.
        lists: whether few names are listed where none is near.
    """
    names = {name.lower(): name for name in sorted(set(candidates))}
    close = difflib.get_close_matches(word.lower(), names, n=most, cutoff=0.6)
    close = close or [name for name in names if word and name.startswith(word.lower())][:most]
    if close:
        *others, last = (repr(names[name]) for name in close)
        return f"; did you mean {' or '.join([', '.join(others), last] if others else [last])}?"
    return f"; valid: {', '.join(names.values())}" if lists and 0 < len(names) <= 40 else ""


def nan_among(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Say which of the named tensors is the first that holds NaN ("… holds NaN"), or None.

    Infinities pass, as masks may hold them; tensors without memory have no numbers.
    """
    for name, tensor in tensors:
        if tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        bad = int(tensor.isnan().sum())
        if bad:
            return f"{name} holds NaN in {bad} of {tensor.numel()} numbers"
    return None
