"""`null` in a configuration where a value is needed: the parser takes it for any type."""

import types
import typing
from collections.abc import Callable, Collection, Iterator
from typing import Any

from lit_probattn.cli.errors import CommandError


def refuse_nulls(config: Any, known: dict[str, type], linked: Collection[str]) -> None:
    """Look through a configuration.

    Args:
        config: the configuration of a command, a namespace.
        known: classes of parts that do not name their own, by key.
        linked: arguments of the model that are set later.

    Raises:
        CommandError: a key is null whose type does not allow it.
    """
    for key, own in known.items():
        _check(config.get(key), _all_types(own), key)
    for key in ("model", "data"):
        for path, class_path, arguments in _classes(config.get(key), key):
            cls = _import(class_path)
            if cls is not None:
                expected = _all_types(cls)
                if path == "model":
                    expected = {k: v for k, v in expected.items() if k not in linked}
                _check(arguments, expected, f"{path}.init_args")


def _check(part: Any, expected: dict[str, Any], path: str) -> None:
    for name, value in dict(part).items() if part is not None else ():
        if value is None and name in expected and not _allows_none(expected[name]):
            kind = getattr(expected[name], "__name__", expected[name])
            raise CommandError(f"{path}.{name}: expected {kind}, got null")


def _classes(part: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the path, class path and arguments of every class in a part."""
    if part is None or not hasattr(part, "get"):
        return
    arguments = part.get("init_args")
    if isinstance(part.get("class_path"), str) and arguments is not None:
        yield path, part["class_path"], arguments
        for name, value in dict(arguments).items():
            yield from _classes(value, f"{path}.init_args.{name}")


def _import(class_path: str) -> type | None:
    module, _, name = class_path.rpartition(".")
    try:
        found = getattr(__import__(module, fromlist=[name]), name)
    except (ImportError, AttributeError, ValueError):
        return None
    return found if isinstance(found, type) else None


def _all_types(cls: type) -> dict[str, Any]:
    """Types of the constructor's arguments, those that it hands to its base classes too."""
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__init__" in vars(base):
            found = {**_types(vars(base)["__init__"]), **found}
    return found


def _types(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):
        return {}


def _allows_none(kind: Any) -> bool:
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_allows_none(part) for part in typing.get_args(kind))
    if origin is typing.Literal:
        return None in typing.get_args(kind)
    return kind in (None, type(None), Any, object) or isinstance(kind, typing.TypeVar)
