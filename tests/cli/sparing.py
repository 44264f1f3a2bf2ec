"""What every command computes anew is computed once in a process of tests.

A third of a training of one step goes into the library that reads configurations.
`tests/cli/test_jsonargparse_internals.py` compares what is kept with what the library returns.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from importlib import metadata
from typing import Any

import yaml
from jsonargparse import _core, _loaders_dumpers, _namespace, _optionals, _signatures, _subcommands
from lightning.fabric.utilities import registry

slow_dump = _loaders_dumpers.yaml_dump
slow_find = _subcommands.find_action_and_subcommand
slow_parse = _namespace.Namespace._parse_key


def kept(parameters: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Return copies of the parameters of a signature, which is read once."""
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


def found_once(find: Callable[..., Any]) -> Callable[..., Any]:
    """Keep in each parser which action has a key, until the parser has others."""

    def found(parser: Any, dest: str, exclude: Any = None) -> Any:
        known = vars(parser).setdefault("_found", {})
        key = (dest, exclude, *map(id, parser._actions[-1:]), len(parser._actions))
        if key not in known:
            known[key] = find(parser, dest, exclude)
        return known[key]

    return found


def parsed_at_once(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Return a key of one word without looking for what it consists of."""

    def parsed(namespace: Any, key: Any) -> Any:
        if isinstance(key, str) and key.isidentifier():
            return _namespace.add_clash_mark(key), namespace, ""
        return parse(namespace, key)

    return parsed


def spare_the_commands() -> None:
    """Let commands of this process, and of those forked from it, begin sooner."""
    find = found_once(slow_find)
    _subcommands.find_action_and_subcommand = _core.find_action_and_subcommand = find
    _namespace.Namespace._parse_key = parsed_at_once(slow_parse)  # type: ignore[method-assign]
    _signatures.get_signature_parameters = kept(_signatures.get_signature_parameters)
    _loaders_dumpers.dumpers["yaml"] = dump
    _optionals.parse_docstring = functools.cache(_optionals.parse_docstring)
    metadata.version = functools.cache(metadata.version)
    registry.entry_points = functools.cache(registry.entry_points)  # type: ignore[attr-defined]
