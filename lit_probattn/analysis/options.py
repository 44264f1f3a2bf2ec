"""Flags of studies as data, and those that studies share: model, data, where results go."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lit_probattn.base.errors import ConfigError


class Flag:
    """One flag of a study.

    Args:
        name: without dashes.
        text: its help; the default is added.
        default: gives the type too. False makes a switch, a list takes several values.
        least: the smallest number accepted.
        more: further arguments of `ArgumentParser.add_argument`.
    """

    def __init__(
        self, name: str, text: str, default: Any = None, *, least: int | None = None, **more: Any
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

    def check(self, options: argparse.Namespace) -> None:
        """Raise ConfigError where a number is smaller than `least`."""
        given = getattr(options, self.name)
        if self.least is None or given is None:
            return
        smallest = min(given) if isinstance(given, list) else given
        if smallest < self.least:
            raise ConfigError(f"--{self.name} must be at least {self.least}, received {smallest}")


OUT = Flag("out", "folder of the results", type=Path, required=True)
SPLITS = ("val", "test")

MODEL = (
    Flag(
        "checkpoint",
        "a file in runs/NAME/VERSION/checkpoints, or runs/NAME/VERSION",
        type=Path,
        required=True,
    ),
    Flag(
        "config",
        "configuration; default: config.yaml of the run folder. Later files add to earlier ones",
        type=Path,
        action="append",
    ),
    Flag("data", "arguments of the DataModule", [], metavar="KEY=VALUE"),
    Flag("device", "auto, cpu, cuda, cuda:1 …", "auto"),
    OUT,
)


def samples(num_samples: int, max_len: int) -> tuple[Flag, ...]:
    """Return the flags that choose sequences, with the defaults of a study."""
    return (
        Flag("split", "split of the data", "val", choices=SPLITS),
        Flag("num_samples", "samples", num_samples, least=1),
        Flag("batch_size", "samples of a batch; default: the run's", type=int, least=1),
        Flag("max_len", "cut sequences to this many positions, 0 for none", max_len, least=0),
        Flag("seed", "decides which samples are drawn", 0, least=0),
    )
