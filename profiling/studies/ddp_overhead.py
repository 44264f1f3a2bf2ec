"""Two processes beside one with the same global batch: what DDP costs.

Three sides take turns on the same machine: one process; one process with half of the batch, which
is the work of each of two processes; two processes with DDP over gloo. Every process computes with
one thread. One round trains each side for a few steps. A side's time is the median over the steps
of all rounds; the spread is that of the rounds' ratios (20 % and 80 % quantiles). Beside the time
on the wall stands the processor time of all processes of a side, which other work on the machine
hardly changes; it leaves out waiting for the other process.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from lit_probattn.tasks.distributed import sum_over_ranks
from profiling.measure.timing import round_ratios, spread
from profiling.studies.layouts import Recorder, fit_command, train_in_ranks
from profiling.studies.study import Report, command, flag, shown

GLOBAL_BATCH, WARMUP = 16, 3
# Side: processes, samples of one optimiser step.
SIDES = {
    "1 process": (1, GLOBAL_BATCH),
    "1 process, half the batch": (1, GLOBAL_BATCH // 2),
    "2 processes": (2, GLOBAL_BATCH),
}
ONE, HALF, TWO = SIDES
# What 2 processes are compared with, and on which clock.
RATIOS = {
    "same global batch: wall": (ONE, 0),
    "half the batch: wall (1 = no overhead)": (HALF, 0),
    "same global batch: processor time (1 = no overhead)": (ONE, 1),
}
# Two layers of width 64 over 128 positions.
SIZES = {
    **{"model.init_args.embed_dim": 64, "model.init_args.head_dim": 32},
    **{"model.init_args.mlp_dim": 128, "data.init_args.min_length": 60},
    **{"data.init_args.max_length": 128, "data.init_args.max_length_tokens": 128},
    "data.init_args.pad_to": "max",
}
Times = dict[str, list[npt.NDArray[np.float64]]]  # by side and round: (steps - warm-up, 2 clocks)


class StepTimes(Recorder):
    """Writes the seconds of every step but the first few, on the wall and of all processors."""

    def on_train_batch_end(self, *args: Any) -> None:
        """Read the clocks."""
        self.rows.append((time.perf_counter(), time.process_time()))

    def array(self) -> npt.NDArray[np.float64]:
        """Return the seconds, (steps - warm-up, 2)."""
        times = np.diff(super().array(), axis=0)[WARMUP:]
        times[:, 1] = sum_over_ranks(torch.tensor(times[:, 1])).numpy()
        return times


def fit_arguments(side: str, variant: str, steps: int, folder: Path) -> list[str]:
    """Return the command line of one training."""
    processes, batch = SIDES[side]
    counts = {"trainer.max_steps": steps, "model.init_args.schedule_steps": steps}
    flags = {**counts, "data.init_args.batch_size": batch, **SIZES}
    return fit_command(variant, processes, StepTimes, folder / "times.npy", flags)


def measure(variant: str, options: argparse.Namespace) -> Times:
    """Train the sides in turns and return the times of their steps."""
    times: Times = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for side in [*SIDES] * options.rounds:
            command = fit_arguments(side, variant, options.steps, folder)
            train_in_ranks([command], SIDES[side][0], folder / "log.txt")
            times[side].append(np.load(folder / "times.npy"))
    return times


def tables(times: Times) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the median step of each side in ms, and the ratios with their spread over rounds."""
    whole = {side: np.median(np.concatenate(rounds), axis=0) for side, rounds in times.items()}
    names = ("median step, ms", "processor time, ms")
    steps = [{"side": s, **dict(zip(names, 1e3 * whole[s], strict=True))} for s in times]
    ratios = []
    for name, (other, clock) in RATIOS.items():
        rounds = ([float(np.median(r[:, clock])) for r in times[side]] for side in (TWO, other))
        row = {"clock": name, **spread("time_over_one", round_ratios(*rounds))}
        ratios.append({**row, "time_over_one": whole[TWO][clock] / whole[other][clock]})
    return pd.DataFrame(steps), pd.DataFrame(ratios)


def run(options: argparse.Namespace) -> Report:
    """Measure every variant."""
    load = os.getloadavg()[0]
    found = {variant: tables(measure(variant, options)) for variant in options.variants}
    steps, ratios = (
        pd.concat({v: both[i] for v, both in found.items()}, names=["variant"])
        .reset_index("variant")
        .reset_index(drop=True)
        for i in range(2)
    )
    caption = "2 processes / 1 process, with quantiles over the rounds"
    return Report(
        "What a second process costs",
        ratios,
        {"Median step": steps, caption: shown(ratios, "variant", "clock")},
        [
            f"{options.rounds} rounds of {options.steps} steps; load average {load:.1f} at the "
            f"beginning, {os.getloadavg()[0]:.1f} at the end"
        ],
        ("variant", "time_over_one", "clock"),
    )


main = command(
    "ddp_overhead",
    __doc__,
    run,
    {
        "variants": flag(["softmax", "mgk_soft_e"], "files of configs/attention"),
        "rounds": flag(7, "rounds of all sides", least=1),
        "steps": flag(15, "optimiser steps of one round", least=WARMUP + 2),
    },
)

if __name__ == "__main__":
    sys.exit(main())
