"""The parser of every command, and flags as data."""

from __future__ import annotations

import argparse
from typing import Any

from lit_probattn.base.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """A command's parser: flags are written out, and its description keeps its lines.

    Args:
        prog: the command.
        description: what it does.
        more: further arguments of `argparse.ArgumentParser`.
    """

    def __init__(self, prog: str | None = None, description: str | None = None, **more: Any):
        own: dict[str, Any] = {"allow_abbrev": False}
        own["formatter_class"] = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=description, **own | more)


class Flag:
    """One flag of a command.

    Args:
        name: without dashes.
        text: its help; the default is added.
        default: gives the type too. False makes a switch, a list takes several values.
        least: the smallest number accepted.
        more: further arguments of `ArgumentParser.add_argument`.
    """

    def __init__(
        self, name: str, text: str, default: Any = None, *, least: float | None = None, **more: Any
    ) -> None:
        self.name, self.least, self.arguments = name, least, more
        if default is False:
            more["action"] = "store_true"
        elif default is not None:
            values = default if isinstance(default, list) else [default]
            kind = type(values[0]) if values else str
            nargs = {"nargs": "+"} if isinstance(default, list) else {}
            self.arguments = {"type": kind, "default": default, **nargs, **more}
            shown = " ".join(map(str, values))
            text += f"; default: {shown}" if shown else ""
        self.arguments["help"] = text

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add the flag to a parser."""
        parser.add_argument(f"--{self.name}", **self.arguments)

    def check(self, options: argparse.Namespace, parser: Parser | None = None) -> None:
        """Refuse numbers smaller than `least`: end as the parser does, or raise a ConfigError."""
        given = getattr(options, self.name)
        if self.least is None or given is None:
            return
        smallest = min(given) if isinstance(given, list) else given
        if smallest < self.least:
            text = f"--{self.name} must be at least {self.least}, received {smallest}"
            if parser is None:
                raise ConfigError(text)
            parser.error(text)
