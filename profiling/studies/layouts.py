"""`python -m profiling.layouts`: one global batch, several layouts, the same losses.

A layout is a number of processes and of accumulation steps. The global batch is fixed, so each
layout sums the same numbers in another order. Each variant is trained from the same seed in every
layout; the table gives the largest difference of a step's loss to the layout of one process without
accumulation, relative to that loss. Attention dropout and noise are on: they are drawn by sample.
Dropout of torch's generator, which is drawn by rank, is off.

With `--precision 64-true` the same table shows what is left when rounding is a billion times finer:
a layout that computed something else would not shrink.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch.callbacks import Callback

from lit_probattn.cli.app import main as train
from lit_probattn.records.provenance import device_name, git_revision, versions
from lit_probattn.tasks.distributed import num_ranks, sum_over_ranks
from profiling.measure.processes import RanksError, run_in_ranks

ROOT = Path(__file__).parents[2]
# Softmax; MGK with priors by gradient (A), M-step (B) and nearest component (C); MLK; FiSH with
# noise. `--variants all` adds every other file of configs/attention.
REQUIRED = ("softmax", "mgk", "mgk_soft_e", "mgk_hard_e", "mlk", "fish")


@dataclass(frozen=True)
class Layout:
    """How a global batch is spread: W processes and A accumulation steps."""

    processes: int
    accumulation: int = 1

    def __str__(self) -> str:
        more = f" x {self.accumulation} accumulated" if self.accumulation > 1 else ""
        return f"{self.processes} process{'es' if self.processes > 1 else ''}{more}"


BASE = Layout(1)
LAYOUTS = (Layout(1, 4), Layout(2), Layout(2, 2), Layout(4))


class StepLosses(Callback):
    """Writes the loss of every optimiser step, the mean over the global batch, to a .npy file.

    Args:
        path: the file; float64, shape (steps,).
    """

    def __init__(self, path: str) -> None:
        self.path, self.losses = path, list[float]()

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        """Collect the losses of the micro-batches of all ranks."""
        window: list[tuple[Any, Any, torch.Tensor]] = pl_module._window  # type: ignore[assignment]
        mean = torch.stack([loss.double() for _, _, loss in window]).mean()
        self.losses.append(float(sum_over_ranks(mean)) / num_ranks())

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the file."""
        if trainer.is_global_zero:
            np.save(self.path, np.asarray(self.losses))


def fit_arguments(
    variant: str, layout: Layout, steps: int, precision: str, folder: Path
) -> list[str]:
    """Command line of one training of tiny ListOps, with a global batch of 8."""
    configs = ROOT / "configs"
    files = [configs / "tasks/tiny/lra_listops.yaml", configs / f"attention/{variant}.yaml"]
    strategy = ["--trainer.strategy", "ddp"] if layout.processes > 1 else []
    callback = "profiling.studies.layouts.StepLosses"
    return [
        *("fit", *(word for file in files for word in ("--config", str(file)))),
        *("--trainer.accelerator", "cpu", "--trainer.devices", str(layout.processes), *strategy),
        *("--trainer.accumulate_grad_batches", str(layout.accumulation)),
        *("--trainer.max_steps", str(steps), "--model.init_args.schedule_steps", str(steps)),
        *("--trainer.val_check_interval", str(10 * steps * layout.accumulation)),
        *("--trainer.limit_val_batches", "0", "--trainer.logger", "false"),
        *("--trainer.enable_checkpointing", "false", "--trainer.enable_progress_bar", "false"),
        *("--trainer.precision", precision, "--model.init_args.dropout", "0.0"),
        *("--model.init_args.attention.init_args.dropout", "0.1"),
        *("--data.init_args.data_dir", str(folder / "data"), "--run.root", str(folder / "runs")),
        *("--trainer.callbacks", callback),
        *("--trainer.callbacks.path", str(folder / f"{variant}.npy")),
    ]


def losses_of(
    variants: Sequence[str], layout: Layout, steps: int, precision: str, folder: Path
) -> dict[str, npt.NDArray[np.float64]]:
    """Train every variant in one layout; returns the loss of each step, shape (steps,).

    Raises:
        RanksError: a training failed.
    """

    def work() -> int:
        for variant in variants:
            status = train(fit_arguments(variant, layout, steps, precision, folder))
            if status:
                return status
        return 0

    run_in_ranks(work, layout.processes, log=folder / "log.txt")
    return {variant: np.load(folder / f"{variant}.npy") for variant in variants}


def largest_differences(
    variants: Sequence[str],
    layouts: Sequence[Layout],
    *,
    steps: int,
    precision: str = "32-true",
    say: Any = None,
) -> dict[str, dict[Layout, float]]:
    """Largest relative difference of a step's loss to one process, by variant and layout.

    Args:
        variants: names of files of configs/attention.
        layouts: compared with one process without accumulation.
        steps: optimiser steps.
        precision: `32-true` or `64-true`.
        say: gets a line when a layout is done.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = losses_of(variants, BASE, steps, precision, folder)
        table: dict[str, dict[Layout, float]] = {variant: {} for variant in variants}
        for layout in layouts:
            found = losses_of(variants, layout, steps, precision, folder)
            for variant, losses in found.items():
                if not len(losses) == len(base[variant]) == steps:
                    raise RanksError(f"{variant}: {len(losses)} losses, expected {steps}")
                difference = np.abs(losses - base[variant]) / base[variant]
                table[variant][layout] = float(difference.max())
            if say is not None:
                say(f"done: {layout}")
    return table


def table_text(table: dict[str, dict[Layout, float]], steps: int, precision: str) -> str:
    """Markdown table with a line that says what it shows."""
    layouts = list(next(iter(table.values())))
    lines = [
        f"Largest relative difference of a step's loss to 1 process over {steps} steps, "
        f"{precision}, global batch 8, attention dropout 0.1.",
        "",
        f"| variant | {' | '.join(map(str, layouts))} |",
        f"| --- | {' | '.join('---' for _ in layouts)} |",
    ]
    for variant, values in table.items():
        cells = " | ".join(f"{values[layout]:.1e}" for layout in layouts)
        lines.append(f"| {variant} | {cells} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m profiling.layouts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=50, help="optimiser steps (default 50)")
    parser.add_argument("--precision", choices=("32-true", "64-true"), default="32-true")
    parser.add_argument(
        "--variants",
        nargs="+",
        default=list(REQUIRED),
        help="files of configs/attention without .yaml, or `all`",
    )
    options = parser.parse_args(arguments)
    variants = options.variants
    if variants == ["all"]:
        others = sorted(path.stem for path in (ROOT / "configs/attention").glob("*.yaml"))
        variants = [*REQUIRED, *(name for name in others if name not in REQUIRED)]
    try:
        table = largest_differences(
            variants,
            LAYOUTS,
            steps=options.steps,
            precision=options.precision,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
    except RanksError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{device_name('cpu')}; {versions()}; revision {git_revision()}\n")
    print(table_text(table, options.steps, options.precision))
    return 0


if __name__ == "__main__":
    sys.exit(main())
