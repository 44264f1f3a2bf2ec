"""Data and model of a configuration without a run: sizes, counts, one training step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datamodules.core.base import CachedDataModule, DataModule
from datamodules.core.errors import DataError
from lit_probattn.attention.backends import Backend, Call, choose_backend
from lit_probattn.compare.cells import Cell
from lit_probattn.compare.protocol import class_of
from lit_probattn.randomness import RandomKey
from lit_probattn.tasks import ImageClassifier, LanguageModeling, PairClassifier
from lit_probattn.tasks.base import Task
from profiling.builders import attention_factory
from profiling.cost.exact import stated_backend
from profiling.cost.structure import attention_layers
from profiling.measure.counters import torch_flops

SIZES = ("vocab_size", "num_features", "num_classes", "max_seq_len")


def build_data(cell: Cell) -> DataModule:
    """Make the DataModule of a cell; nothing is read."""
    entry = cell.config["data"]
    places = {"data_dir": cell.place.data_dir, "cache_dir": cell.place.cache_dir}
    data: DataModule = class_of(entry["class_path"])(**{**entry["init_args"], **places})
    return data


def missing_data(data: DataModule) -> str | None:
    """Say what is missing and where it comes from; None if the data are there or generated."""
    if getattr(data, "source", None) == "generated":
        return None
    try:
        if isinstance(data, CachedDataModule):
            try:
                data.open()
                return None
            except DataError:
                if data.sources():
                    return None
        data.prepare_data()
    except DataError as error:
        return str(error)
    return None


def split_sizes(data: DataModule) -> dict[str, int]:
    """Samples of the splits that are known without reading a release: cached, else published."""
    if data.splits:
        return {name: len(split) for name, split in data.splits.items()}
    if isinstance(data, CachedDataModule):
        try:
            return {name: len(split) for name, split in data.splits_of(data.open()).items()}
        except DataError:
            pass
    generated = getattr(data, "num_samples", None)
    if getattr(data, "source", None) == "generated" and isinstance(generated, Mapping):
        return dict(generated)
    found = {name: size.num_samples for name, size in data.published.items()}
    both = found.pop("train+val", None)
    if both is not None:
        found["val"] = round(getattr(data, "val_fraction", 0.1) * both)
        found["train"] = both - found["val"]
    return found


def build_task(cell: Cell, data: DataModule) -> Task:
    """Make the LightningModule of a cell on the current default device."""
    entry = cell.config["model"]
    cls, arguments = class_of(entry["class_path"]), dict(entry["init_args"])
    chosen = arguments.pop("attention")
    accepted = {
        name for part in cls.__mro__ for name in inspect.signature(part.__init__).parameters
    }
    for name in SIZES:
        if name in accepted and name not in arguments:
            known = cell.task.sizes.get(name)
            arguments[name] = getattr(data, name) if known is None else known
    factory = attention_factory(chosen["class_path"], chosen.get("init_args") or {})
    task: Task = cls(factory, seed=cell.seed, **arguments)
    return task


def make_inputs(task: Task, data: DataModule, batch: int) -> tuple[Tensor, Tensor]:
    """Return random inputs of full length and targets."""
    if isinstance(task, ImageClassifier):
        size = cast(Any, data).image_size
        return torch.randn(batch, 3, size, size), torch.zeros(batch, dtype=torch.int64)
    shape: tuple[int, ...] = (batch, data.max_seq_len)
    if isinstance(task, PairClassifier):
        shape = (batch, 2, data.max_seq_len)
    inputs = torch.randint(1, data.vocab_size or 2, shape)
    if isinstance(task, LanguageModeling):
        return inputs, torch.randint(0, data.vocab_size or 2, shape)
    return inputs, torch.zeros(batch, dtype=torch.int64)


def training_step(task: Task, inputs: Tensor, target: Tensor) -> Callable[[], None]:
    """Return a function that runs forward and backward of a batch."""
    model = cast(Any, task.model)
    key = RandomKey(0, 0, torch.arange(len(inputs)))

    def step() -> None:
        out = model(inputs, rng=key)
        if isinstance(task, LanguageModeling):
            loss = model.token_losses(out, target).mean()
        else:
            loss = F.cross_entropy(out, target)
        loss.backward()
        task.zero_grad(set_to_none=True)

    return step


def set_backends(model: nn.Module, batch: int, length: int) -> None:
    """Fix every layer's backend to what a CPU training step of `batch` samples would choose."""
    for layer in attention_layers(model):
        call = Call(
            device="cpu",
            dtype=torch.float32,
            num_scores=batch * layer.num_heads * length**2 * layer.score_maps,
            dropout=layer.dropout > 0,
            bias_needs_grad=False,
        )
        layer.backend = cast(
            Backend,
            choose_backend(
                layer.variant,
                layer.backend,
                layer.backends,
                layer.unsupported,
                call,
                layer.auto_rules,
            ),
        )


def counts(cell: Cell) -> dict[str, int]:
    """Count parameters, and multiply-adds of one sample's forward pass by the equations.

    The output layer of a language model, the same for all rows, is not in the multiply-adds.
    """
    data = build_data(cell)
    with torch.device("meta"):
        task = build_task(cell, data).eval()
        inputs, _ = make_inputs(task, data, 1)
        for layer in attention_layers(task):
            layer.backend = cast(Backend, stated_backend(layer))
        model = task.model

        def forward() -> None:
            with torch.no_grad():
                model(inputs)

        macs = torch_flops(forward) // 2
    return {"parameters": sum(p.numel() for p in model.parameters()), "macs": macs}
