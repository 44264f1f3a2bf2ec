"""Packages whose classes are imported at first use.

    __getattr__, __dir__, __all__ = exports(__name__)

in a package's `__init__.py`; its `__init__.pyi` has a line for each name, which type checkers and
editors also read:

    from lit_probattn.attention.cache import KVCache as KVCache
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return a package's `__getattr__`, `__dir__` and `__all__` from the imports of its stub."""
    module = sys.modules[package]
    stub = Path(str(module.__file__)).with_suffix(".pyi")
    homes = {
        alias.asname: ("." * line.level + line.module, alias.name)
        for line in ast.parse(stub.read_text(encoding="utf-8")).body
        if isinstance(line, ast.ImportFrom) and line.module
        for alias in line.names
        if alias.asname
    }
    names = sorted(homes)

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, original = homes[name]
        found = getattr(import_module(home, package), original)
        setattr(module, name, found)
        return found

    def listed() -> list[str]:
        return sorted({*vars(module), *names})

    return get, listed, names
