"""A training run with the fused kernels beside the same run with the reference, loss by loss."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from profiling.builders import ConfigError

TASK = "configs/tasks/lra_listops_tiny.yaml"
ATTENTION = tuple(f"configs/attention/{name}.yaml" for name in ("mgk", "smgk", "fish", "mlk"))
# Gap between the losses of a step, in float32: rounding, amplified by a few steps of training.
BOUND = 1e-4


def losses(attention: str, backend: str, steps: int, device: str, folder: Path) -> list[float]:
    """Return the training loss of every step of a run of the command line.

    Raises:
        ConfigError: the run failed; the message ends with its last line.
    """
    accelerator = "gpu" if device == "cuda" else "cpu"
    command = [
        *(sys.executable, "-m", "lit_probattn", "fit", "--config", TASK, "--config", attention),
        *("--model.init_args.attention.init_args.backend", backend),
        *("--trainer.accelerator", accelerator, "--trainer.devices", "1"),
        *("--trainer.max_steps", str(steps), "--trainer.val_check_interval", str(steps)),
        *("--trainer.log_every_n_steps", "1", "--trainer.limit_val_batches", "1"),
        *("--run.root", str(folder), "--run.name", f"{Path(attention).stem}-{backend}"),
    ]
    environment = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "1"}
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise ConfigError(f"the run with backend {backend} failed: {' '.join(last)}")
    (path,) = folder.glob(f"{Path(attention).stem}-{backend}/*/metrics.csv")
    with path.open(encoding="utf-8") as file:
        return [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]


def compare_training(
    steps: int, device: str, attention: Sequence[str] = ATTENTION
) -> tuple[list[dict[str, object]], bool]:
    """Train with both backends; return a line per step and whether all gaps are within the bound.

    Args:
        steps: optimiser steps.
        device: `cuda`, or `cpu` for Triton's interpreter.
        attention: attention files.
    """
    lines: list[dict[str, object]] = []
    followed = True
    for path in attention:
        with tempfile.TemporaryDirectory() as folder:
            found = losses(path, "triton", steps, device, Path(folder))
            expected = losses(path, "reference", steps, device, Path(folder))
        followed &= len(found) == len(expected) == steps
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True), 1):
            gap = abs(ours - theirs)
            followed &= gap <= BOUND * max(1.0, theirs)
            if step <= 5 or step % 20 == 0 or step == steps:
                lines.append(
                    {
                        "attention": Path(path).stem,
                        "step": step,
                        "loss, triton": f"{ours:.6f}",
                        "loss, reference": f"{theirs:.6f}",
                        "gap": f"{gap:.1e}",
                    }
                )
    return lines, followed
