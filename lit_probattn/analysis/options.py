"""Flags that studies share: model, data, where results go."""

from __future__ import annotations

from pathlib import Path

from lit_probattn.base.arguments import DataFlag, Flag

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
    DataFlag(),
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
