"""Flags of commands that generate text from a run: checkpoint, search, sampling."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from lit_probattn.base.arguments import at_least, without_effect
from lit_probattn.base.errors import ConfigError


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument for the run."""
    parser.add_argument("checkpoint", type=Path, help="a run folder, runs/NAME/0, or a checkpoint")


def add_search(parser: argparse.ArgumentParser, *, n_best: bool) -> None:
    """Add the settings of a beam search, which `set_search` reads.

    Args:
        n_best: whether to include the number of translations.
    """
    add = parser.add_argument
    add("--beam_size", type=int, help="number of beams; 1 is greedy")
    add("--length_penalty", type=float, help="exponent of the length that divides scores")
    if n_best:
        add("--n_best", type=int, help="number of translations per line (default 1)")
    add("--temperature", type=float, help="sample tokens instead of searching; divides the logits")


def add_draw(parser: argparse.ArgumentParser) -> None:
    """Add the sampling settings and the seed; each command adds its temperature."""
    add = parser.add_argument
    add("--top_k", type=int, help="sample among the k likeliest tokens (default: all)")
    add("--top_p", type=float, help="sample among the fewest tokens with this total probability")
    add("--seed", type=at_least(0), default=0, help="seed of the draws")


def check_table(out: Path) -> None:
    """Raise if a table cannot be written to a path.

    Raises:
        ConfigError: another suffix, an existing file, or a parent that is a file.
    """
    if out.suffix != ".parquet":
        raise ConfigError(f"--out must end in .parquet, received {out}")
    if out.exists():
        raise ConfigError(f"--out {out} exists: choose another file, or remove it")
    blocked = next((p for p in out.parents if p.exists() and not p.is_dir()), None)
    if blocked is not None:
        raise ConfigError(f"--out {out}: {blocked} is a file, not a folder")


def sampling_of(options: argparse.Namespace) -> Any:
    """Return the `Sampling` of the flags; without `--temperature`, the likeliest token.

    Raises:
        ConfigError: a value is out of range, or a flag has no effect without `--temperature`.
    """
    from lit_probattn.models.decoding import Sampling

    top_k, top_p = (getattr(options, name, None) for name in ("top_k", "top_p"))
    sampling = Sampling(options.temperature or 0.0, top_k, top_p, seed=options.seed)
    for told in without_effect(sampling).values():
        raise ConfigError(f"--{told}: remove it, or set --temperature")
    return sampling


def set_search(task: Any, options: argparse.Namespace) -> None:
    """Override the run's settings by the flags that are set.

    Raises:
        ConfigError: a value is out of range.
    """
    names = {"size": "beam_size", **{f.name: f.name for f in fields(task.beam) if f.name != "size"}}
    given = {field: getattr(options, name, None) for field, name in names.items()}
    try:
        task.beam = replace(task.beam, **{k: v for k, v in given.items() if v is not None})
    except ValueError as error:
        text = str(error)
        raise ConfigError(f"--{'beam_' if text.startswith('size ') else ''}{text}") from error
    task.sampling = sampling_of(options)
