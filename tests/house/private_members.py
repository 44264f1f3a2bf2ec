"""Where a package uses what other libraries keep to themselves, found in its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

LIBRARIES = (
    "torch",
    "triton",
    "lightning",
    "jsonargparse",
    "argparse",
    "torchmetrics",
    "torchvision",
)
_KINDS = (
    *(ast.FunctionDef, ast.ClassDef, ast.Name, ast.Attribute, ast.Subscript),
    *(ast.Import, ast.ImportFrom),
)
# Public in Python's own documentation despite their names.
DOCUMENTED = {"_replace", "_asdict", "_fields", "_make", "_exit"}


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore."""
    return name.startswith("_") and not name.startswith("__") and name.strip("_") != ""


def nodes_of(source: str) -> list[ast.AST]:
    """Return the nodes of a file that the functions below look at, found in one walk."""
    stack: list[ast.AST] = [ast.parse(source)]
    found = []
    while stack:
        node = stack.pop()
        if isinstance(node, _KINDS):
            found.append(node)
        if isinstance(node, ast.Name | ast.Constant | ast.expr_context):
            continue  # nothing is below them
        for value in vars(node).values():
            if isinstance(value, ast.AST):
                stack.append(value)
            elif isinstance(value, list):
                stack += [item for item in value if isinstance(item, ast.AST)]
    return found


def own_names(files: Sequence[Sequence[ast.AST]], inherited: set[str]) -> set[str]:
    """Return the private names that the package itself defines: functions, classes, variables."""
    found = set()
    for nodes in files:
        overriding = {id(method) for method in overrides(nodes, inherited)}
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and id(node) not in overriding:
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                owner = node.value.id if isinstance(node.value, ast.Name) else None
                found |= {node.attr} if owner in ("self", "cls") else set()
    return {name for name in found if is_private(name)}


def overrides(nodes: Sequence[ast.AST], inherited: set[str]) -> Iterator[ast.FunctionDef]:
    """Yield the methods of derived classes that take the place of a library's private ones."""
    for node in nodes:
        if isinstance(node, ast.ClassDef) and node.bases:
            methods = (item for item in node.body if isinstance(item, ast.FunctionDef))
            yield from (method for method in methods if method.name in inherited)


def members_of(bases: Iterator[type]) -> set[str]:
    """Return the private names that classes of the libraries have."""
    return {name for base in bases for name in dir(base) if is_private(name)}


def private_uses(
    nodes: Sequence[ast.AST], own: set[str], inherited: set[str]
) -> Iterator[tuple[int, str]]:
    """Yield line and name of every use of a private member of another library.

    Args:
        nodes: those of a file.
        own: private names that the package defines.
        inherited: private names of the libraries' classes that the package derives from: to
            define one is to override it.
    """
    yield from ((method.lineno, method.name) for method in overrides(nodes, inherited))
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module.split(".")[0] in LIBRARIES:
                parts = [*node.module.split("."), *(alias.name for alias in node.names)]
                yield from ((node.lineno, part) for part in parts if is_private(part))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in LIBRARIES:
                    yield from ((node.lineno, p) for p in alias.name.split(".") if is_private(p))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            if node.attr not in own and node.attr not in DOCUMENTED:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Subscript) and _is_dict(node.value):
            name = ast.unparse(node.slice).strip("'")
            yield from [(node.lineno, name)] * (is_private(name) and name not in own)


def _is_dict(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "__dict__"
