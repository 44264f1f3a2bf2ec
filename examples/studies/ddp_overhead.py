"""Overhead of DDP: two processes compared with one at the same global batch.

Three sides run in turns on the same machine: one process; one process with half the batch, the work
of each of two processes; two processes with DDP over gloo. Each process has one thread. One round
trains each side for a few steps. The time of a side is the median over the steps of all rounds; the
spread is given by the 20 % and 80 % quantiles of the rounds' ratios. The table also contains the
processor time of all processes of a side, which is less sensitive to other load and excludes
waiting for the other process.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from examples.studies.layouts import Recorder, fit_command, train_in_ranks
from lit_probattn.base.arguments import at_least
from lit_probattn.measure.timing import round_ratios, spread
from lit_probattn.tasks.distributed import sum_over_ranks
from profiling.study import Report, command, shown

GLOBAL_BATCH, WARMUP = 16, 3
# Side: number of processes, samples per optimiser step.
SIDES = {
    "1 process": (1, GLOBAL_BATCH),
    "1 process, half the batch": (1, GLOBAL_BATCH // 2),
    "2 processes": (2, GLOBAL_BATCH),
}
ONE, HALF, TWO = SIDES
# Ratios of 2 processes: the baseline and the clock.
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
    """Records wall time and processor time of every step except the first few."""

    def on_train_batch_end(self, *args: Any) -> None:
        """Read the clocks."""
        self.rows.append((time.perf_counter(), time.process_time()))

    def array(self) -> npt.NDArray[np.float64]:
        """Return the seconds, (steps - warm-up, 2)."""
        times = np.diff(super().array(), axis=0)[WARMUP:]
        times[:, 1] = sum_over_ranks(torch.tensor(times[:, 1])).numpy()
        return times


def fit_arguments(side: str, variant: str, steps: int, folder: Path) -> list[str]:
    """Return the command line of a run."""
    processes, batch = SIDES[side]
    counts = {"trainer.max_steps": steps, "model.init_args.schedule_steps": steps}
    flags = {**counts, "data.init_args.batch_size": batch, **SIZES}
    return fit_command(variant, processes, StepTimes, folder / "times.npy", flags)


def measure(variant: str, options: argparse.Namespace) -> Times:
    """Train the sides in turns and return their step times."""
    times: Times = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for side in [*SIDES] * options.rounds:
            command = fit_arguments(side, variant, options.steps, folder)
            train_in_ranks([command], SIDES[side][0], folder / "log.txt")
            times[side].append(np.load(folder / "times.npy"))
    return times


def step_rows(variant: str, times: Times) -> list[dict[str, Any]]:
    """Return the median step of each side on both clocks, in ms."""
    medians = {side: 1e3 * np.median(np.concatenate(times[side]), axis=0) for side in SIDES}
    return [
        {"variant": variant, "side": s, "median step, ms": wall, "processor time, ms": processors}
        for s, (wall, processors) in medians.items()
    ]


def ratio_rows(variant: str, times: Times) -> list[dict[str, Any]]:
    """Return the ratios of the medians, with the quantiles of the rounds' ratios."""
    rows = []
    for name, (other, clock) in RATIOS.items():
        clocks = [[seconds[:, clock] for seconds in times[side]] for side in (TWO, other)]
        rounds = round_ratios(*([float(np.median(part)) for part in side] for side in clocks))
        two, one = (float(np.median(np.concatenate(side))) for side in clocks)
        row = {"variant": variant, "clock": name, **spread("time_over_one", rounds)}
        rows.append({**row, "time_over_one": two / one})
    return rows


def run(options: argparse.Namespace) -> Report:
    """Measure every variant."""
    load, steps, ratios = os.getloadavg()[0], [], []
    for variant in options.variants:
        times = measure(variant, options)
        steps += step_rows(variant, times)
        ratios += ratio_rows(variant, times)
    rows = pd.DataFrame(ratios)
    caption = "2 processes / 1 process, with quantiles over the rounds"
    return Report(
        "Overhead of a second process",
        rows,
        {"Median step": pd.DataFrame(steps), caption: shown(rows, "variant", "clock")},
        [
            f"{options.rounds} rounds of {options.steps} steps; load average {load:.1f} before "
            f"and {os.getloadavg()[0]:.1f} after"
        ],
        ("variant", "time_over_one", "clock"),
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "files of configs/attention"
    add("--variants", nargs="+", default=["softmax", "mgk_soft_e"], help=text)
    add("--rounds", type=at_least(1), default=7, help="rounds of all sides")
    add("--steps", type=at_least(WARMUP + 2), default=15, help="optimiser steps of one round")


main = command(__name__, __doc__, run, _add_options)
