"""Sentences of the repository: of pages, docstrings, help texts and messages.

A list item or a cell of a table counts as a sentence. Code blocks, headings, figures, equations and
texts of fewer than four words are left out. Equal sentences of one kind count once.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from markdown_it import MarkdownIt

Kind = Literal["page", "docstring", "help", "message"]
KINDS: tuple[Kind, ...] = ("page", "docstring", "help", "message")
PACKAGES = ("lit_probattn", "datamodules", "profiling")
GENERATED = {"as_released.md", "released_presets.md", "commands.md"}  # written by programs
# The end of a sentence, before a capital, a code span, a quotation or a bracket.
_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`\"'(*\[{—–-])")
_ARGUMENT = re.compile(r"\n\s+(?=[a-z_*]+(?: \([^)]*\))?: )")
_MESSAGE_CALLS = {"print", "error", "warning", "info", "warn", "exit"}
_HELP_WORDS = {"help", "description", "epilog"}


@dataclass(frozen=True)
class Sentence:
    """A sentence and where it is."""

    kind: Kind
    file: str
    line: int
    text: str


def split(text: str) -> list[str]:
    """Return the sentences of a paragraph that have enough words outside code."""
    parts = (part.strip() for part in _END.split(" ".join(text.split())))
    prose = ((part, re.sub(r"`[^`]*`|\{[^{}]*\}", " ", part)) for part in parts)
    return [part for part, words in prose if len(re.findall(r"[A-Za-z][\w'’-]+|\ba\b", words)) > 3]


def of_page(text: str, file: str) -> Iterator[Sentence]:
    """Yield the sentences of a Markdown page."""
    tokens = MarkdownIt().enable("table").parse(text)
    line = 1
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.map:
            line = token.map[0] + 1
        if token.type != "inline" or (before and before.type == "heading_open"):
            continue
        if re.match(r"!\[|:::|--8<--", token.content):
            continue
        prose = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", token.content)
        for part in split(prose):
            yield Sentence("page", file, line, part)


def of_module(text: str, file: str) -> Iterator[Sentence]:
    """Yield docstrings, help texts and messages of a module."""
    seen: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for part in _of_docstring(_document(node)):
                yield Sentence("docstring", file, getattr(node, "lineno", 1), part)
        for kind, expression in _printed(node):
            for literal in _literals(expression):
                if id(literal) not in seen:
                    seen.add(id(literal))
                    for part in split(_as_text(literal)):
                        yield Sentence(kind, file, literal.lineno, part)


def _document(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return a docstring without the indentation of its code (`cleandoc` removes more)."""
    indent = " " * (node.body[0].col_offset if node.body else 0)
    document = ast.get_docstring(node, clean=False) or ""
    return "\n".join(line.removeprefix(indent) for line in document.split("\n"))


def _of_docstring(document: str) -> Iterator[str]:
    for block in re.split(r"\n\s*\n", document):
        if re.match(r"\s{4,}\S", block):
            continue  # an equation or a command
        bare = re.sub(r"^(Args|Returns|Raises|Yields|Source):\s*", "", block)
        for item in _ARGUMENT.split(bare):
            yield from split(item)


def _printed(node: ast.AST) -> Iterator[tuple[Kind, ast.AST]]:
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        yield from (("message", argument) for argument in node.exc.args)
    elif isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in _MESSAGE_CALLS:
            yield from (("message", argument) for argument in node.args)
        yield from (("help", word.value) for word in node.keywords if word.arg in _HELP_WORDS)


def _literals(node: ast.AST) -> Iterator[ast.Constant | ast.JoinedStr]:
    if isinstance(node, ast.JoinedStr):
        yield node
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield node
    else:
        for child in ast.iter_child_nodes(node):
            yield from _literals(child)


def _as_text(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    return "".join(
        str(part.value) if isinstance(part, ast.Constant) else "{x}" for part in node.values
    )


def of_pages(root: Path, changelog: bool = False) -> Iterator[Sentence]:
    """Yield the sentences of the pages of a checkout."""
    pages = [root / "README.md", root / "CONTRIBUTING.md", root / "AGENTS.md"]
    pages += [*sorted((root / "docs").rglob("*.md")), *([root / "CHANGELOG.md"] * changelog)]
    for page in pages:
        if page.is_file() and page.name not in GENERATED:
            yield from of_page(page.read_text(encoding="utf-8"), page.relative_to(root).as_posix())


def of_repository(root: Path, changelog: bool = False) -> list[Sentence]:
    """Return all sentences of a checkout, equal ones of a kind once."""
    found: list[Iterable[Sentence]] = [of_pages(root, changelog)]
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            found.append(of_module(path.read_text(encoding="utf-8"), name))
    first: dict[tuple[str, str], Sentence] = {}
    for sentences in found:
        for sentence in sentences:
            first.setdefault((sentence.kind, sentence.text), sentence)
    return list(first.values())
