"""Modules from sources that lie nowhere: with a fault, or with probes that say which lines ran."""

from __future__ import annotations

import ast
import importlib.abc
import importlib.util
import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_PROBE = "__ran__"


class Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder of the modules of some files, which loads what `change` makes of their source.

    Args:
        root: folder that the packages lie in.
        files: paths from there.
        change: path and source -> the source to load, or a tree of it.
        names: what the modules find defined.
    """

    def __init__(
        self,
        root: Path,
        files: Sequence[str],
        change: Callable[[str, str], str | ast.Module],
        **names: Any,
    ) -> None:
        self.root, self.change, self.names = root, change, names
        self.files = {module_name(file): file for file in files}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find one of these modules."""
        file = self.files.get(name)
        if file is None:
            return None
        folders = [str((self.root / file).parent)] if file.endswith("__init__.py") else None
        return importlib.util.spec_from_file_location(
            name, self.root / file, loader=self, submodule_search_locations=folders
        )

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave the module to Python."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the changed source; who asks for the source of a function, as Triton, gets it too."""
        file = self.files[module.__name__]
        path = str(self.root / file)
        found = self.change(file, Path(path).read_text(encoding="utf-8"))
        if isinstance(found, str):
            linecache.cache[path] = (len(found), None, found.splitlines(keepends=True), path)
        vars(module).update(self.names)
        exec(compile(found, path, "exec"), vars(module))

    def install(self) -> None:
        """Come before Python's own finders."""
        sys.meta_path.insert(0, self)


def module_name(file: str) -> str:
    """Return the name of the module that a path is."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class Probes:
    """Which tests run which lines: a plugin of pytest, and the sources with probes.

    Kernels that are compiled from their source have no probes.
    """

    def __init__(self) -> None:
        self.ran: set[tuple[str, int]] = set()
        self.tests: dict[str, dict[int, list[str]]] = {}
        self.failed: set[str] = set()

    def change(self, file: str, source: str) -> ast.Module:
        """Return the tree of a source that notes each line of a function as it runs."""
        tree = ast.parse(source)
        for function in list(_functions(tree)):
            for node in list(_statements(function)):
                for name in ("body", "orelse", "finalbody"):
                    block = getattr(node, name, None)
                    if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                        setattr(node, name, list(self._probed(file, block)))
        return ast.fix_missing_locations(tree)

    @staticmethod
    def _probed(file: str, block: list[ast.stmt]) -> Iterator[ast.stmt]:
        for number, statement in enumerate(block):
            is_docstring = isinstance(statement, ast.Expr) and isinstance(
                statement.value, ast.Constant
            )
            if not (is_docstring and number == 0) and not isinstance(statement, ast.Global):
                probe = ast.parse(f"{_PROBE}.add(({file!r}, {statement.lineno}))").body[0]
                yield ast.copy_location(probe, statement)
            yield statement

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Note what a test runs, its fixtures included."""
        self.ran.clear()
        yield
        for file, line in self.ran:
            self.tests.setdefault(file, {}).setdefault(line, []).append(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the tests that fail without a fault."""
        if report.failed:
            self.failed.add(report.nodeid)

    def passed(self) -> dict[str, dict[int, list[str]]]:
        """Return for each file and line the tests that run it, without those that failed."""
        return {
            file: {
                line: [name for name in names if name not in self.failed]
                for line, names in lines.items()
            }
            for file, lines in self.tests.items()
        }


def probed_lines(source: str) -> set[int]:
    """Return the lines that probes would tell of."""
    nodes = ast.walk(Probes().change("", source))
    calls = (node for node in nodes if isinstance(node, ast.Call))
    return {
        ast.literal_eval(call.args[0])[1] for call in calls if f"{_PROBE}.add" in ast.unparse(call)
    }


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Functions outside of others, but kernels."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            if not any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                yield node
        else:
            yield from _functions(node)


def _statements(function: ast.FunctionDef) -> Iterator[ast.AST]:
    for node in ast.walk(function):
        if isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case) and not isinstance(
            node, ast.ClassDef
        ):
            yield node
