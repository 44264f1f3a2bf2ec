"""Argument parser of the command line: unabbreviated flags, one-line errors.

`null` for a required value and a number outside of its `Range` are errors, although jsonargparse
accepts them.
"""

from __future__ import annotations

import inspect
import typing
from argparse import RawDescriptionHelpFormatter
from collections.abc import Collection, Iterator
from enum import Enum
from typing import Any

import yaml
from jsonargparse import DefaultHelpFormatter, get_loader, set_loader
from lightning.pytorch.cli import LightningArgumentParser

from lit_probattn.base.arguments import Range, check_argument, parts_of
from lit_probattn.base.errors import ConfigError, nearest
from lit_probattn.cli.errors import ConstructionError
from lit_probattn.cli.files import NAMED
from lit_probattn.cli.jsonargparse_internals import (
    Rejected,
    option_names,
    prefer_integers,
    read_files_as_utf8,
    read_sources_once,
    readable,
)
from lit_probattn.configs import (
    canonical,
    class_of,
    parameters_of,
    public_path,
    takes_any_name,
    types_of,
)
from lit_probattn.training.lightning_internals import ModuleInstantiator

read_sources_once()
read_files_as_utf8()


def _as_value(dumper: Any, member: Enum) -> Any:
    return dumper.represent_data(member.value)


yaml.representer.SafeRepresenter.add_multi_representer(Enum, _as_value)


class RunParser(LightningArgumentParser):
    """Parser without abbreviated flags that reports errors in one line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", HelpFormatter)
        super().__init__(*args, **kwargs)
        # For a parser of a class's arguments:
        self.owner: type | None = None
        self.names: list[str] = []

    def add_class_arguments(self, theclass: Any, *args: Any, **kwargs: Any) -> list[str]:
        """Add the arguments of a class, and store the class."""
        self.owner, self.names = theclass, super().add_class_arguments(theclass, *args, **kwargs)
        prefer_integers(self)
        return self.names

    def dump(self, namespace: Any, *args: Any, **kwargs: Any) -> str:
        """Serialise a configuration without validating it again."""
        text: str = super().dump(namespace, *args, **{"skip_validation": True, **kwargs})
        return text

    def error(self, message: str, ex: Exception | None = None) -> Any:
        """Raise `ConfigError`, or `Rejected` while trying whether a value is valid."""
        if not self.exit_on_error:
            raise Rejected(message, self.owner, self.names) from ex
        raise ConfigError(readable(message, ex, [*option_names(self), *NAMED])) from ex


class HelpFormatter(RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Help formatter that preserves the lines of the description."""


class Instantiator(ModuleInstantiator):
    """Instantiates model and data; distinguishes constructor errors from wrong types."""

    def __call__(
        self,
        class_type: Any,
        *args: Any,
        applied_instantiation_links: dict[str, Any],
        **kwargs: Any,
    ) -> Any:
        """Instantiate; any exception of the constructor becomes a `ConstructionError`."""
        # The model does not store sizes that the data lack (features of tokens).
        links = {key: size for key, size in applied_instantiation_links.items() if size is not None}
        try:
            _require_sizes(class_type, applied_instantiation_links)
            return super().__call__(class_type, *args, applied_instantiation_links=links, **kwargs)
        except Exception as error:
            raise ConstructionError(self.key, error) from error


def _require_sizes(class_type: type, links: dict[str, Any]) -> None:
    """Raise if the data lack a size that the model requires."""
    parameters = inspect.signature(class_type).parameters
    for key, size in links.items():
        name = key.rpartition(".")[2]
        needed = name in parameters and parameters[name].default is inspect.Parameter.empty
        if needed and size is None:
            raise ValueError(
                f"{class_type.__name__} requires {name}, which these data do not have: tokens have "
                "a vocab_size, series and images have num_features, pairs of languages also a "
                "source_vocab_size, trajectories an obs_dim; choose a task for this data set"
            )


def check_values(config: Any, known: dict[str, type], linked: Collection[str]) -> None:
    """Check the values that the library accepts although their types exclude them.

    Args:
        config: the configuration of a command, a namespace.
        known: classes of parts without a class path, by key.
        linked: arguments of the model that are set later.

    Raises:
        ConfigError: a key is null although its type does not allow it, or a number is outside of
            the `Range` of its type.
    """
    for key, own in known.items():
        _check(config.get(key), types_of(own), key)
    for key in ("model", "data"):
        for path, class_path, arguments in _classes(config.get(key), key):
            cls = _import(class_path)
            if cls is not None:
                expected = types_of(cls)
                if path == "model":
                    expected = {k: v for k, v in expected.items() if k not in linked}
                _check(arguments, expected, f"{path}.init_args")


def reject_more_arguments(config: Any) -> None:
    """Raise for `dict_kwargs` of classes without `**kwargs`.

    Raises:
        ConfigError: there is such a key; the message suggests the nearest valid one.
    """
    for key in ("model", "data"):
        for path, class_path, _ in _classes(config.get(key), key):
            more, cls = config.get(f"{path}.dict_kwargs"), _import(class_path)
            if not more or cls is None or takes_any_name(cls):
                continue
            name = next(iter(dict(more)))
            raise ConfigError(
                f"unknown key '{path}.dict_kwargs.{name}' for {public_path(cls)}"
                f"{nearest(name, parameters_of(cls))}"
            )


def _check(part: Any, expected: dict[str, Any], path: str) -> None:
    for name, value in dict(part).items() if part is not None else ():
        if value is None and name in expected and not _allows_none(expected[name]):
            kinds = (getattr(kind, "__name__", kind) for kind in parts_of(expected[name])[0])
            told = f"expected {' | '.join(map(str, kinds))}, received null"
            raise ConfigError(f"{path}.{name}: {told}")
        if any(isinstance(note, Range) for note in parts_of(expected.get(name))[1]):
            check_argument(f"{path}.{name}", value, expected[name])


def _classes(part: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the path, class path and arguments of every class in a part."""
    if part is None or not hasattr(part, "get"):
        return
    arguments = part.get("init_args")
    if isinstance(part.get("class_path"), str) and arguments is not None:
        yield path, part["class_path"], arguments
        # Not dict(), which for a namespace returns only leaves, under dotted names.
        inside = arguments if isinstance(arguments, dict) else vars(arguments)
        for name, value in inside.items():
            yield from _classes(value, f"{path}.init_args.{name}")


def _import(class_path: str) -> type | None:
    try:
        found = class_of(class_path)
    except ConfigError:
        return None
    return found if isinstance(found, type) else None


def _allows_none(kind: Any) -> bool:
    return any(
        None in typing.get_args(part)
        if typing.get_origin(part) is typing.Literal
        else part in (None, type(None), Any, object) or isinstance(part, typing.TypeVar)
        for part in parts_of(kind)[0]
    )


_load_yaml = get_loader("yaml")


def _load_canonical(text: str) -> Any:
    """Load YAML like the parser, in canonical form."""
    content = _load_yaml(text)
    return canonical(content) if isinstance(content, dict) else content


set_loader("yaml", _load_canonical, exceptions=(yaml.YAMLError,))
