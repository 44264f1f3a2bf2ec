"""Scope of an evaluation result: configuration of the run or another, whole split or part.

Results of a run's own configuration and the whole split are in `test-<checkpoint>.json` and
`predictions-<checkpoint>.parquet`. All others have a hash in their name, `…-<hash>`, so that no
result overwrites another.

The test split can also be scored at every validation during training, for curves: `TestScores`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from lit_probattn.base.errors import ConfigError, prefixed
from lit_probattn.base.files import digest
from lit_probattn.configs import (
    CONFIG,
    canonical,
    default_argument,
    different_keys,
    flatten,
    read_yaml,
)
from lit_probattn.tasks.base import Task
from lit_probattn.tasks.distributed import gather_objects
from lit_probattn.training.checkpoints import is_run_checkpoint, load_checkpoint
from lit_probattn.training.run_folder import (
    NumBatches,
    Sources,
    config_differences,
    folder_of_checkpoint,
    read_own_config,
    source_differences,
)
from lit_probattn.training.saving import RunCheckpoint

# Parts of a configuration that affect scores, and settings in them that do not.
_DECIDING = ("model.", "data.", "seed_everything", "trainer.precision")
_ARGUMENTS = "model.init_args"
_ATTENTION = f"{_ARGUMENTS}.attention"
_UNDECIDING = (
    *(f"{_ARGUMENTS}.{name}" for name in ("lr", "betas", "eps", "weight_decay", "compile")),
    *(f"{_ARGUMENTS}.{name}" for name in ("schedule", "schedule_steps", "warmup_steps")),
    *(f"{_ARGUMENTS}.{name}" for name in ("cycle_momentum", "activation_checkpointing")),
    "data.init_args.pad_multiple",
)
# Settings that affect scores only if not all samples of a split are scored, and those that say so.
_BATCHES = ("data.init_args.batch_size", "data.init_args.eval_batch_size")
_PARITY = "data.init_args.parity_eval"
_MICRO_BATCHES = "trainer.accumulate_grad_batches"  # divides the default of the latter
# Also those of one layer, or of an encoder.
_UNDECIDING_AT_ANY_DEPTH = re.compile(rf"{re.escape(_ARGUMENTS)}\.(.*\.)?(backend|\w*dropout)")
_SETTING = "run.test_during_training"
_LIMITS = {"test": "limit_test_batches", "predict": "limit_predict_batches"}


@dataclass
class Scope:
    """Scope of an evaluation.

    Args:
        differences: settings, and data files with their SHA-256, that differ from the run.
        limit: the trainer's limit of batches per process; None for the whole split.
        num_ranks: number of processes, with a limit.
        new_sha256: SHA-256 of new samples; None without any.
    """

    differences: dict[str, Any] = field(default_factory=dict)
    limit: float | None = None
    num_ranks: int | None = None
    new_sha256: str | None = None

    @classmethod
    def of(cls, trainer: pl.Trainer, command: str) -> Scope:
        """Return the part of the split that a trainer scores; see `limit_of`."""
        limit = limit_of(trainer, command)
        several = limit is not None and trainer.world_size > 1
        return cls(limit=limit, num_ranks=trainer.world_size if several else None)

    def path(self, folder: Path, stem: str, ending: str) -> Path:
        """Return the path of a result."""
        about = {name: value for name, value in vars(self).items() if value}
        if not about:
            return folder / f"{stem}{ending}"
        text = json.dumps(about, sort_keys=True, default=str)
        return folder / f"{stem}-{digest(text, 8)}{ending}"

    def note(self, folder: Path) -> str:
        """Return a line for the user; empty for the run's own configuration."""
        if not self.differences:
            return ""
        keys = ", ".join(self.differences)
        return f"the configuration differs from {folder} in {keys}: results have separate names"


def limit_of(trainer: pl.Trainer, command: str) -> float | None:
    """Return the trainer's limit of batches, or None.

    Raises:
        ConfigError: the limit is 0.
    """
    key = _LIMITS.get(command, "limit_val_batches")
    limit: float | None = getattr(trainer, key)
    if limit == 0:
        raise ConfigError(
            f"trainer.{key} must be positive, received {limit}: no batches would be evaluated"
        )
    return None if limit is None or (isinstance(limit, float) and limit == 1.0) else limit


