"""The argument parser of the command line: full names only, one line for what is wrong.

`null` where a value is needed is refused too: the parser takes it for any type.
"""

from __future__ import annotations

import inspect
import types
import typing
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Collection, Iterator
from typing import Any

import yaml
from jsonargparse import DefaultHelpFormatter, get_loader, set_loader
from lightning.pytorch.cli import LightningArgumentParser, _InstantiatorFn

from lit_probattn.cli.errors import CommandError, ConstructionError, readable
from lit_probattn.configs import ConfigError, class_of, upgrade


class RunParser(LightningArgumentParser):
    """Parser that takes no shortened flags and says in one line what is wrong."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", HelpFormatter)
        super().__init__(*args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> Any:
        """Raise `CommandError`, unless this parser only tries whether a value fits."""
        if not self.exit_on_error:
            return super().error(message, ex)
        names = [option[2:] for parser in self._all_parsers() for option in _options(parser)]
        raise CommandError(readable(message, names)) from ex

    def _all_parsers(self) -> list[Any]:
        action = self._subcommands_action
        return [self, *(action.choices.values() if action is not None else ())]


class HelpFormatter(RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Help that keeps the lines of the description."""


def _options(parser: Any) -> list[str]:
    return [option for option in parser._option_string_actions if option.startswith("--")]


class Instantiator(_InstantiatorFn):
    """Constructs model and data; tells a refusal of the constructor from a wrong type."""

    def __call__(
        self,
        class_type: Any,
        *args: Any,
        applied_instantiation_links: dict[str, Any],
        **kwargs: Any,
    ) -> Any:
        """Construct.

        Raises:
            ConstructionError: the constructor raised any exception.
        """
        # A size that the data do not have (features of tokens) is no hyper-parameter of the model.
        links = {key: size for key, size in applied_instantiation_links.items() if size is not None}
        try:
            _require_sizes(class_type, applied_instantiation_links)
            return super().__call__(
                class_type,
                *args,
                applied_instantiation_links=links,
                **kwargs,
            )
        except Exception as error:
            raise ConstructionError(self.key, error) from error


def _require_sizes(class_type: type, links: dict[str, Any]) -> None:
    """Refuse data of another kind than the model reads.

    Raises:
        ValueError: the model needs a size that the data do not have.
    """
    parameters = inspect.signature(class_type).parameters
    for key, size in links.items():
        name = key.rpartition(".")[2]
        needed = name in parameters and parameters[name].default is inspect.Parameter.empty
        if needed and size is None:
            raise ValueError(
                f"{class_type.__name__} needs {name}, which these data do not have: tokens have a "
                "vocab_size, series and pictures have num_features; choose a task for this data set"
            )


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
    try:
        found = class_of(class_path)
    except ConfigError:
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


_load_yaml = get_loader("yaml")


def _load_upgraded(text: str) -> Any:
    """Read YAML as the parser does; configurations of earlier versions in today's terms."""
    content = _load_yaml(text)
    return upgrade(content) if isinstance(content, dict) else content


set_loader("yaml", _load_upgraded, exceptions=(yaml.YAMLError,))
