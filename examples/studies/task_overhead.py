"""Overhead of `fit`: a training step of the Trainer compared with a plain PyTorch loop.

After each step of the Trainer, a copy of the model is trained on the same batch by a plain loop:
forward, cross-entropy, backward, a step of the same optimizer. The sides alternate, so other load
affects both; their first losses must be equal. The Trainer's time includes the data loader, the
task and the hooks of Lightning, without validation, checkpoints and loggers. Ratios are medians
over the steps, with 20 % and 80 % quantiles.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

from examples.studies.layouts import Recorder, fit_command, train_in_ranks
from lit_probattn.base.arguments import at_least
from lit_probattn.measure.timing import round_ratios, spread
from lit_probattn.randomness import RandomKey
from profiling.study import Report, command, shown

WARMUP = 3


class BothLoops(Recorder):
    """Records the seconds of every step of the Trainer, and of a plain loop on its batch."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Copy the model and its optimizer."""
        module: Any = pl_module
        optimizer = trainer.optimizers[0]
        self.model = copy.deepcopy(module.model)
        options = {k: v for k, v in optimizer.defaults.items() if k in ("lr", "betas", "eps")}
        self.optimizer = type(optimizer)(self.model.parameters(), **options)
        self.start = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        """Time a plain step on the same batch, with the same draws."""
        batch, step = args[0], trainer.global_step - 1  # of the step that has ended
        key = RandomKey(pl_module.seed, step, batch["sample_ids"])
        begin = time.perf_counter()
        logits = self.model(batch["inputs"], key_mask=batch["key_mask"], rng=key)
        loss = F.cross_entropy(logits, batch["target"])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        end = time.perf_counter()
        if not self.rows and not torch.allclose(loss, outputs["loss"], rtol=1e-4):
            raise RuntimeError(f"first loss: {outputs['loss']} by fit, {loss} by the plain loop")
        self.rows.append((begin - self.start, end - begin))
        self.start = time.perf_counter()


def measure(variant: str, length: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train a variant with sequences of one length; return its row."""
    sizes = {f"data.init_args.{name}": length for name in ("max_length", "max_length_tokens")}
    flags = {
        **sizes,
        **{"model.init_args.embed_dim": 64, "model.init_args.head_dim": 32},
        **{"model.init_args.mlp_dim": 128, "data.init_args.pad_to": "max"},
        "model.init_args.dropout": 0.0,  # drawn by the generator, so the losses would differ
        "data.init_args.min_length": length // 2,
        "data.init_args.batch_size": options.batch,
        "trainer.max_steps": options.steps,
        "model.init_args.schedule_steps": options.steps,
    }
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "times.npy"
        train_in_ranks([fit_command(variant, 1, BothLoops, path, flags)], 1, path.parent / "log")
        trainer, plain = np.load(path)[WARMUP:].T
    ratios = round_ratios(trainer.tolist(), plain.tolist())
    row = {"variant": variant, "tokens": length, "batch": options.batch}
    row["time_median_s"] = float(np.median(trainer))
    return {**row, **spread("time_over_plain", ratios)}


def run(options: argparse.Namespace) -> Report:
    """Measure every variant and length."""
    rows = pd.DataFrame(
        [measure(v, length, options) for v in options.variants for length in options.lengths]
    )
    return Report(
        "Overhead of `fit`",
        rows,
        {"A training step of `fit` / of a plain loop": shown(rows, "variant", "tokens", "batch")},
        [f"The ListOps model, {options.steps - WARMUP} steps, float32, one process"],
        ("variant", "time_over_plain", "tokens"),
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--variants", nargs="+", default=["softmax", "smgk"], help="files of configs/attention")
    text = "tokens of a sequence"
    add("--lengths", type=at_least(16), nargs="+", default=[128, 1000], help=text)
    add("--batch", type=at_least(1), default=8, help="sequences of a step")
    add("--steps", type=at_least(WARMUP + 3), default=30, help="training steps")


main = command(__name__, __doc__, run, _add_options)
