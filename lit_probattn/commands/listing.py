"""List available names: tasks, attention, trainers, tables, figures, studies, data.

    lit-probattn list            # what can be listed
    lit-probattn list attention  # names for `fit --attention NAME`

Your own folders (LIT_PROBATTN_CONFIGS) are included.
"""

# Nothing here imports torch, so that names are listed immediately.
from __future__ import annotations

import ast
import functools
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

import datamodules
from lit_probattn.analysis.registry import STUDIES
from lit_probattn.base.arguments import Parser
from lit_probattn.base.config_files import (
    bundle_of,
    comment_of,
    entry_of,
    files_in,
    load_yaml,
    named_files,
)
from lit_probattn.base.errors import ConfigError, nearest, reports
from lit_probattn.base.progress import aligned

WIDTH = 100  # characters per line of text

Lines = Iterator[tuple[str, str]]
_parsed = functools.lru_cache(maxsize=8)(load_yaml)  # a bundle is read for each of its entries


def _sentence(text: str) -> str:
    """Return the first sentence of a text, in one line."""
    return re.split(r"(?<=[.!?])\s", " ".join(text.split()), maxsplit=1)[0]


def _docstring(path: Path, name: str | None = None) -> str:
    """Return the first sentence of the docstring of a module or class, without importing it."""
    tree: ast.Module | ast.ClassDef = ast.parse(path.read_text(encoding="utf-8"))
    if name is not None:
        tree = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    return _sentence(ast.get_docstring(tree) or "")


def _files(kind: str) -> Lines:
    for name, path in named_files(kind).items():
        yield name, _sentence(" ".join(comment_of(path)))


def _figures() -> Lines:
    return _published(is_figure=True)


def _tables() -> Lines:
    return _published(is_figure=False)


def _published(*, is_figure: bool) -> Lines:
    """List the figures or the tables of configs/reproduce."""
    found = {
        path.stem: content.get("title", "")
        for path in files_in("configs/reproduce").values()
        if "kind" in (content := _content(path)) and (content["kind"] in _FIGURE_KINDS) == is_figure
    }
    yield from sorted(found.items(), key=lambda item: re.sub(r"\d+", _padded, item[0]))


def _content(path: Path) -> dict[str, Any]:
    """Return the content of a file of configs/reproduce; empty if it is not a mapping."""
    bundle = bundle_of(path)
    place = bundle or path
    try:
        content = _parsed(place.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ConfigError(f"{place}: too deeply nested") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        return {}
    return entry_of(bundle, content, path) if bundle else content


def _padded(number: re.Match[str]) -> str:
    return number[0].zfill(4)


def _studies() -> Lines:
    for name, (_, summary) in STUDIES.items():
        yield name, summary


def _data() -> Lines:
    folder = Path(datamodules.__file__).parent
    for name, (module, cls) in sorted(datamodules.REGISTRY.items()):
        path = folder.joinpath(*module.split(".")[1:]).with_suffix(".py")
        yield name, _docstring(path, cls)


_FIGURE_KINDS = ("figure", "sweep_figure", "drawing")

# What can be listed -> its use, and its lines.
KINDS: dict[str, tuple[str, Callable[[], Lines]]] = {
    "tasks": ("fit --task NAME", lambda: _files("task")),
    "attention": (
        "fit --attention NAME, lit_probattn.create(NAME, …)",
        lambda: _files("attention"),
    ),
    "trainers": ("fit --trainer NAME", lambda: _files("trainer")),
    "tables": ("lit-probattn reproduce NAME", _tables),
    "figures": ("lit-probattn reproduce NAME", _figures),
    "measurements": (
        "lit-probattn sweep, python -m profiling kernels|memory, --config NAME",
        lambda: _files("measurement"),
    ),
    "studies": ("lit-probattn analyse NAME", _studies),
    "data": ("lit-probattn data prepare|check NAME", _data),
}


def lines_of(kind: str) -> list[str]:
    """Return a line per name: the name and its description.

    Raises:
        ConfigError: there is no such kind, or a folder or file cannot be read.
    """
    if kind not in KINDS:
        raise ConfigError(f"cannot list {kind!r}{nearest(kind, KINDS)}")
    return _aligned(list(KINDS[kind][1]()))


def _aligned(items: list[tuple[str, str]]) -> list[str]:
    shorten = functools.partial(textwrap.shorten, width=WIDTH, placeholder=" …")
    return aligned([(name, shorten(text)) for name, text in items])


@reports(ConfigError)
def main(arguments: Sequence[str] | None = None) -> int:
    """Print names; return the exit status: 2 for a user error, with one line."""
    parser = Parser("lit-probattn list", __doc__)
    parser.add_argument("kind", nargs="?", help=", ".join(KINDS))
    options = parser.parse_args(arguments)
    if options.kind is None:
        lines = _aligned([(kind, use) for kind, (use, _) in KINDS.items()])
    else:
        lines = lines_of(options.kind)
    print("\n".join(lines))
    return 0