def differences(
    checkpoint: Path, config: dict[str, Any], sources: Sources, limit: float | None = None
) -> dict[str, Any]:
    """Return the score-relevant settings that differ from the run that wrote a checkpoint.

    Empty for a checkpoint outside run folders, of which only the attention is known. Options that
    did not exist in the run's version of the package are ignored. Batch sizes and gradient
    accumulation count with a limit of batches, batch sizes also with `parity_eval`.

    Raises:
        ConfigError: the weights were trained with another attention or task.
    """
    folder = folder_of_checkpoint(checkpoint)
    if not (folder / CONFIG).is_file() or not is_run_checkpoint(checkpoint):
        reject_other_attention(checkpoint, load_checkpoint(checkpoint), config)
        return {}
    own = read_own_config(folder)
    flat, known = flatten(config), flatten(own)
    free = _BATCHES if limit is None and flat.get(_PARITY) is None else ()
    deciding = _DECIDING if limit is None else (*_DECIDING, _MICRO_BATCHES)
    found = [
        key
        for key in config_differences(own, config)
        if key.startswith(deciding)
        if key not in free and _decides(key) and _is_known(key, known)
    ]
    others = [key for key in found if key == "model.class_path" or key.startswith(_ATTENTION)]
    if others:
        remedy = f"pass --config {folder / CONFIG}"
        if config_differences(own, read_yaml(folder / CONFIG)):
            remedy = f"{folder / CONFIG} was edited since; restore it"
        raise ConfigError(
            f"{checkpoint} was trained with another model (different: {_listed(others)}): {remedy}"
        )
    changed = {key: flat.get(key) for key in found}
    return changed | source_differences(folder, sources)


def reject_other_attention(
    checkpoint: Path, content: Mapping[str, Any], config: Mapping[str, Any]
) -> None:
    """Compare the attention and head size of a checkpoint's constructor arguments.

    Other attention can have the same parameters. Options that are also entries of the weights,
    which loading compares, and checkpoints without arguments pass.

    Args:
        content: of the checkpoint.
        config: the configuration to construct the model with.

    Raises:
        ConfigError: they differ.
    """
    model = config["model"]
    given = {
        key: {"class_path": value}
        if key.endswith("attention") and isinstance(value, str)
        else value
        for key, value in (model.get("init_args") or {}).items()
    }
    stored = {
        key: value
        for key, value in content.get("hyper_parameters", {}).items()
        if key == "head_dim"
        or (key.endswith("attention") and isinstance(value or given.get(key), Mapping))
    }
    given = {key: value for key, value in given.items() if key in stored}
    trained = canonical({"model": {**model, "init_args": stored}})
    now = canonical({"model": {**model, "init_args": given}})
    old, new = _without_empty(flatten(trained)), _without_empty(flatten(now))
    in_weights = {name.rpartition(".")[2] for name in content.get("state_dict", {})}
    found = [
        key
        for key in different_keys(old, new)
        if _decides(key) and key.rpartition(".")[2] not in in_weights
        if old.get(key, default_argument(trained, key)) != new.get(key, default_argument(now, key))
    ]
    if found:
        raise ConfigError(
            f"{checkpoint} was trained with another model (different: {_listed(found)}): pass "
            "the run's configuration by --config"
        )


def _without_empty(flat: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flat.items() if value != {}}


def _listed(keys: Sequence[str]) -> str:
    """Return keys without the arguments of classes that differ themselves."""
    classes = [key.removesuffix("class_path") for key in keys if key.endswith(".class_path")]
    arguments = tuple(f"{place}init_args." for place in classes)
    return ", ".join(key for key in keys if not key.startswith(arguments))


def _decides(key: str) -> bool:
    return key not in _UNDECIDING and _UNDECIDING_AT_ANY_DEPTH.fullmatch(key) is None


def _is_known(key: str, known: Iterable[str]) -> bool:
    parts = key.split(".")
    return any(".".join(parts[:n]) in known for n in range(1, len(parts) + 1))


