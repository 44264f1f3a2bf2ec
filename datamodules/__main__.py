"""`python -m datamodules {prepare,check} NAME [options]`, `… check PATH [--kind KIND] [options]`.

Options are the arguments of the data set's class. `prepare` builds its cache; `check` opens the
cache, compares it with the published sizes and prints lengths and checksums. `check PATH` reads
your own data and shows sizes, classes, lengths and samples. Nothing is downloaded.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NoReturn

from datamodules import REGISTRY
from datamodules.own_data import KINDS, kind_of
from lit_probattn.base.errors import ConfigError, DataError, nearest
from lit_probattn.base.progress import prepare_streams

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

    from datamodules.core.base import DataModule, Split

COMMANDS = ("prepare", "check")
_PROGRAM = "lit-probattn data"
_WRONG_VALUE = re.compile(
    r"""^Parser key "(\w+)": Expected a (?:<class ')?(.+?)(?:'>)?\. Got value: (.*)$"""
)
_PURPOSE = {
    "prepare": "build the cache of a data set; nothing is downloaded",
    "check": (
        "verify the cache of a data set and compare it with the published sizes; the exit status "
        "is 1 if a release differs from them"
    ),
}


def main(
    arguments: list[str] | None = None, options_of: Callable[[str], list[str]] = lambda task: []
) -> int:
    """Run a command and return its exit status: 0, 1 for invalid data, 2 for invalid usage.

    Args:
        arguments: The command line.
        options_of: Options in the file of a task, by its name; `check PATH` starts from them.
    """
    prepare_streams()
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        helps = [word in ("-h", "--help") for word in arguments[:2]]
        if any(helps) or len(arguments) < 2:
            if arguments and not helps[0]:
                _one_of(COMMANDS, arguments[0], "command")
            print(_overview())
            return 0 if any(helps) else 2
        command = _one_of(COMMANDS, arguments[0], "command")
        _reject_duplicates(arguments[2:])
        if command == "check" and _is_path(arguments[1]):
            return _check_path(arguments[1], arguments[2:], options_of)
        name = _one_of(REGISTRY, arguments[1], "data set")
        return _run(command, name, arguments[2:])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; no cache was written", file=sys.stderr)
        return 130


def _run(command: str, name: str, options: list[str]) -> int:
    from datamodules.core.report import compare, describe, outline

    data = _make(command, name, options)
    own = name in KINDS.values()  # no published sizes
    start = time.monotonic()
    if command == "prepare" or own:
        data.prepare_data()
    data.splits = _load(data)
    for line in outline(data) if own and command == "check" else describe(data):
        print(line)
    if command == "prepare":
        print(f"prepared in {time.monotonic() - start:.1f} s")
        return 0
    verdicts = [] if own else list(compare(data))
    for line, _ in verdicts:
        print(line)
    # Only a release can differ from the published sizes; the user chooses generated ones.
    generated = getattr(data, "source", "released") == "generated"
    return 0 if generated or all(equal for _, equal in verdicts) else 1


def _is_path(word: str) -> bool:
    """Whether a word is a path to the user's data rather than the name of a data set."""
    return word not in REGISTRY and (os.path.exists(word) or bool(set("./\\~") & set(word)))


def _check_path(path: str, options: list[str], options_of: Callable[[str], list[str]]) -> int:
    """Read the user's data as its task reads them, and print a summary."""
    if _without(options, "--path")[1] is not None:
        raise ConfigError(f"{path}: --path names other data; keep one")
    options, given = _without(options, "--kind")
    task = KINDS[kind_of(path, given)]
    status = _run("check", task, [*options_of(task), f"--path={path}", *options])
    words = ["fit", "--task", task, "--attention", "smgk", "--data.path", path]
    for option in _without(options, "--new_path")[0]:  # which `fit` does not accept
        words.append(f"--data.{option[2:]}" if option.startswith("--") else option)
    print(f"train on it: lit-probattn {shlex.join(words)}")
    return status


def _without(options: list[str], flag: str) -> tuple[list[str], str | None]:
    """Return the options without a flag, and its value; None if it is not among them."""
    for place, option in enumerate(options):
        name, equals, value = option.partition("=")
        if name == flag:
            rest = options[place + 1 :]
            value, rest = (value, rest) if equals else ("".join(rest[:1]), rest[1:])
            return options[:place] + rest, value
    return options, None


def _load(data: DataModule) -> dict[str, Split]:
    from datamodules.core.base import CachedDataModule

    if isinstance(data, CachedDataModule):
        data.open()  # raises an error if it was not built
    data.setup()
    return data.splits


def _make(command: str, name: str, options: list[str]) -> DataModule:
    """Build the DataModule from options."""
    module, class_name = REGISTRY[name]
    data_class = getattr(importlib.import_module(module), class_name)
    parser = _parser(command, name, data_class)
    _reject_unknown(parser, options)
    made: DataModule = data_class(**parser.parse_args(options).as_dict())
    return made


def _reject_unknown(parser: ArgumentParser, options: list[str]) -> None:
    """Raise ConfigError for an unknown or abbreviated option, naming the nearest valid one."""
    known = ["-h", "--help", *re.findall(r"(?<![\w-])--?[a-z][\w-]*", parser.format_usage())]
    for option in options:
        flag = option.split("=", 1)[0]
        if re.match(r"-(?![\d.])", flag) and flag not in known:
            raise ConfigError(f"unknown option {flag}{nearest(flag, known, lists=False)}")


def _reject_duplicates(options: list[str]) -> None:
    """Raise ConfigError for an option that is given twice, of which the last would count."""
    flags = [option.partition("=")[0] for option in options if option.startswith("--")]
    for flag in flags:
        if flags.count(flag) > 1:
            raise ConfigError(f"duplicate {flag}; keep one")


def _parser(command: str, name: str, data_class: type) -> ArgumentParser:
    from jsonargparse import ArgumentParser

    class OneLineParser(ArgumentParser):
        def error(self, message: str, ex: Exception | None = None) -> NoReturn:
            text = " ".join(str(message).split())
            raise ConfigError(_WRONG_VALUE.sub(r"--\1: expected \2, received '\3'", text))

    parser = OneLineParser(
        prog=f"{_PROGRAM} {command} {name}",
        description=f"{_PURPOSE[command].capitalize()}.",
        allow_abbrev=False,
        default_env=False,
    )
    parser.add_class_arguments(data_class)
    return parser


def _one_of(valid: Iterable[str], given: str, what: str) -> str:
    names = list(valid)
    if given not in names:
        hint = nearest(given, names, lists=False)
        raise ConfigError(f"unknown {what} {given!r}; expected one of {', '.join(names)}{hint}")
    return given


def _overview() -> str:
    return (
        f"usage: {_PROGRAM} {{{','.join(COMMANDS)}}} NAME [options]\n\n"
        f"prepare: {_PURPOSE['prepare']}\ncheck: {_PURPOSE['check']}\n\n"
        f"NAME: {', '.join(REGISTRY)}\n"
        f"Options of a data set: {_PROGRAM} prepare NAME --help\n"
        f"Your own data: {_PROGRAM} check PATH [--kind {{{','.join(KINDS)}}}] [options]\n"
        f"Folders: --data_dir (or LIT_PROBATTN_DATA), --cache_dir (or LIT_PROBATTN_CACHE)"
    )


if __name__ == "__main__":
    sys.exit(main())
