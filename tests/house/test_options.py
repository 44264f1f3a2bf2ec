"""Every option of a task, model or layer is a line of `options.txt` that was reviewed.

    python -m tests.house.test_options    # write the file

An option is listed where it is declared: tasks and models take those of their parts, and layers
those of records (`by_name`), which are listed as `options`; one with another default than its
part's is listed with it. Those of commands are reviewed in `lit_probattn/commands/help`, which
`tests/commands/test_program.py` compares with the parsers.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from types import FunctionType

from lit_probattn import attention, models, tasks
from lit_probattn.attention.mgk.annealing import NormAnnealing

FILE = Path(__file__).parent / "options.txt"


def declared(kind: str, cls: type) -> Iterator[str]:
    """Yield a line for each option that the constructor of a class declares, or its records."""
    constructor = vars(cls).get("__init__")
    if constructor is None:
        return
    if hasattr(constructor, "record"):
        for base in constructor.record.__mro__[:-1]:
            yield from fields_of(base)
        return
    own = inspect.unwrap(constructor)
    for name in changed_defaults(own) if own is not constructor else ():
        default = inspect.signature(constructor).parameters[name].default
        yield f"{kind} {cls.__name__}.{name} = {default!r}"
    for found in [*inspect.signature(own).parameters.values()][1:]:
        if found.kind not in (found.VAR_POSITIONAL, found.VAR_KEYWORD):
            # As it is written, whether types are postponed or not.
            text = str(found.replace(annotation=found.empty))
            hint = found.annotation
            hint = hint if isinstance(hint, str) else inspect.formatannotation(hint)
            name, equals, default = text.partition("=")
            yield f"{kind} {cls.__name__}.{name}: {hint}" + equals.replace("=", " = ") + default


def changed_defaults(constructor: FunctionType) -> Iterator[str]:
    """Yield the arguments of parts for which a constructor gives `takes` another default."""
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(constructor))).body
    settings = constructor.__globals__
    for found in getattr(function, "decorator_list", ()):
        if isinstance(found, ast.Call) and ast.unparse(found.func) == "takes":
            for given in found.keywords:
                names = [given.arg] if given.arg else settings[ast.unparse(given.value)]
                yield from (name for name in names if name != "without")


def fields_of(record: type) -> Iterator[str]:
    """Yield a line for each option that a record declares itself."""
    for field in fields(record):
        if field.init and field.name in vars(record).get("__annotations__", {}):
            name = f"{record.__name__}.{field.name}"
            default = "" if field.default is MISSING else f" = {field.default!r}"
            yield f"options {name}: {field.type}{default}"


def classes_of(package: object) -> Iterator[type]:
    """Yield the classes that are defined in the modules of a package."""
    name, path = package.__name__, package.__path__  # type: ignore[attr-defined]
    for module in pkgutil.walk_packages(path, f"{name}."):
        for item in vars(importlib.import_module(module.name)).values():
            if isinstance(item, type) and item.__module__ == module.name:
                yield item


def options() -> list[str]:
    """Return all options, sorted."""
    lines: set[str] = set()
    layers = [attention.Attention, *attention.variants().values()]
    for kind, found in (
        ("layer", layers),
        ("model", classes_of(models)),
        ("task", [c for c in classes_of(tasks) if issubclass(c, tasks.Task)]),
        ("task", [NormAnnealing]),
    ):
        lines |= {line for cls in found for line in declared(kind, cls)}
    return sorted(lines)


def test_every_option_is_in_the_list():
    listed = FILE.read_text(encoding="utf-8").splitlines()
    assert listed == sorted(set(listed))
    found = set(options())
    new, gone = sorted(found - {*listed}), sorted({*listed} - found)
    assert (new, gone) == ([], []), "after a review: python -m tests.house.test_options"


if __name__ == "__main__":
    FILE.write_text("".join(f"{line}\n" for line in options()), encoding="utf-8")
