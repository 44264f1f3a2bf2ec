"""Flags of commands that open a run to make text: the run, its search, its draws, their checks."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from lit_probattn.base.allowed_code import add_flag


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the run as the argument without a name."""
    parser.add_argument("checkpoint", type=Path, help="a run folder, runs/NAME/0, or a checkpoint")


def add_search(parser: argparse.ArgumentParser, *, sizes: bool = True) -> None:
    """Add what a beam search is told; `set_search` reads it.

    Args:
        sizes: also how long translations may be, and how many are wanted.
    """
    add = parser.add_argument
    add("--beam_size", type=int, help="translations that the search keeps; 1 is greedy")
    add("--length_penalty", type=float, help="exponent of the length that scores are divided by")
    if sizes:
        add("--max_length_a", type=float, help="at most a · source tokens + b tokens")
        add("--max_length_b", type=int, help="the b of it")
        add("--n_best", type=int, help="translations of every line (default 1)")
    add("--temperature", type=float, help="draw tokens instead of searching; divides the logits")


def add_draw(parser: argparse.ArgumentParser) -> None:
    """Add which tokens are drawn from, and the seed; the temperature is each command's own."""
    add = parser.add_argument
    add("--top_k", type=int, help="draw among the k likeliest tokens (default: all)")
    add("--top_p", type=float, help="draw among the likeliest that have this probability together")
    add("--seed", type=int, default=0, help="of the draw (default 0)")


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add what `training.trained.open_trained` is told beside the checkpoint."""
    add = parser.add_argument
    add("--config", type=Path, action="append", help="default: that of the run folder")
    add(
        "--data",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="argument of the data, such as data_dir=FOLDER; may be repeated",
    )
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 … (default auto)")
    add_flag(parser)


def check_least(options: argparse.Namespace, **least: int) -> None:
    """Refuse numbers that are too small; flags that are not given are left alone.

    Raises:
        ConfigError: a number is below its least value.
    """
    from lit_probattn.base.errors import ConfigError

    for name, smallest in least.items():
        value = getattr(options, name)
        if value is not None and value < smallest:
            raise ConfigError(f"--{name} must be at least {smallest}, received {value}")


def check_table(out: Path) -> None:
    """Refuse a place that no table can be written to.

    Raises:
        ConfigError: another ending, a file that exists, or a file in place of a folder.
    """
    from lit_probattn.base.errors import ConfigError

    if out.suffix != ".parquet":
        raise ConfigError(f"--out must end in .parquet, received {out}")
    if out.exists():
        raise ConfigError(f"--out {out} exists: name another file, or remove it")
    blocked = next((p for p in out.parents if p.exists() and not p.is_dir()), None)
    if blocked is not None:
        raise ConfigError(f"--out {out}: {blocked} is a file, not a folder")


def set_search(task: Any, options: argparse.Namespace) -> None:
    """Change what is given of the run's own settings; flags that a command has not are not given.

    Raises:
        ConfigError: a number is out of range.
    """
    from lit_probattn.base.errors import ConfigError
    from lit_probattn.models.decoding import Sampling

    names = {"size": "beam_size", **{f.name: f.name for f in fields(task.beam) if f.name != "size"}}
    given = {field: getattr(options, name, None) for field, name in names.items()}
    top_k, top_p = (getattr(options, name, None) for name in ("top_k", "top_p"))
    try:
        task.beam = replace(task.beam, **{k: v for k, v in given.items() if v is not None})
        task.sampling = Sampling(options.temperature or 0.0, top_k, top_p, seed=options.seed)
    except ValueError as error:
        text = str(error)
        raise ConfigError(f"--{'beam_' if text.startswith('size ') else ''}{text}") from error
