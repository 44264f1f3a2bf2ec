"""Flags that studies share: the trained model, its data, where results go."""

from __future__ import annotations

import argparse
from pathlib import Path

# ---- opening ------------------------------------------------------------------------------------


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name a trained model and where its results go."""
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="a file of runs/NAME/VERSION/checkpoints")
    add(
        "--config",
        type=Path,
        action="append",
        help="configuration; default: config.yaml of the run folder. Later files add to earlier",
    )
    add("--data", nargs="+", default=[], metavar="KEY=VALUE", help="arguments of the DataModule")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1 …")
    add("--out", type=Path, required=True, help="folder of the results")


def add_data_arguments(parser: argparse.ArgumentParser, num_samples: int, max_len: int) -> None:
    """Add the flags that choose sequences."""
    add = parser.add_argument
    add("--split", choices=("val", "test"), default="val", help="default: val")
    add("--num_samples", type=int, default=num_samples, help=f"samples; default {num_samples}")
    add("--batch_size", type=int, help="samples of a batch; default: the run's")
    add(
        "--max_len",
        type=int,
        default=max_len,
        help=f"cut sequences to this many positions, 0 for none; default {max_len}",
    )
    add("--seed", type=int, default=0, help="decides which samples; default 0")
