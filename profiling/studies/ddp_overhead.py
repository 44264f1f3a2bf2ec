"""`python -m profiling.ddp_overhead`: two processes beside one with the same global batch.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch.callbacks import Callback

from lit_probattn.cli.app import main as train
from lit_probattn.records.provenance import device_name, git_revision, versions
from lit_probattn.tasks.distributed import sum_over_ranks
from profiling.measure.processes import RanksError, run_in_ranks
from profiling.measure.timing import quantile

ROOT = Path(__file__).parents[2]
GLOBAL_BATCH, WARMUP = 16, 3
# Side: processes, samples of one optimiser step.
SIDES = {
    "1 process": (1, GLOBAL_BATCH),
    "1 process, half the batch": (1, GLOBAL_BATCH // 2),
    "2 processes": (2, GLOBAL_BATCH),
}


class StepTimes(Callback):
    """Writes the seconds of every optimiser step, without the first few, to a .npy file.

    Args:
        path: the file; shape (steps - warm-up, 2), on the wall and of all processors.
    """

    def __init__(self, path: str) -> None:
        self.path, self.marks = path, list[tuple[float, float]]()

    def on_train_batch_end(self, *args: Any) -> None:
        """Read the clocks."""
        self.marks.append((time.perf_counter(), time.process_time()))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the file."""
        times = np.diff(np.asarray(self.marks), axis=0)[WARMUP:]
        times[:, 1] = sum_over_ranks(torch.tensor(times[:, 1])).numpy()
        if trainer.is_global_zero:
            np.save(self.path, times)


def fit_arguments(side: str, variant: str, steps: int, folder: Path) -> list[str]:
    """Command line of one training: two layers of width 64 over 128 positions of ListOps."""
    processes, batch = SIDES[side]
    configs = ROOT / "configs"
    files = [configs / "tasks/tiny/lra_listops.yaml", configs / f"attention/{variant}.yaml"]
    sizes = {"embed_dim": 64, "head_dim": 32, "mlp_dim": 128, "schedule_steps": steps}
    data = {"min_length": 60, "max_length": 128, "max_length_tokens": 128, "pad_to": "max"}
    return [
        *("fit", *(word for file in files for word in ("--config", str(file)))),
        *("--trainer.accelerator", "cpu", "--trainer.devices", str(processes)),
        *(("--trainer.strategy", "ddp") if processes > 1 else ()),
        *("--trainer.max_steps", str(steps), "--trainer.val_check_interval", str(10 * steps)),
        *("--trainer.limit_val_batches", "0", "--trainer.logger", "false"),
        *("--trainer.enable_checkpointing", "false", "--trainer.enable_progress_bar", "false"),
        *(w for key, value in sizes.items() for w in (f"--model.init_args.{key}", str(value))),
        *(w for key, value in data.items() for w in (f"--data.init_args.{key}", str(value))),
        *("--data.init_args.batch_size", str(batch), "--data.init_args.data_dir", str(folder)),
        *("--run.root", str(folder / "runs")),
        *("--trainer.callbacks", "profiling.studies.ddp_overhead.StepTimes"),
        *("--trainer.callbacks.path", str(folder / "times.npy")),
    ]


def step_times(side: str, variant: str, steps: int, folder: Path) -> npt.NDArray[np.float64]:
    """Seconds of the steps of one training, without the first few; shape (steps - warm-up, 2).

    Raises:
        RanksError: the training failed.
    """
    command = fit_arguments(side, variant, steps, folder)
    run_in_ranks(lambda: train(command), SIDES[side][0], log=folder / "log.txt")
    times: npt.NDArray[np.float64] = np.load(folder / "times.npy")
    return times


def measure(variant: str, rounds: int, steps: int) -> dict[str, list[npt.NDArray[np.float64]]]:
    """Times of all sides, round by round; shape of each (steps - warm-up, 2)."""
    times: dict[str, list[npt.NDArray[np.float64]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for side in SIDES:
                times[side].append(step_times(side, variant, steps, Path(folder)))
    return times


def table_text(times: dict[str, list[npt.NDArray[np.float64]]]) -> str:
    """Markdown: the median step of each side, and the ratios with their spread over the rounds."""
    whole = {side: np.median(np.concatenate(rounds), axis=0) for side, rounds in times.items()}
    lines = ["| side | median step (ms) | processor time (ms) |", "| --- | --- | --- |"]
    lines += [
        f"| {side} | {1e3 * wall:.1f} | {1e3 * cpu:.1f} |" for side, (wall, cpu) in whole.items()
    ]
    lines += ["", "| ratio | median | 20 % to 80 % of the rounds |", "| --- | --- | --- |"]
    full, half, two = SIDES
    for name, other, clock in (
        ("2 processes / 1 process, same global batch: wall", full, 0),
        ("2 processes / 1 process with half the batch: wall (1 = no overhead)", half, 0),
        ("2 processes / 1 process, same global batch: processor time (1 = no overhead)", full, 1),
    ):
        pairs = zip(times[two], times[other], strict=True)
        ratios = [float(np.median(a[:, clock]) / np.median(b[:, clock])) for a, b in pairs]
        spread = f"{quantile(ratios, 0.2):.2f} to {quantile(ratios, 0.8):.2f}"
        lines.append(f"| {name} | {whole[two][clock] / whole[other][clock]:.2f} | {spread} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m profiling.ddp_overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--variants", nargs="+", default=["softmax", "mgk_soft_e"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=15, help="optimiser steps of one round")
    options = parser.parse_args(arguments)
    load = os.getloadavg()[0]
    print(f"{device_name('cpu')}; {versions()}; revision {git_revision()}")
    print(
        f"load average when it began: {load:.1f}; {options.rounds} rounds of {options.steps} steps"
    )
    for variant in options.variants:
        try:
            times = measure(variant, options.rounds, options.steps)
        except RanksError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print(f"\n{variant}\n\n{table_text(times)}", flush=True)
    print(f"\nload average at the end: {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
