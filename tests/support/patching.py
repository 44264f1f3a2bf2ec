"""Patching that fails where it would change nothing; figures drawn in a sixth of the time."""

from __future__ import annotations

import dis
import functools
import importlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

import pytest

OURS = ("lit_probattn", "datamodules", "profiling", "tests")
_READS = ("LOAD_GLOBAL", "LOAD_NAME")


class CheckedMonkeyPatch(pytest.MonkeyPatch):
    """`monkeypatch` that refuses to replace a global that its module never looks up.

    Functions look names up in the module they are written in. A name that a module only imports for
    others, or that has moved away, can be replaced there without any effect: the test would pass
    and check nothing.
    """

    def setattr(self, target: Any, *arguments: Any, **options: Any) -> None:
        """Replace an attribute, as pytest does.

        Raises:
            AssertionError: the owner is a module of ours whose code never reads the name.
        """
        if isinstance(target, str):
            owner, name = _owner(target)
        else:
            owner, name = target, str(arguments[0] if arguments else options["name"])
        if isinstance(owner, types.ModuleType) and owner.__name__.split(".")[0] in OURS:
            assert name in names_read(owner), (
                f"{owner.__name__} never looks up {name!r}: a patch there changes nothing; patch "
                "the module that reads it"
            )
        super().setattr(target, *arguments, **options)


@functools.cache
def names_read(module: types.ModuleType) -> set[str]:
    """Return the global names that the functions of a module look up when they run."""
    top = compile(inspect.getsource(module), "module", "exec")
    return {
        instruction.argval
        for code in _inner(top)
        for instruction in dis.get_instructions(code)
        if instruction.opname in _READS
    }


def _inner(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _inner(constant)


def draw_once(patch: pytest.MonkeyPatch) -> None:
    """Draw every figure once, as PNG: panels are not enlarged, and nothing is drawn as SVG.

    The fixture `sketches` draws nothing at all.
    """
    patch.setattr("lit_probattn.records.figures._enlarge", lambda figure: None)
    patch.setattr("lit_probattn.records.figures._svg_bytes", lambda *_: b"<svg/>")


def _owner(path: str) -> tuple[Any, str]:
    """Return the object whose attribute a dotted path names, and that attribute's name."""
    parts = path.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:-1]:
            owner = getattr(owner, part)
        return owner, parts[-1]
    raise ModuleNotFoundError(path)
