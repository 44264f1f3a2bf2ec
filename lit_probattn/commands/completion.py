"""`lit-probattn --print-completion SHELL`: a script for the shell's tab completion.

It completes commands, and the names of tasks, attention and trainers that exist when it is printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from lit_probattn.base.arguments import Parser
from lit_probattn.base.config_files import named_files

SHELLS = ("bash", "zsh", "tcsh")
# Commands with named files -> their flags, the kind of file, and whether several are allowed.
_Flags = dict[str, tuple[str, str | None]]
_FIT: _Flags = {
    "--task": ("task", None),
    "--attention": ("attention", None),
    "--trainer": ("trainer", None),
}
_COMPARE: _Flags = {"--task": ("task", "+"), "--attention": ("attention", "+")}
_SWEEP: _Flags = {"--config": ("measurement", None)}


def make_parser(run: Mapping[str, str], others: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return a parser that mirrors the program.

    Args:
        run: commands of a run, each with a description.
        others: the other commands.
    """
    parser = Parser("lit-probattn")
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    commands = parser.add_subparsers(dest="command")
    flags: dict[str, _Flags] = {**dict.fromkeys(run, _FIT), "compare": _COMPARE, "sweep": _SWEEP}
    for name, text in {**run, **others}.items():
        command = commands.add_parser(name, help=text)
        for flag, (kind, number) in flags.get(name, {}).items():
            command.add_argument(flag, nargs=number, choices=list(named_files(kind)))
    return parser


def main(words: list[str], run: Mapping[str, str], others: Mapping[str, str]) -> int:
    """Print the script for a shell; return 2 for wrong usage, with one line."""
    shell = words[0] if len(words) == 1 else None
    if shell not in SHELLS:
        received = " ".join(words) or "nothing"
        print(
            f"error: --print-completion: expected one of {', '.join(SHELLS)}, received {received}",
            file=sys.stderr,
        )
        return 2
    try:
        import shtab
    except ModuleNotFoundError:
        needs = "requires the package shtab: pip install 'lit-probattn[completion]'"
        print(f"error: --print-completion {needs}", file=sys.stderr)
        return 2
    print(shtab.complete(make_parser(run, others), shell))
    return 0
