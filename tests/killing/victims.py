"""Work that the kill loop interrupts: it says on a pipe where it is, and can be killed anywhere.

Each piece of work is a function of a folder and of `say`; run again in the same folder, it must end
with the same result as if it had never been interrupted.
"""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from datamodules.__main__ import main as data_command
from lit_probattn.cli.app import main as train_command
from lit_probattn.tasks import SequenceClassifier
from lit_probattn.training import checkpoints
from profiling.sweep.config import load_sweep
from profiling.sweep.run import run_sweep
from tests.support.paths import ROOT
from tests.support.runs import arguments, fingerprint, metrics, only_version, write_attention

Say = Callable[[str], object]

SWEEP = """
name: killed
model: {kind: attention, head_dim_divisor: 4}
baseline: softmax
variants:
  softmax:
    attention: {config: configs/attention/softmax.yaml, init_args: {num_heads: 4, dropout: 0.0}}
  mgk:
    attention: {config: configs/attention/mgk.yaml, init_args: {num_heads: 2, dropout: 0.0}}
grid: {embed_dim: [16, 32], seq_len: [16, 24], batch_size: [2], mode: [train], backend: [reference]}
measure: [cost]
"""
CACHE = ("--num_train", "3000", "--num_val", "200", "--num_test", "200", "--num_processes", "1")


class Victim(NamedTuple):
    """Something to kill.

    Args:
        run: does the work in a folder; returns the exit status.
        result: hash of what it made there.
        phase: which messages on the pipe mark the moments to kill at, by their first word.
        delay: seconds within which the kill follows such a moment.
    """

    run: Callable[[Path, Say], int]
    result: Callable[[Path], str]
    phase: str
    delay: float


def train(folder: Path, say: Say) -> int:
    """Train tiny Text with everything that has state; go on if it was begun."""
    _announce(say)
    attention = write_attention(folder, "MGKAttention", dropout=0.2, e_step="soft")
    more = (
        *("--trainer.accumulate_grad_batches", "2", "--trainer.val_check_interval", "8"),
        *("--run.checkpoint_every", "2", "--ckpt_path", "auto"),
    )
    return train_command(arguments("fit", folder, *more, attention=attention))


def _announce(say: Say) -> None:
    """Make training, validation and the writing of checkpoints say where they are."""
    step, validate, save = (
        SequenceClassifier.training_step,
        SequenceClassifier.validation_step,
        checkpoints.torch.save,
    )

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        say("training")
        return step(self, batch, batch_idx)

    def validation_step(self: Any, batch: Any, batch_idx: int) -> Any:
        say("validation")
        return validate(self, batch, batch_idx)

    def slow_save(value: Any, file: Any) -> None:
        whole = io.BytesIO()
        save(value, whole)
        say("writing")
        data = whole.getbuffer()
        for start in range(0, len(data), len(data) // 40):
            file.write(data[start : start + len(data) // 40])
            file.flush()
            time.sleep(0.001)

    SequenceClassifier.training_step = training_step
    SequenceClassifier.validation_step = validation_step
    checkpoints.torch.save = slow_save


def trained(folder: Path) -> str:
    """Hash of weights, optimiser state and logged metrics."""
    version = only_version(folder)
    return _hash([fingerprint(version).encode(), str(metrics(version)).encode()])


def build_cache(folder: Path, say: Say) -> int:
    """Generate and cache ListOps, or find that it is there."""
    say("building")
    place = ["--data_dir", str(folder), "--cache_dir", str(folder / ".cache")]
    return data_command(["prepare", "listops", *place, *CACHE])


def built(folder: Path) -> str:
    """Hash of the arrays; left-overs of an interrupted build change it too."""
    (cache,) = (path for path in (folder / ".cache").iterdir() if path.is_dir())
    files = sorted(path for path in cache.iterdir() if path.suffix == ".npy")
    return _hash([part for path in files for part in (path.name.encode(), path.read_bytes())])


def sweep(folder: Path, say: Say) -> int:
    """Count operations over a grid, or what is missing of it."""
    path = folder / "sweep.yaml"
    path.write_text(SWEEP)
    say("sweeping")
    run_sweep(load_sweep(path), folder / "rows", ROOT, stream=lambda _: say("sweeping"))
    return 0


def swept(folder: Path) -> str:
    """Hash of the file of rows, byte for byte."""
    (path,) = (folder / "rows").glob("*.jsonl")
    return _hash([path.read_bytes()])


def _hash(parts: list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


VICTIMS = {
    "training": Victim(train, trained, "training", 0.02),
    "validation": Victim(train, trained, "validation", 0.01),
    "checkpoint writing": Victim(train, trained, "writing", 0.06),
    "cache building": Victim(build_cache, built, "building", 1.0),
    "sweep": Victim(sweep, swept, "sweeping", 0.2),
}
