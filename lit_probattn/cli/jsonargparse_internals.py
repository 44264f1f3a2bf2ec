"""Uses of private jsonargparse APIs: options of parsers, and causes of error messages.

All private members and patterns of messages are here; each has a test in
`tests/cli/test_jsonargparse_internals.py` that triggers it and fails when it changes.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import itertools
import re
import types
import typing
from argparse import ArgumentError
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jsonargparse import Namespace, _paths
from jsonargparse._postponed_annotations import TypeCheckingVisitor

from lit_probattn.attention import Attention
from lit_probattn.base.errors import nearest
from lit_probattn.cli.files import NO_ATTENTION, NOTHING_GIVEN, unknown_option
from lit_probattn.configs import KEY, public_path

# If the library raises a plain TypeError, KeyError or ValueError, only its message contains the
# details. The rest is read from exceptions: an unknown class from AttributeError, ImportError and
# ModuleNotFoundError, a class and its arguments from `Rejected`.
UNKNOWN_FLAG = re.compile(r"unrecognized arguments: --([^\s=]+)")
UNKNOWN_KEY = re.compile(r"[Oo]ption '([^']+)'")
MISSING = re.compile(r"arguments are required: ([\w, ]+)")
NO_TASK = re.compile(r"arguments are required: \w+\.data, \w+\.model")
EXPECTED = re.compile(
    r"Expected a ((?:<class|typing\.).*?)(?:\. Got value: (.*?))?(?=\. Got value:|\n|$)"
)
NOT_KEYS = re.compile(r"Unable to load config ['\"](.*?)['\"]")
NOT_A_PATH = re.compile(r"Expected a dot import path string: (\S+)")
BY_NUMBER = re.compile(r"^Does not validate.*dict\[int, .*^Given value: ({.*})$", re.M | re.S)
NOT_A_SUBCLASS = re.compile(r"Expected '([\w.]+)' to be a subclass")


@functools.cache
def _imports(source: str) -> ast.Module:
    """Parse a module's imports and conditions, which can contain `if TYPE_CHECKING`."""
    tree = ast.parse(source)
    kinds = (ast.Import, ast.ImportFrom, ast.If)
    return ast.Module([node for node in tree.body if isinstance(node, kinds)], tree.type_ignores)


def read_sources_once() -> None:
    """Let the library parse the source of a module once instead of once per signature.

    It searches for names imported for type checkers only. A run has about fifty signatures
    from a dozen modules, including PyTorch's longest: almost half a second per start.
    """

    def update_aliases(
        self: Any, module_source: str, module: str, aliases: dict[str, Any], logger: Any = None
    ) -> None:
        self.module, self.aliases, self.logger = module, aliases, logger
        self.visit(_imports(module_source))

    TypeCheckingVisitor.update_aliases = update_aliases  # type: ignore[method-assign]


def read_files_as_utf8() -> None:
    """Let the library read configuration files as UTF-8, whatever the encoding of the locale."""

    def utf8(file: Any, mode: str = "r") -> Any:
        return open(file, mode, encoding=None if "b" in mode else "utf-8")

    _paths.open = utf8  # type: ignore[attr-defined]


class Rejected(ArgumentError):
    """Error of the parser of a class's arguments; `names` are its arguments."""

    def __init__(self, message: str, owner: type | None, names: list[str]) -> None:
        super().__init__(None, message)
        self.owner, self.names = owner, names


def option_names(parser: Any) -> list[str]:
    """Return the options of a parser and of its sub-commands, without `--`."""
    action = parser._subcommands_action
    parsers = [parser, *(action.choices.values() if action is not None else ())]
    options = [option for each in parsers for option in each._option_string_actions]
    return [option[2:] for option in options if option.startswith("--")]


def prefer_integers(parser: Any) -> None:
    """Let options that accept integers and floats try integers first: batches, not fractions.

    Python caches `Optional[Union[int, float]]` in the order in which any package first used it.
    """
    for action in parser._actions:
        kinds = list(typing.get_args(getattr(action, "_typehint", None)))
        if typing.get_origin(getattr(action, "_typehint", None)) not in (
            typing.Union,
            types.UnionType,
        ):
            continue
        if int in kinds and float in kinds and kinds.index(float) < kinds.index(int):
            first, second = kinds.index(float), kinds.index(int)
            kinds[first], kinds[second] = int, float
            action._typehint = typing.Union[tuple(kinds)]  # noqa: UP007


