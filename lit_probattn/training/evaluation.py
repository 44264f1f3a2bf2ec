"""What a result is about: a run's own configuration, or another; the whole split, or a part of it.

Results of a run's own configuration and the whole split are in `test-<checkpoint>.json` and
`predictions-<checkpoint>.parquet`. Any others have names of their own, `…-<hash>`, so that no
number ever takes the place of another's.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lit_probattn.tasks.distributed import gather_objects
from lit_probattn.training.checkpoints import named_by_a_run
from lit_probattn.training.run_folder import (
    CONFIG,
    RunFolderError,
    Sources,
    config_differences,
    flatten,
    folder_of_checkpoint,
    read_own_config,
    source_differences,
)

# Parts of a configuration that decide a score, and settings among them that do not.
_DECIDING = ("model.", "data.", "seed_everything", "trainer.precision")
_ARGUMENTS = "model.init_args"
_ATTENTION = f"{_ARGUMENTS}.attention"
_UNDECIDING = (
    *(f"{_ARGUMENTS}.{name}" for name in ("lr", "betas", "eps", "weight_decay", "compile")),
    *(f"{_ARGUMENTS}.{name}" for name in ("schedule", "schedule_steps", "warmup_steps")),
    *(f"{_ARGUMENTS}.{name}" for name in ("cycle_momentum", "activation_checkpointing")),
    *(f"{_ATTENTION}.init_args.{name}" for name in ("backend", "dropout")),
    *(f"data.init_args.{name}" for name in ("batch_size", "eval_batch_size", "pad_multiple")),
)
_LIMITS = {"test": "limit_test_batches", "predict": "limit_predict_batches"}


@dataclass
class Scope:
    """What an evaluation covers.

    Args:
        differences: settings, and files of the data, in which it differs from the run.
        limit: of batches, as the trainer has it; None for the whole split.
    """

    differences: dict[str, Any] = field(default_factory=dict)
    limit: float | None = None

    def path(self, folder: Path, stem: str, ending: str) -> Path:
        """Return where a result goes."""
        about = {"differences": self.differences, "limit": self.limit}
        if not any(about.values()):
            return folder / f"{stem}{ending}"
        text = json.dumps(about, sort_keys=True, default=str)
        return folder / f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:8]}{ending}"

    def note(self, folder: Path) -> str:
        """Return a line for the user; empty for a run's own configuration."""
        if not self.differences:
            return ""
        keys = ", ".join(self.differences)
        return f"the configuration differs from {folder} in {keys}: results get names of their own"


def limit_of(trainer: pl.Trainer, command: str) -> float | None:
    """Return the trainer's limit of batches; None if it has none.

    Raises:
        RunFolderError: it leaves no batch.
    """
    key = _LIMITS.get(command, "limit_val_batches")
    limit: float | None = getattr(trainer, key)
    if limit == 0:
        raise RunFolderError(
            f"trainer.{key} must be positive, received {limit}: nothing would be evaluated"
        )
    return None if limit is None or (isinstance(limit, float) and limit == 1.0) else limit


def differences(checkpoint: Path, config: dict[str, Any], sources: Sources) -> dict[str, Any]:
    """Return what decides scores and is not as in the run that wrote a checkpoint.

    Empty for a checkpoint outside run folders. Options that the run's version of the package did
    not have yet count for nothing.

    Raises:
        RunFolderError: the weights were trained with another attention or task.
    """
    folder = folder_of_checkpoint(checkpoint)
    if not (folder / CONFIG).is_file() or not named_by_a_run(checkpoint):
        return {}
    own = read_own_config(folder)
    flat, known = flatten(config), flatten(own)
    found = [
        key
        for key in config_differences(own, config)
        if key.startswith(_DECIDING) and key not in _UNDECIDING and _is_known(key, known)
    ]
    others = [key for key in found if key == "model.class_path" or key.startswith(_ATTENTION)]
    if others:
        raise RunFolderError(
            f"{checkpoint} was trained with another model (different: {', '.join(others)}): "
            f"give --config {folder / CONFIG}"
        )
    changed = {key: flat.get(key) for key in found}
    return changed | dict.fromkeys(source_differences(folder, sources), "changed")


def _is_known(key: str, known: Iterable[str]) -> bool:
    parts = key.split(".")
    return any(".".join(parts[:n]) in known for n in range(1, len(parts) + 1))


class SampleCount(Callback):
    """Counts the samples of an evaluation and their labels, over all ranks; fill-up rows are none.

    Labels are counted where a sample has one: `target` (B,) of integers.
    """

    def __init__(self) -> None:
        self.count = 0
        self._labels: Counter[int] = Counter()

    def on_test_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Count a batch."""
        real: Tensor = batch["sample_ids"] >= 0
        self.count += int(real.sum())
        target = batch.get("target")
        if isinstance(target, Tensor) and target.ndim == 1 and not target.is_floating_point():
            self._labels.update(target[real].tolist())

    on_validation_batch_end: Any = on_test_batch_end

    def on_test_end(self, *_: Any) -> None:
        """Add up the ranks."""
        self.count = sum(gather_objects(self.count))
        self._labels = sum(gather_objects(self._labels), Counter())

    on_validation_end: Any = on_test_end

    @property
    def most_frequent_label(self) -> float | None:
        """The accuracy of always naming the most frequent label; None without labels."""
        return max(self._labels.values()) / self.count if self._labels else None

    def chance(self) -> str:
        """Say which accuracy these samples tell from that of always naming one label."""
        share = self.most_frequent_label
        assert share is not None
        return (
            f"always naming the most frequent label gives {share:.4f}, and {self.count} samples "
            f"tell only what is above {self._least(share):.4f} from it"
        )

    def above_chance(self, accuracy: float) -> bool | None:
        """Whether an accuracy is above that of one label by more than 1.96 standard errors."""
        share = self.most_frequent_label
        return None if share is None else accuracy > self._least(share)

    def _least(self, share: float) -> float:
        return share + 1.96 * math.sqrt(share * (1 - share) / self.count)
