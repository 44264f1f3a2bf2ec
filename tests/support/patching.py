"""Patching that fails where it would change nothing; figures checked in place of drawn."""

from __future__ import annotations

import dis
import functools
import importlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def spare_drawing(patch: pytest.MonkeyPatch, look: Callable[[Figure], None] | None = None) -> None:
    """Write white figures of the right size: drawing takes most of a report's time.

    Args:
        patch: undoes it.
        look: called with each figure that is not drawn.
    """
    from PIL import Image

    def blank(figure: Figure, dpi: int) -> Image.Image:
        if look is not None:
            look(figure)
        width, height = (int(dpi * inches) for inches in figure.get_size_inches())
        return Image.new("RGB", (width, height), "white")

    patch.setattr("lit_probattn.records.figures._drawn", blank)
    patch.setattr("lit_probattn.records.figures._enlarge", lambda figure: None)
    patch.setattr("lit_probattn.records.figures._svg_bytes", lambda *_: b"<svg/>")


def check_figures(patch: pytest.MonkeyPatch) -> None:
    """Check figures in place of drawing them: panels contain data, and formulas are valid."""
    from matplotlib.cbook import is_math_text
    from matplotlib.mathtext import MathTextParser

    formulas = MathTextParser("path")

    def look(figure: Figure) -> None:
        panels = [axis for axis in figure.axes if axis.get_visible() and axis.axison]
        assert panels
        assert all(axis.has_data() for axis in panels)
        texts = [figure.get_suptitle(), figure.get_supxlabel(), figure.get_supylabel()]
        for axis in panels:
            legend = axis.get_legend()
            texts += [axis.get_title(), axis.get_xlabel(), axis.get_ylabel()]
            texts += [text.get_text() for text in axis.texts + (legend.texts if legend else [])]
        for text in filter(is_math_text, texts):
            formulas.parse(text)

    spare_drawing(patch, look)


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
