"""Common options of studies and other commands on runs: model, data, output folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from lit_probattn.base.allowed_code import add_flag
from lit_probattn.base.arguments import add_data, at_least

SPLITS = ("val", "test")


def add_out(parser: argparse.ArgumentParser) -> None:
    """Add the output folder."""
    parser.add_argument("--out", type=Path, required=True, help="parent folder of the report")


def add_run(parser: argparse.ArgumentParser, *, config: bool = True) -> None:
    """Add the options of `training.trained.open_trained` other than the checkpoint.

    Args:
        config: whether to include the configuration.
    """
    add = parser.add_argument
    if config:
        text = "configuration; default: config.yaml of the run folder. Later files override earlier"
        add("--config", type=Path, action="append", help=f"{text} ones")
    add_data(parser)
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 …")
    add_flag(parser)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint, the options of `add_run`, and the output folder."""
    text = "checkpoint file, or run folder runs/NAME/VERSION"
    parser.add_argument("--checkpoint", type=Path, required=True, help=text)
    add_run(parser)
    add_out(parser)


def add_samples(parser: argparse.ArgumentParser, num_samples: int, max_len: int) -> None:
    """Add the options that select sequences, with the defaults of a study."""
    add = parser.add_argument
    add("--split", default="val", choices=SPLITS, help="split of the data")
    add("--num_samples", type=at_least(1), default=num_samples, help="samples")
    add("--batch_size", type=at_least(1), help="samples per batch; default: from the run")
    text = "truncate sequences to this length, 0 for no limit"
    add("--max_len", type=at_least(0), default=max_len, help=text)
    add("--seed", type=at_least(0), default=0, help="seed of the drawn samples")


def add_maps(parser: argparse.ArgumentParser) -> None:
    """Add the kind of maps."""
    text = "weights after the softmax, or scores before it"
    parser.add_argument("--maps", default="probs", choices=("probs", "logits"), help=text)
