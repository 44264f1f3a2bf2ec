"""What every command computes anew is computed once, or sooner, in a process of tests.

A third of a training of one step goes into the library that reads configurations. Its functions
here return what they always return; `tests/cli/test_jsonargparse_internals.py` compares them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from importlib import metadata
from typing import Any

import yaml
from jsonargparse import (
    Namespace,
    _actions,
    _core,
    _loaders_dumpers,
    _namespace,
    _optionals,
    _signatures,
    _subcommands,
    _typehints,
    _util,
)
from jsonargparse._namespace import add_clash_mark
from lightning.fabric.utilities import registry

Found = tuple[Any, str | None]
_LATER = (_actions._ActionConfigLoad, _actions.ActionFail)
slow_find: Callable[..., Found] = _subcommands.find_action_and_subcommand
slow_parse_key = Namespace._parse_key
slow_branches = _namespace.recreate_branches
slow_dump = _loaders_dumpers.yaml_dump
slow_origin = _util.get_typehint_origin


def find_action(parser: Any, dest: str, exclude: Any = None) -> Found:
    """Return the action of a key, which is looked for before kinds of actions are."""
    flag, later = f"--{dest}", None
    for action in parser._actions:
        if action.__class__ is _subcommands.ActionSubCommands:
            return slow_find(parser, dest, exclude)
    for action in parser._actions:
        if action.dest != dest and flag not in action.option_strings:
            continue
        if isinstance(action, _actions.non_parsing_actions):
            continue
        if exclude is not None and isinstance(action, exclude):
            continue
        if not isinstance(action, _LATER):
            return action, None
        later = action
    return later, None


def parse_key(namespace: Namespace, key: Any) -> tuple[str, Any, str]:
    """Return the parts of a key; of one without a dot there is nothing to look for."""
    if type(key) is not str or not key or "." in key or " " in key:
        return slow_parse_key(namespace, key)
    return add_clash_mark(key), namespace, ""


def branches(data: Any, skip_keys: Any = None) -> Any:
    """Return a copy of nested namespaces, whose keys need no second look."""
    if type(data) is not Namespace:
        return slow_branches(data, skip_keys)
    copy = Namespace()
    for key, value in vars(data).items():
        if skip_keys is None or key not in skip_keys:
            vars(copy)[key] = branches(value, skip_keys)
    return copy


def origin_of(kind: Any) -> Any:
    """Return the origin of a type; a plain class has none."""
    if type(kind) is type and not hasattr(kind, "__origin__"):
        return None
    return slow_origin(kind)


def kept(parameters: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    known: dict[tuple[Any, Any], list[Any]] = {}

    def keep(owner: Any, method: str | None = None, logger: Any = True) -> list[Any]:
        if (owner, method) not in known:
            known[owner, method] = parameters(owner, method, logger=logger)
        return [dataclasses.replace(parameter) for parameter in known[owner, method]]

    return keep


def dump(content: Any) -> str:
    """Return the text of a configuration, written in C."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text: str = yaml.dump(content, Dumper=dumper, **_loaders_dumpers.dump_yaml_kwargs)
    return text


def spare_the_commands() -> None:
    """Let commands of this process, and of those forked from it, begin sooner."""
    _subcommands.find_action_and_subcommand = find_action
    _core.find_action_and_subcommand = find_action
    Namespace._parse_key = parse_key  # type: ignore[method-assign]
    _namespace.recreate_branches = branches
    _typehints.get_typehint_origin = origin_of  # type: ignore[attr-defined]
    _signatures.get_signature_parameters = kept(_signatures.get_signature_parameters)
    _loaders_dumpers.dumpers["yaml"] = dump
    _optionals.parse_docstring = functools.cache(_optionals.parse_docstring)
    metadata.version = functools.cache(metadata.version)
    registry.entry_points = functools.cache(registry.entry_points)  # type: ignore[attr-defined]
