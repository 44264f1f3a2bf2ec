"""The small faults of a source: of Python in its syntax tree, of C in its text."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In},
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.MatMult: ast.Mult},
    **{ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
}
# What a line of C is changed to, by the first of its places that the pattern finds.
_IN_C = [
    (re.compile(r"(?<=\w) < (?=\w)"), " <= "),
    (re.compile(r" <= "), " < "),
    (re.compile(r" > "), " >= "),
    (re.compile(r" == "), " != "),
    (re.compile(r" && "), " || "),
    (re.compile(r" \+ "), " - "),
    (re.compile(r" - "), " + "),
    (re.compile(r" \* "), " + "),
    (re.compile(r" / "), " * "),
    (re.compile(r" \+= "), " = "),
    (re.compile(r"\+\+"), "--"),
    (re.compile(r"(?<![\w.])0(?![\w.])"), "1"),
    (re.compile(r"(?<![\w.])1(?![\w.])"), "2"),
]


def python_faults(source: str) -> dict[int, list[tuple[str, Callable[[], str]]]]:
    """Return the faults of each line: what is changed, and a function that gives the source then.

    Left alone are what only people or type checkers read: annotations, docstrings, messages of
    errors, imports.
    """
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    unread = {id(inner) for node in nodes for root in _unread(node) for inner in ast.walk(root)}
    found: dict[int, list[tuple[str, Callable[[], str]]]] = {}
    for index, node in enumerate(nodes):
        if id(node) in unread:
            continue
        for line, what, change in _changes(node, unread):
            count = sum(name.partition(" (")[0] == what for name, _ in found.get(line, []))
            name = what if not count else f"{what} ({count + 1} of its line)"
            made = _Planted(tree, index, change)
            found.setdefault(line, []).append((name, made))
    return found


@dataclass(frozen=True)
class _Planted:
    tree: ast.Module
    index: int
    change: Callable[[ast.AST], None]

    def __call__(self) -> str:
        tree = copy.deepcopy(self.tree)
        self.change(list(ast.walk(tree))[self.index])
        return ast.unparse(ast.fix_missing_locations(tree))


def _unread(node: ast.AST) -> Iterator[ast.AST]:
    """Parts of a node that no run of the program depends on, or that only words depend on."""
    for name in ("annotation", "returns"):
        part = getattr(node, name, None)
        if part is not None:
            yield part
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
        yield node
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        yield node  # a docstring


def _changes(
    node: ast.AST, unread: set[int]
) -> Iterator[tuple[int, str, Callable[[ast.AST], None]]]:
    line = getattr(node, "lineno", 0)
    if isinstance(node, ast.Compare):
        old, new = node.ops[0], _COMPARED[type(node.ops[0])]
        yield line, f"{type(old).__name__} -> {new.__name__}", _set_first_op(new)
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _COMPUTED:
        operator = _COMPUTED[type(node.op)]
        yield line, f"{type(node.op).__name__} -> {operator.__name__}", _setting("op", operator)
    if isinstance(node, ast.BoolOp):
        other = ast.Or if isinstance(node.op, ast.And) else ast.And
        yield line, f"{type(node.op).__name__} -> {other.__name__}", _setting("op", other)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield line, "without minus", _setting("op", ast.UAdd)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        yield line, f"constant {node.value!r}", _next_constant
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield line, "condition negated", _negated
    if isinstance(node, ast.Call):
        first = node.args[:2]
        if len(first) == 2 and not any(isinstance(given, ast.Starred) for given in first):
            yield line, "arguments exchanged", _exchanged
    if isinstance(node, ast.Call) and node.keywords and node.keywords[-1].arg:
        yield node.keywords[-1].lineno, f"without {node.keywords[-1].arg}=", _without_keyword
    for name in ("body", "orelse"):
        block = getattr(node, name, None)
        if isinstance(node, ast.FunctionDef | ast.If | ast.For | ast.With) and block:
            for number, statement in enumerate(block):
                kinds = ast.Assign | ast.AugAssign | ast.Expr
                if isinstance(statement, kinds) and id(statement) not in unread:
                    yield statement.lineno, "statement left out", _left_out(name, number)


def _set_first_op(new: type[ast.cmpop]) -> Callable[[ast.AST], None]:
    def change(node: ast.AST) -> None:
        node.ops[0] = new()  # type: ignore[attr-defined]

    return change


def _setting(name: str, new: Callable[[], ast.AST]) -> Callable[[ast.AST], None]:
    return lambda node: setattr(node, name, new())


def _next_constant(node: ast.AST) -> None:
    value = node.value  # type: ignore[attr-defined]
    node.value = not value if isinstance(value, bool) else value + 1  # type: ignore[attr-defined]


def _negated(node: ast.AST) -> None:
    node.test = ast.UnaryOp(ast.Not(), node.test)  # type: ignore[attr-defined]


def _exchanged(node: ast.AST) -> None:
    node.args[:2] = node.args[1::-1]  # type: ignore[attr-defined]


def _without_keyword(node: ast.AST) -> None:
    node.keywords.pop()  # type: ignore[attr-defined]


def _left_out(block: str, number: int) -> Callable[[ast.AST], None]:
    return lambda node: getattr(node, block).__setitem__(number, ast.Pass())


def c_faults(source: str) -> dict[int, list[tuple[str, Callable[[], str]]]]:
    """Return the faults of each line of C, as `python_faults`; comments and directives stay."""
    code = re.sub(r"/\*.*?\*/|//[^\n]*", lambda m: re.sub(r"[^\n]", " ", m[0]), source, flags=re.S)
    lines, found = source.splitlines(keepends=True), {}
    for number, text in enumerate(code.splitlines(), 1):
        if text.lstrip().startswith("#") or text.endswith("\\"):
            continue
        for pattern, new in _IN_C:
            place = pattern.search(text)
            if place is None or ("for (" in text and pattern.pattern == r"\+\+"):
                continue  # an endless loop
            line = lines[number - 1]
            changed = line[: place.start()] + new + line[place.end() :]
            whole = "".join([*lines[: number - 1], changed, *lines[number:]])
            what = f"{place[0].strip()} -> {new.strip()}"
            found.setdefault(number, []).append((what, lambda whole=whole: whole))
    return found
