"""Common flags of studies: model, data, output folder."""

from __future__ import annotations

from pathlib import Path

from lit_probattn.base.arguments import DataFlag, Flag

OUT = Flag("out", "folder of the results", type=Path, required=True)
SPLITS = ("val", "test")

MODEL = (
    Flag(
        "checkpoint",
        "checkpoint file, or run folder runs/NAME/VERSION",
        type=Path,
        required=True,
    ),
    Flag(
        "config",
        "configuration; default: config.yaml of the run folder. Later files override earlier ones",
        type=Path,
        action="append",
    ),
    DataFlag(),
    Flag("device", "auto, cpu, cuda, cuda:1 …", "auto"),
    OUT,
)


def samples(num_samples: int, max_len: int) -> tuple[Flag, ...]:
    """Return the flags that select sequences, with the defaults of a study."""
    return (
        Flag("split", "split of the data", "val", choices=SPLITS),
        Flag("num_samples", "samples", num_samples, least=1),
        Flag("batch_size", "samples per batch; default: that of the run", type=int, least=1),
        Flag("max_len", "truncate sequences to this length, 0 for no limit", max_len, least=0),
        Flag("seed", "seed of the drawn samples", 0, least=0),
    )
