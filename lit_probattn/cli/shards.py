"""`--shard I/N`: which part of a list of points a process works on."""

from __future__ import annotations

import os

from lit_probattn.configs import ConfigError


def parse_shard(text: str) -> tuple[int, int]:
    """Return (index, count) of `i/n`, i from 0 to n − 1.

    Raises:
        ConfigError: another form, or i out of range.
    """
    try:
        index, count = (int(part) for part in text.split("/"))
    except ValueError as error:
        raise ConfigError(f"--shard expects i/n, such as 0/4, received {text!r}") from error
    if not 0 <= index < count:
        raise ConfigError(f"--shard expects 0 <= i < n, received {text!r}")
    return index, count


def torchrun_shard() -> tuple[int, int]:
    """Return (rank, world size) under torchrun, else (0, 1)."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
