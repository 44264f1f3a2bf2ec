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
from jsonargparse import _loaders_dumpers, _optionals, _signatures
from lightning.fabric.utilities import registry

slow_dump = _loaders_dumpers.yaml_dump


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


def spare_the_commands() -> None:
    """Let commands of this process, and of those forked from it, begin sooner."""
    _signatures.get_signature_parameters = kept(_signatures.get_signature_parameters)
    _loaders_dumpers.dumpers["yaml"] = dump
    _optionals.parse_docstring = functools.cache(_optionals.parse_docstring)
    metadata.version = functools.cache(metadata.version)
    registry.entry_points = functools.cache(registry.entry_points)  # type: ignore[attr-defined]
