"""Sharding a list of points among processes: flags and shards."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from lit_probattn.base.errors import ConfigError


def add_shard_flags(add: Callable[..., object]) -> None:
    """Add the flags shared by commands that run a list of points.

    Args:
        add: `add_argument` of a parser or argument group.
    """
    add("--shard", help="i/n with i from 0: run the i-th of n shares, for array jobs")
    add("--dry-run", action="store_true", help="print the runs and their predicted cost")


def shard_of(options: argparse.Namespace) -> tuple[int, int]:
    """Return (index, count) from the flags, or this process's shard under torchrun.

    Raises:
        ConfigError: malformed.
    """
    return parse_shard(options.shard) if options.shard else torchrun_shard()


def parse_shard(text: str) -> tuple[int, int]:
    """Return (index, count) of `i/n`, i from 0 to n − 1.

    Raises:
        ConfigError: malformed, or i out of range.
    """
    try:
        index, count = (int(part) for part in text.split("/"))
    except ValueError as error:
        raise ConfigError(f"--shard: expected i/n, such as 0/4, received {text!r}") from error
    if not 0 <= index < count:
        raise ConfigError(f"--shard: expected 0 <= i < n, received {text!r}")
    return index, count


def torchrun_shard() -> tuple[int, int]:
    """Return (rank, world size) under torchrun, else (0, 1)."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
