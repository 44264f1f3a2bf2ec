"""Losses of one global batch in several layouts, which must be equal.

A layout is a number of processes and of accumulation steps. The global batch is fixed, so layouts
sum the same numbers in different orders. Each variant is trained from the same seed in every
layout; the table contains the largest relative difference of a step's loss to one process without
accumulation. Attention dropout and noise are enabled, since they are drawn per sample. Dropout by
torch's generator, which is drawn per rank, is disabled.

With `--precision 64-true`, rounding is a billion times finer, so differences due to rounding vanish
and an incorrect layout remains visible.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from lightning.pytorch.callbacks import Callback

from lit_probattn.base.arguments import at_least
from lit_probattn.base.config_files import named_files
from lit_probattn.base.errors import ChildError
from lit_probattn.cli.app import main as train
from lit_probattn.tasks.distributed import num_ranks, sum_over_ranks
from profiling.measure.processes import run_in_ranks
from profiling.study import Report, command

# No validation, no files.
QUIET = {
    **{"trainer.accelerator": "cpu", "trainer.limit_val_batches": 0, "trainer.logger": "false"},
    **dict.fromkeys(("trainer.enable_checkpointing", "trainer.enable_progress_bar"), "false"),
}
# Softmax; MGK with priors by gradient (A), M-step (B) and nearest component (C); MLK; FiSH with
# noise. `--variants all` adds all other files of configs/attention.
LEAST_STEPS = 5  # the recipe warms up for 4
REQUIRED = ("softmax", "mgk", "mgk_soft_e", "mgk_hard_e", "mlk", "fish")


@dataclass(frozen=True)
class Layout:
    """Division of a global batch into W processes and A accumulation steps."""

    processes: int
    accumulation: int = 1

    def __str__(self) -> str:
        processes = "1 process" if self.processes == 1 else f"{self.processes} processes"
        return processes + (f" x {self.accumulation} accumulated" if self.accumulation > 1 else "")


BASE = Layout(1)
LAYOUTS = (Layout(1, 4), Layout(2), Layout(2, 2), Layout(4))


class Recorder(Callback):
    """Collects values at every step and writes them to the .npy file `path` at the end."""

    def __init__(self, path: str) -> None:
        self.path, self.rows = path, list[Any]()

    def array(self) -> npt.NDArray[np.float64]:
        """Return the array to write; called in every process."""
        return np.asarray(self.rows)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the file."""
        found = self.array()
        if trainer.is_global_zero:
            np.save(self.path, found)


def fit_command(
    variant: str, processes: int, recorder: type[Recorder], path: Path, flags: Mapping[str, object]
) -> list[str]:
    """Return the command line of a run on the CPU that writes the array `path`.

    Data and run folder are next to it; several processes use DDP.
    """
    flags = {
        **QUIET,
        "trainer.devices": processes,
        **({"trainer.strategy": "ddp"} if processes > 1 else {}),
        "data.init_args.data_dir": path.parent / "data",
        "run.root": path.parent / "runs",
        **flags,
        "trainer.callbacks": f"{recorder.__module__}.{recorder.__name__}",
        "trainer.callbacks.path": path,
    }
    words = ["--task", "tiny/lra_listops", "--attention", variant]
    return ["fit", *words, *(w for name, v in flags.items() for w in (f"--{name}", str(v)))]


def train_in_ranks(commands: Sequence[list[str]], processes: int, log: Path) -> None:
    """Run training commands one after another in a process group; ChildError if one fails."""
    run_in_ranks(lambda: next(filter(None, map(train, commands)), 0), processes, log=log)


class StepLosses(Recorder):
    """Records the loss of every optimiser step, the mean over the global batch; shape (steps,)."""

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        """Collect the losses of the micro-batches of all ranks."""
        window: list[tuple[Any, Any, torch.Tensor]] = pl_module._window  # type: ignore[assignment]
        mean = torch.stack([loss.double() for _, _, loss in window]).mean()
        self.rows.append(float(sum_over_ranks(mean)) / num_ranks())


def fit_arguments(
    variant: str, layout: Layout, steps: int, precision: str, folder: Path
) -> list[str]:
    """Return the command line of a run with a global batch of 8."""
    flags = {
        "trainer.max_steps": steps,
        "model.init_args.schedule_steps": steps,
        "trainer.accumulate_grad_batches": layout.accumulation,
        "trainer.precision": precision,
        "model.init_args.dropout": 0.0,
        "model.init_args.attention.init_args.dropout": 0.1,
    }
    return fit_command(variant, layout.processes, StepLosses, folder / f"{variant}.npy", flags)


def losses_of(
    variants: Sequence[str], layout: Layout, steps: int, precision: str, folder: Path
) -> dict[str, npt.NDArray[np.float64]]:
    """Train all variants in one layout; return losses (steps,), or raise a ChildError."""
    commands = [fit_arguments(variant, layout, steps, precision, folder) for variant in variants]
    train_in_ranks(commands, layout.processes, folder / "log.txt")
    found = {variant: np.load(folder / f"{variant}.npy") for variant in variants}
    for variant, losses in found.items():
        if len(losses) != steps:
            raise ChildError(f"{variant}: expected {steps} losses, received {len(losses)}")
    print(f"done: {layout}", file=sys.stderr, flush=True)
    return found


def largest_differences(
    variants: Sequence[str], layouts: Sequence[Layout], *, steps: int, precision: str = "32-true"
) -> pd.DataFrame:
    """Return `variant`, `layout` and the largest relative `difference` of a loss from BASE."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        base = losses_of(variants, BASE, steps, precision, Path(folder))
        for layout in layouts:
            found = losses_of(variants, layout, steps, precision, Path(folder))
            for variant, losses in found.items():
                difference = float((np.abs(losses - base[variant]) / base[variant]).max())
                rows.append({"variant": variant, "layout": layout, "difference": difference})
    return pd.DataFrame(rows)


def run(options: argparse.Namespace) -> Report:
    """Train all variants in all layouts."""
    variants, precision, steps = options.variants, options.precision, options.steps
    if variants == ["all"]:
        every = [name for name in named_files("attention") if "/" not in name]
        variants = list(dict.fromkeys([*REQUIRED, *every]))
    rows = largest_differences(variants, LAYOUTS, steps=steps, precision=precision)
    table = rows.pivot(index="variant", columns="layout", values="difference")
    table = table.loc[variants, list(LAYOUTS)].map("{:.1e}".format).reset_index()
    caption = (
        f"Largest relative difference of a step's loss to 1 process over {steps} steps, "
        f"{precision}, global batch 8, attention dropout 0.1"
    )
    figure = ("variant", "difference", "layout")
    return Report("One global batch, several layouts", rows, {caption: table}, figure=figure)


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=at_least(LEAST_STEPS), default=50, help="optimiser steps")
    text = "precision of the trainer"
    add("--precision", default="32-true", choices=("32-true", "64-true"), help=text)
    text = "files of configs/attention without .yaml, or `all`"
    add("--variants", nargs="+", default=list(REQUIRED), help=text)


main = command(__name__, __doc__, run, _add_options)