def readable(message: str, error: BaseException | None, options: list[str]) -> str:
    """Reduce an error of the argument parser to one line, with the nearest valid name.

    `error` is the exception behind the message; `options` are the valid ones, without `--`.
    """
    causes = list(_causes(error))
    cause = causes[-1] if causes else None
    owners = [item for item in causes if isinstance(item, Rejected)]
    number = _rejected_number(causes)
    keys = [
        f"{key}.{number}" if key == "layers" and number is not None else key
        for key in KEY.findall(message)
    ]
    path = ".init_args.".join(keys)
    text = str(cause)
    flag = UNKNOWN_FLAG.search(message)
    key = UNKNOWN_KEY.search(text) if isinstance(cause, KeyError) else None
    if key and owners and owners[-1].owner is not None:
        name = public_path(owners[-1].owner)
        close = nearest(key[1], owners[-1].names)
        return f"unknown key '{path}.init_args.{key[1]}' for {name}{close}"
    if flag or key:
        unknown = (flag or key)[1]  # type: ignore[index]
        return unknown_option(unknown, options)
    if NO_TASK.search(message):
        return NOTHING_GIVEN
    missing = MISSING.search(text)
    if missing and missing[1] == "attention":
        return NO_ATTENTION
    if missing and path:
        return f"{path}: missing {missing[1]}"
    problem = _unknown_class(cause)
    if problem:
        return f"{path}: {problem[0]} {problem[1]!r}{_suggest_class(problem[1], path)}"
    not_keys = NOT_KEYS.search(message)
    if not_keys and KEY.search(message):
        return f"{KEY.findall(message)[-1]}: expected a mapping, received {not_keys[1]!r}"
    return _wrong_value(message, path) or _in_one_line(message)


def failure_of_link(error: ValueError) -> BaseException | None:
    """Return the error in a function that links two arguments; None for other errors."""
    return error.__cause__ if str(error).startswith("Call to compute_fn of link") else None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _rejected_number(causes: Sequence[BaseException]) -> int | None:
    """Return the key of the rejected class among classes by number, or None."""
    texts = [str(cause) for cause in causes]
    for text, refusal in itertools.pairwise(texts):
        found = BY_NUMBER.search(text)
        if found is None:
            continue
        try:
            given: Mapping[Any, Any] = ast.literal_eval(found[1])
        except (SyntaxError, ValueError):
            return None
        for number, entry in given.items():
            if refusal.endswith(f"Got value: {_shown(entry)}"):
                return int(number)
    return None


def _shown(entry: Any) -> str:
    """Format a class and its arguments like the library."""
    if not isinstance(entry, Mapping):
        return str(entry)
    inner = {"init_args": Namespace(**entry["init_args"])} if "init_args" in entry else {}
    return str(Namespace(**{**entry, **inner}))


def _unknown_class(cause: BaseException | None) -> tuple[str, str] | None:
    """Return the problem with a class path, and the path."""
    if isinstance(cause, AttributeError):
        return "unknown class", f"{getattr(cause.obj, '__name__', cause.obj)}.{cause.name}"
    if isinstance(cause, ModuleNotFoundError):
        return "no module named", str(cause.name)
    for problem, pattern in (
        ("not the path of a class:", NOT_A_PATH),
        ("not a class of the expected type:", NOT_A_SUBCLASS),
    ):
        found = pattern.search(str(cause))
        if found:
            return problem, found[1]
    return None


def _suggest_class(given: str, path: str) -> str:
    """Suggest a class with a similar name in the module; for attention, list all."""
    is_attention = path.endswith("attention")
    package = "lit_probattn.attention" if is_attention else given.rpartition(".")[0]
    try:
        module = importlib.import_module(package)
    except (ImportError, ValueError):
        return ""
    public = {name: getattr(module, name) for name in getattr(module, "__all__", ())}
    names = [name for name, item in public.items() if isinstance(item, type)]
    if is_attention:
        names = [n for n in names if issubclass(public[n], Attention) and n != "Attention"]
    close = difflib.get_close_matches(given.rpartition(".")[2], names, n=1, cutoff=0.6)
    hint = f"; did you mean '{package}.{close[0]}'?" if close else ""
    every = ", ".join(f"{package}.{name}" for name in names)
    return f"{hint} (available: {every})" if is_attention or not close else hint


def _wrong_value(message: str, path: str) -> str | None:
    found = [m for m in EXPECTED.finditer(message) if "NoneType" not in m[1]]
    if not path or not found:
        return None
    kinds = [re.sub(r"<class '([\w.]+)'>|typing\.", r"\1", m[1]) for m in found]
    kinds = [re.sub(r"Literal\[(.*?)\]", r"one of \1", kind) for kind in kinds]
    values = [m[2] for m in found if m[2]]
    given = f", received {values[0]!r}" if values else ""
    return f"{path}: expected {' or '.join(kinds)}{given}"


def _in_one_line(message: str) -> str:
    lines = [line.strip(" -") for line in message.split("Given value type:")[0].splitlines()]
    skip = ("Does not validate", "Subtypes:", "Errors:", "Expected a <class 'NoneType'>")
    return "; ".join(line for line in lines if line and not line.startswith(skip))