class SampleCount(Callback):
    """Counts the samples of an evaluation and their labels, over all ranks, without filler rows.

    Labels are counted if a sample has one: `target` (B,) of integers.
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
        """Sum over the ranks."""
        self.count = sum(gather_objects(self.count))
        self._labels = sum(gather_objects(self._labels), Counter())

    on_validation_end: Any = on_test_end

    @property
    def most_frequent_label(self) -> float | None:
        """Accuracy of a majority-class predictor; None without labels."""
        return max(self._labels.values()) / self.count if self._labels else None

    def chance(self) -> str:
        """Return a line with the accuracy that significantly exceeds the majority class."""
        share = self.most_frequent_label
        assert share is not None
        least = self._least(share)
        which = f"only an accuracy above {least:.4f}" if least < 1 else "no accuracy"
        return (
            f"always predicting the most frequent label gives {share:.4f}, and with {self.count} "
            f"samples {which} differs from it"
        )

    def above_chance(self, accuracy: float) -> bool | None:
        """Whether an accuracy exceeds the majority-class baseline by more than 1.96 SE."""
        share = self.most_frequent_label
        return None if share is None else accuracy > self._least(share)

    def _least(self, share: float) -> float:
        return share + 1.96 * math.sqrt(share * (1 - share) / self.count)


class TestScores(Callback):
    """Scores the test split after every validation during training.

    Its metrics are logged as `test/…` next to the validation metrics and computed like them: with
    the validation stride for language models, the validation beam for translation, and no
    episodes. They are only logged: a callback that monitors a test metric raises an error. Training
    is not affected: no random state and no weights change, and a compiled model runs in eager mode.

    If a run receives a stop signal meanwhile, its checkpoint precedes this validation, which the
    resumed run repeats.

    Args:
        batches: number of batches per rank, from the start of the split; or `all`.
    """

    __test__ = False  # pytest would collect a class of this name

    def __init__(self, batches: NumBatches) -> None:
        self.batches = batches
        self._loader: Any = None

    @classmethod
    def asked_of(cls, trainer: pl.Trainer) -> NumBatches | None:
        """Return the `batches` of a trainer's callback of this class, or None."""
        every: list[Any] = getattr(trainer, "callbacks", [])
        return next((callback.batches for callback in every if isinstance(callback, cls)), None)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Register the scoring with the task.

        Raises:
            ValueError: the module is not a task of this package.
        """
        if stage != "fit":
            return
        if not isinstance(pl_module, Task):
            raise ValueError(
                f"{_SETTING} requires a task of lit_probattn.tasks, received "
                f"{type(pl_module).__name__}: unset it, and use the command test"
            )
        pl_module.score_test = lambda: self._score(trainer, pl_module)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the test split.

        Raises:
            ValueError: there is no test split.
        """
        data: Any = getattr(trainer, "datamodule", None)
        if not hasattr(data, "test_as_validation"):
            raise ValueError(
                f"{_SETTING} requires data of this package (datamodules), received "
                f"{type(data).__name__}: unset it, and use the command test"
            )
        with prefixed(_SETTING, ValueError, to=ValueError):
            self._loader = data.test_as_validation()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Release task and data."""
        if isinstance(pl_module, Task):
            pl_module.score_test = None
        self._loader = None

    def _score(self, trainer: pl.Trainer, task: Task) -> None:
        most = None if self.batches == "all" else self.batches
        most = 1 if getattr(trainer, "fast_dev_run", False) else most
        eager: Any = nullcontext()
        if task.compile_model:  # other lengths would recompile it
            eager = torch.compiler.set_stance("force_eager")
        with isolate_rng(), eager:
            for index, batch in enumerate(islice(self._loader, most)):
                batch = trainer.precision_plugin.convert_input(batch)
                batch = trainer.strategy.batch_to_device(batch)
                trainer.strategy.test_step(batch, index)
                for callback in _checkpoints(trainer):
                    callback.leave_if_asked(trainer, task)
            task.log_scores("test")


def _checkpoints(trainer: pl.Trainer) -> list[RunCheckpoint]:
    found: list[Any] = getattr(trainer, "callbacks", [])
    return [callback for callback in found if isinstance(callback, RunCheckpoint)]
