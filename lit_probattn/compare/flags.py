"""Flags of the commands that run a table's cells, and what they say; parsed without PyTorch."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_probattn.base.allowed_code import add_flag
from lit_probattn.cli.shards import add_shard_flags


@dataclass(frozen=True)
class Place:
    """Where data lie and results go, and how commands are started.

    Args:
        runs: folder of the runs; result files are below `<runs>/reproduce`.
        data_dir, cache_dir: folders of the data; None for their defaults.
        accelerator: Lightning's name of the hardware; None leaves it to the configuration.
        launch: words in place of `python`, such as `torchrun --nproc-per-node 8`.
        flags: further arguments that decide no number, such as --data.init_args.num_workers 2.
    """

    runs: Path = Path("runs")
    data_dir: str | None = None
    cache_dir: str | None = None
    accelerator: str | None = None
    launch: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    # Hashes of the data's files, by what identifies the data; read once.
    hashes: dict[str, dict[str, str]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of every command, by key."""
        found: dict[str, Any] = {
            "trainer.accelerator": self.accelerator,
            "trainer.devices": None if self.launch or self.accelerator is None else 1,
            "data.init_args.data_dir": self.data_dir,
            "data.init_args.cache_dir": self.cache_dir,
        }
        return {key: value for key, value in found.items() if value is not None}

    def flag_arguments(self) -> list[str]:
        """Flags of every command."""
        return [*flags(self.settings), *self.flags]


def add_flags(
    parser: argparse.ArgumentParser,
    *,
    out: str | Path = "RUNS/reproduce/reports/TABLE",
    runs: Path = Path("runs"),
    accelerator: str | None = "auto",
) -> None:
    """Add the flags of every command that runs a table's cells.

    Args:
        parser: the command's parser.
        out: default folder of the report; a text only describes it.
        runs: default folder of the runs.
        accelerator: default hardware; None leaves it to the configuration.
    """
    cells = parser.add_argument_group("cells")
    add_shard_flags(cells.add_argument)
    add = cells.add_argument
    add("--only", nargs="+", default=[], help="names of tasks and rows, `mgk_*` for several")
    add("--seeds", nargs="+", type=int, help="default: the table's")
    add("--attempts", type=int, default=2, help="how often a cell that fails is tried (default 2)")
    add(
        "--tflops",
        type=float,
        help="with --dry-run: also the time of training at this rate, TFLOP/s",
    )
    add("--commands", action="store_true", help="with --dry-run: print the command of every cell")
    add("--report", action="store_true", help="train nothing, write what is finished")
    protocol = parser.add_argument_group("another protocol (flagged in the report)")
    add = protocol.add_argument
    add("--steps", type=int, help="optimiser steps; warm-up and schedule shrink with them")
    add(
        "--set",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="settings of all runs; TASK:KEY=VALUE of those of a task, `bert_*:` for several",
    )
    add(
        "--start_seed",
        type=int,
        help="runs of all seeds begin with the pre-training of this one (default: each its own)",
    )
    where = parser.add_argument_group("where")
    add = where.add_argument
    add("--trainer", help="name or file of configs/trainer")
    shown = "the trainer file's" if accelerator is None else accelerator
    add(
        "--accelerator",
        default=accelerator,
        help=f"Lightning's name: auto, cpu, gpu; default: {shown}",
    )
    add("--jobs", type=int, default=1, help="cells at a time")
    add("--devices", default="", help="CUDA devices of the jobs in turn, such as 0,1,2,3")
    add("--launch", default="", help="words in place of `python`, such as torchrun with its flags")
    add("--flags", default="", help="further flags of every run that decide no number")
    add_flag(parser)
    add("--data_dir", help="folder of the data (or LIT_PROBATTN_DATA)")
    add("--cache_dir", help="folder of the caches (or LIT_PROBATTN_CACHE)")
    add("--runs", type=Path, default=runs, help=f"folder of the runs (default {runs})")
    given = out if isinstance(out, Path) else None
    add("--out", type=Path, default=given, help=f"folder of the report (default {out})")
    cluster = parser.add_argument_group("jobs through submitit")
    add = cluster.add_argument
    add(
        "--executor",
        choices=("here", "slurm", "local", "debug"),
        default="here",
        help="here: this process; slurm: an array job; local: processes that submitit starts on "
        "this machine; debug: shards one after another in this process",
    )
    add("--shards", type=int, default=1, help="number of jobs of the executor")
    add(
        "--slurm",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="parameters of submitit: partition=gpu timeout_min=720 gpus_per_node=1 …",
    )


def place_of(options: argparse.Namespace) -> Place:
    """Return where the flags put data and results."""
    return Place(
        runs=options.runs,
        data_dir=options.data_dir,
        cache_dir=options.cache_dir,
        accelerator=options.accelerator,
        launch=tuple(shlex.split(options.launch)),
        flags=tuple(shlex.split(options.flags)),
    )


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Return `--key value` of every setting, values as the command line reads them."""
    words: list[str] = []
    for key, value in settings.items():
        words += [f"--{key}", str(value) if isinstance(value, str | Path) else json.dumps(value)]
    return words


def portable(arguments: Sequence[str]) -> list[str]:
    """Return arguments without the folders of this machine: absolute paths by their last part."""
    return [Path(a).name if os.path.isabs(a) else a for a in arguments]


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Return key and value of `key=value` texts; values are JSON where they can be.

    Raises:
        ValueError: no equals sign.
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set expects key=value, received {text!r}")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found
