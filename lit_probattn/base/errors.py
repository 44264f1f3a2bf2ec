"""User errors with one-line messages, and suggestions for misspelt names."""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ParamSpec

if TYPE_CHECKING:
    from torch import Tensor

DEBUG_VARIABLE = "LIT_PROBATTN_DEBUG"  # set: errors of users keep their traceback


class ConfigError(ValueError):
    """A configuration, a command or a file of this package is invalid."""


class DataError(ValueError):
    """Data or their settings are invalid; the message names the location and the remedy.

    The message is one line: line breaks, for example in file names, are escaped.
    """

    def __str__(self) -> str:
        return _printable(super().__str__())


class MissingDataError(DataError, FileNotFoundError):
    """Files of a release or a cache are missing."""

    def __str__(self) -> str:
        return _printable(str(self.args[0])) if self.args else ""


class DamagedError(DataError):
    """A file of the data or of a cache is corrupt or missing; other files may be usable."""


class UnsupportedError(NotImplementedError):
    """A model, layer or machine does not support a function; the message names the requirement."""


class ChildError(RuntimeError):
    """A child process failed; the message names it and the reason.

    Args:
        again: whether a retry may succeed.
    """

    def __init__(self, text: str, *, again: bool = True) -> None:
        super().__init__(text)
        self.again = again


_Arguments = ParamSpec("_Arguments")


def reports(
    *errors: type[Exception],
) -> Callable[[Callable[_Arguments, int]], Callable[_Arguments, int]]:
    """Decorate a command's `main`: print these errors in one line and return exit status 2."""

    def decorate(main: Callable[_Arguments, int]) -> Callable[_Arguments, int]:
        @functools.wraps(main)
        def reported(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> int:
            try:
                return main(*args, **kwargs)
            except errors as error:
                print(f"error: {error}", file=sys.stderr)
                return 2

        return reported

    return decorate


@contextmanager
def prefixed(
    place: object, *kinds: type[Exception], to: type[Exception] = ConfigError
) -> Iterator[None]:
    """Raise errors of these kinds as `to`, after the name of what they are about, if there is one.

    Args:
        place: a file, a flag or a layer.
        kinds: errors of the block.
        to: the error to raise.
    """
    try:
        yield
    except kinds as error:
        raise to(f"{place}: {error}" if place else str(error)) from error


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def require_at_least(least: int, **values: int | None) -> None:
    """Raise a DataError that names the first value below `least`; None is ignored."""
    for name, value in values.items():
        if value is not None and value < least:
            raise DataError(f"{name} must be at least {least}, received {value}")


def nearest(word: str, candidates: Iterable[str], most: int = 1, *, lists: bool = True) -> str:
    """Return `; did you mean …?` with the most similar names, ignoring case.

    Args:
        word: the unknown name.
        candidates: valid names.
        most: largest number of suggestions.
        lists: whether to list all names if they are few and none is similar.
    """
    names = {name.lower(): name for name in sorted(set(candidates))}
    close = difflib.get_close_matches(word.lower(), names, n=most, cutoff=0.6)
    close = close or [name for name in names if word and name.startswith(word.lower())][:most]
    if close:
        *others, last = (repr(names[name]) for name in close)
        return f"; did you mean {' or '.join([', '.join(others), last] if others else [last])}?"
    return f"; valid: {', '.join(names.values())}" if lists and 0 < len(names) <= 40 else ""


def nan_among(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the first tensor that contains NaN ("… contains NaN"), or None.

    Infinities are allowed, since masks contain them; tensors without memory are skipped.
    """
    for name, tensor in tensors:
        if tensor.is_meta or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        bad = int(tensor.isnan().sum())
        if bad:
            return f"{name} contains NaN in {bad} of {tensor.numel()} numbers"
    return None
