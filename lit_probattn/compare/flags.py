"""Flags of the commands that run a table; parsed without PyTorch."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_probattn.base.allowed_code import add_flag
from lit_probattn.base.arguments import Parser, add_data, at_least
from lit_probattn.base.errors import ConfigError
from lit_probattn.cli.shards import add_shard_flags


@dataclass(frozen=True)
class Place:
    """Folders of data and results, and how commands are launched.

    Args:
        runs: folder of the runs; result files are below `<runs>/reproduce`.
        data_dir, cache_dir: folders of the data; None means their defaults.
        accelerator: Lightning's accelerator; None means that of the configuration.
        launch: launcher used instead of `python`, such as `torchrun --nproc-per-node 8`.
        flags: extra arguments that do not affect results, such as --data.init_args.num_workers 2.
    """

    runs: Path = Path("runs")
    data_dir: str | None = None
    cache_dir: str | None = None
    accelerator: str | None = None
    launch: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    # Hashes of the data files, by the identity of the data; computed once.
    hashes: dict[str, dict[str, str]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of all commands, by key."""
        found: dict[str, Any] = {
            "trainer.accelerator": self.accelerator,
            "trainer.devices": None if self.launch or self.accelerator is None else 1,
            "data.init_args.data_dir": self.data_dir,
            "data.init_args.cache_dir": self.cache_dir,
        }
        return {key: value for key, value in found.items() if value is not None}

    def flag_arguments(self) -> list[str]:
        """Flags of all commands."""
        return [*flags(self.settings), *self.flags]


def add_flags(
    parser: argparse.ArgumentParser,
    *,
    seeds: str = "those of the table",
    out: str | Path = "RUNS/reproduce/reports/TABLE",
    accelerator: str | None = "auto",
) -> None:
    """Add the flags of all commands that run a table.

    Args:
        parser: the command's parser.
        seeds: the default seeds, for the help text.
        out: default folder of the report; a string is only shown in the help text.
        accelerator: default accelerator; None means that of the configuration.
    """
    selection = parser.add_argument_group("runs")
    add_shard_flags(selection.add_argument)
    add = selection.add_argument
    add(
        "--only",
        nargs="+",
        default=[],
        help="names or patterns of tasks and rows, such as `mgk_*`",
    )
    add("--seeds", nargs="+", type=int, help=f"seeds (default: {seeds})")
    add("--attempts", type=at_least(1), default=2, help="number of attempts per run")
    add(
        "--tflops",
        type=float,
        help="with --dry-run: predict training times at this speed (TFLOP/s)",
    )
    add("--commands", action="store_true", help="with --dry-run: print the command of each run")
    add("--report", action="store_true", help="report the finished runs without training")
    protocol = parser.add_argument_group("changes of the protocol (flagged in the report)")
    add = protocol.add_argument
    add(
        "--steps",
        type=at_least(1),
        help="number of optimiser steps; warm-up and schedule are scaled",
    )
    add(
        "--set",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="settings of all runs, or TASK:KEY=VALUE for one task or a pattern such as `bert_*:`",
    )
    add_data(protocol)
    add(
        "--start_seed",
        type=int,
        help="start all runs from the pre-training of this seed (default: the seed of each run)",
    )
    where = parser.add_argument_group("where")
    add = where.add_argument
    add("--trainer", help="name or file of configs/trainer")
    text = "" if accelerator else " (default: that of the trainer file)"
    text = f"Lightning's accelerator: auto, cpu, gpu{text}"
    add("--accelerator", default=accelerator, help=text)
    add("--jobs", type=at_least(1), default=1, help="number of concurrent runs")
    add("--devices", default="", help="CUDA devices to distribute runs over, such as 0,1,2,3")
    add("--launch", default="", help="launcher instead of `python`, such as torchrun and its flags")
    add("--flags", default="", help="extra flags of all runs that do not affect results")
    add_flag(parser)
    add("--data_dir", help="folder of the data (or LIT_PROBATTN_DATA)")
    add("--cache_dir", help="folder of the caches (or LIT_PROBATTN_CACHE)")
    add("--runs", type=Path, default=Path("runs"), help="folder of the runs")
    given, text = (out, "") if isinstance(out, Path) else (None, f" (default: {out})")
    add("--out", type=Path, default=given, help=f"folder of the report{text}")
    _add_executor(parser)


def without_executor(arguments: Sequence[str]) -> list[str]:
    """Return a command's arguments without those that submit jobs."""
    parser = Parser(add_help=False)
    _add_executor(parser)
    return parser.parse_known_args(arguments)[1]


def _add_executor(parser: argparse.ArgumentParser) -> None:
    cluster = parser.add_argument_group("jobs with submitit")
    add = cluster.add_argument
    add(
        "--executor",
        choices=("here", "slurm", "local", "debug"),
        default="here",
        help="here: this process; slurm: an array job; local: processes on this machine; debug: "
        "all shards in this process, one after another",
    )
    add("--shards", type=at_least(1), default=1, help="number of jobs of the executor")
    add(
        "--slurm",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="parameters of submitit, such as partition=gpu timeout_min=720 gpus_per_node=1",
    )


def place_of(options: argparse.Namespace) -> Place:
    """Return the folders and launcher that the flags set.

    Raises:
        ConfigError: --launch or --flags has an unclosed quotation.
    """
    return Place(
        runs=options.runs,
        data_dir=options.data_dir,
        cache_dir=options.cache_dir,
        accelerator=options.accelerator,
        launch=_words("--launch", options.launch),
        flags=_words("--flags", options.flags),
    )


def _words(flag: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r}: {str(error).lower()}") from None


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Return `--key value` for each setting, with values as the command line parses them."""
    words: list[str] = []
    for key, value in settings.items():
        words += [f"--{key}", str(value) if isinstance(value, str | Path) else json.dumps(value)]
    return words
