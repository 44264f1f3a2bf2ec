"""A trained model and its data, restored from a checkpoint and the run's configuration."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lit_probattn.attention import Attention
from lit_probattn.base.errors import ConfigError
from lit_probattn.configs import class_of, instantiate, link_sizes, parse_settings, read_config
from lit_probattn.tasks import Translation
from lit_probattn.training.checkpoints import find_file, load_checkpoint
from lit_probattn.training.evaluation import reject_other_attention


@dataclass(frozen=True)
class Trained:
    """A trained task in evaluation mode, and its data.

    If the task has a moving average of its weights, `task.model` is that average, which
    evaluations use.
    """

    task: Any
    data: Any
    config: dict[str, Any]
    checkpoint: Path
    step: int
    device: torch.device

    @property
    def layers(self) -> dict[str, Attention]:
        """Attention layers by name, in order."""
        named = self.task.model.named_modules()
        return {name: module for name, module in named if isinstance(module, Attention)}

    def forward(self, batch: Mapping[str, Any]) -> Any:
        """Return the model's output for a batch.

        Raises:
            ConfigError: the inputs are not one tensor of sequences, as in translation.
        """
        model = self.task.model
        if "inputs" not in batch or "source" in batch:
            raise ConfigError(
                "this study needs a run of a model of single sequences, received one of "
                f"{type(self.task).__name__}: `lit-probattn analyse` lists the studies of others"
            )
        given: dict[str, Any] = {"key_mask": batch.get("key_mask")}
        if "token_types" in batch and getattr(model, "num_token_types", None):
            given["token_types"] = batch["token_types"]
        return model(batch["inputs"], **given, rng=self.task.random_key(batch))

    def num_samples(self, split: Literal["val", "test"]) -> int:
        """Return the number of samples of a split.

        Raises:
            ConfigError: the data set has no length.
        """
        count = getattr(self._loader(split).dataset, "__len__", None)
        if count is None:
            raise ConfigError("cannot sample from the data: expected a data set with a length")
        return int(count())

    def _loader(self, split: Literal["val", "test"]) -> Any:
        loader = getattr(self.data, f"{split}_dataloader")()
        return getattr(loader, "loader", loader)

    def batches(
        self,
        split: Literal["val", "test"],
        num_samples: int,
        *,
        seed: int = 0,
        rows: int | None = None,
        max_len: int | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Draw samples of a split without replacement; yield them in batches on the device.

        Args:
            num_samples: number of samples; at most those of the split are drawn.
            rows: samples per batch. None means the DataModule's setting.
            max_len: truncate sequences to this length. None disables.
        """
        loader = self._loader(split)
        sampler = getattr(loader, "batch_sampler", None)
        size = rows or max((len(ids) for ids in sampler or ()), default=8)
        order = np.random.default_rng(seed).permutation(self.num_samples(split))[:num_samples]
        groups = [order[i : i + size].tolist() for i in range(0, len(order), size)]
        chosen = DataLoader(loader.dataset, batch_sampler=groups, collate_fn=loader.collate_fn)
        for batch in chosen:
            moved = {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in batch.items()}
            yield crop(moved, max_len)


def crop(batch: dict[str, Any], max_len: int | None) -> dict[str, Any]:
    """Truncate the sequences of a batch; batches without `key_mask` (images) are unchanged."""
    mask = batch.get("key_mask")
    if max_len is None or mask is None or mask.shape[-1] <= max_len:
        return batch
    axis = mask.dim() - 1
    result = dict(batch)
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.shape[: mask.dim()] == mask.shape:
            result[name] = value.narrow(axis, 0, max_len)
    return result


def open_trained(options: argparse.Namespace, *, with_data: bool = True) -> Trained:
    """Restore the model and the data of a checkpoint.

    Args:
        options: `checkpoint`, `config`, `data` and `device`, as in the studies.
        with_data: whether to open the data as well; otherwise `data` is None.

    Raises:
        ConfigError: configuration, data and checkpoint are inconsistent.
        DataError: the data have other classes or vocabularies than the checkpoint.
        CheckpointError: the checkpoint is missing or corrupt.
    """
    checkpoint = find_file(options.checkpoint)
    loaded = load_checkpoint(checkpoint)
    for text in options.data:
        key, _, value = text.partition("=")
        if not value:
            raise ConfigError(f"--data.{key}: expected a value, received none")
    settings = parse_settings([f"data.{text}" for text in options.data])
    config = read_config(checkpoint, options.config, settings)
    reject_other_attention(checkpoint, loaded, config)
    seed = config.get("seed_everything", 0)
    data = None
    if with_data:
        arguments = config["data"].setdefault("init_args", {})
        arguments.setdefault("seed", seed)
        data = instantiate(pl.LightningDataModule, config["data"])
        data.prepare_data()
        data.setup("test")
        stored = loaded.get(type(data).__qualname__)
        if stored is not None:
            data.load_state_dict(stored)
    link_sizes(config["model"], loaded.get("hyper_parameters", {}), data)
    config["model"]["init_args"].setdefault("seed", seed)
    task = instantiate(pl.LightningModule, config["model"])
    load_weights(task, loaded.get("state_dict", {}), checkpoint)
    device = choose_device(options.device)
    step = int(loaded.get("global_step", 0))
    return Trained(task.to(device), data, config, checkpoint, step, device)


def open_translator(options: argparse.Namespace) -> Trained:
    """Restore a translation model and the data with its vocabularies.

    Args:
        options: as for `open_trained`; the data are loaded without worker processes.

    Raises:
        ConfigError: the run is of another task; see also `open_trained`.
    """
    checkpoint = find_file(options.checkpoint)
    config = read_config(checkpoint, options.config)
    task = class_of(config["model"]["class_path"])
    if not (isinstance(task, type) and issubclass(task, Translation)):
        raise ConfigError(
            f"{options.checkpoint} is a run of {task.__name__}, which does not translate: pass a "
            "run of a translation model (lit_probattn.tasks.Translation)"
        )
    wanted = {"checkpoint": checkpoint, "data": ["num_workers=0", *options.data]}
    return open_trained(argparse.Namespace(**{**vars(options), **wanted}))


def identity(trained: Trained) -> dict[str, Any]:
    """Return the identity of this checkpoint, for the rows of an interrupted study."""
    stat = trained.checkpoint.stat()
    return {
        "checkpoint": trained.checkpoint.name,
        "step": trained.step,
        "bytes": stat.st_size,
        "modified_ns": stat.st_mtime_ns,
    }


def load_weights(task: Any, state: Mapping[str, Tensor], checkpoint: Path) -> Any:
    """Return a task with the weights of a checkpoint, as evaluations use it; see `Trained`.

    Raises:
        ConfigError: the weights do not match.
    """
    try:
        task.load_state_dict(state)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]]
        raise ConfigError(
            f"{checkpoint.name} does not match the configuration: {' '.join(lines)[:300]}"
        ) from error
    if getattr(task, "ema", None) is not None:
        task.model = task.ema.module
    return task.eval()


def choose_device(name: str) -> torch.device:
    """Return a device by name; `auto` selects a GPU if there is one.

    Raises:
        ConfigError: unknown or unavailable device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"unknown device {name!r}: use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name} is not available: no CUDA device; use --device cpu")
    return device
