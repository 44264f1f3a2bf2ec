"""The run behind a checkpoint: its model and its data, to see what every attention layer sees."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch
from jsonargparse import ArgumentParser
from torch import Tensor, nn

from lit_probattn.attention import MGKAttention
from lit_probattn.convert.inputs import LayerInputs

# Sizes that the command line links from the data to the model.
_LINKED = ("vocab_size", "num_classes", "max_seq_len")


@dataclass(frozen=True)
class ModelErrors:
    """What conversion did to the whole model, on validation batches.

    Args:
        logit_error: ‖new − old‖ / ‖old‖ of the model's outputs.
        agreement: share of rows whose largest output is the same.
        num_rows: rows compared.
    """

    logit_error: float
    agreement: float
    num_rows: int

    def line(self) -> str:
        """One line for a person."""
        return (
            f"model: output error {100 * self.logit_error:.1f} %, same prediction in "
            f"{100 * self.agreement:.1f} % of {self.num_rows} rows"
        )


@dataclass(frozen=True)
class Run:
    """A trained task and its data.

    Args:
        task: the task, in evaluation mode, with the checkpoint's weights.
        data: the DataModule, set up for validation.
        head_dim: E, if the configuration says it.
        attention_dropout: dropout of the attention layers.
    """

    task: pl.LightningModule
    data: pl.LightningDataModule
    head_dim: int | None
    attention_dropout: float

    def batches(self, count: int) -> list[dict[str, Tensor]]:
        """Return the first validation batches."""
        loader: Iterable[dict[str, Tensor]] = self.data.val_dataloader()
        return list(islice(loader, count))

    @torch.no_grad()
    def layer_inputs(self, names: list[str], num_batches: int) -> dict[str, LayerInputs]:
        """Return what the named layers see on validation batches."""
        seen: dict[str, list[LayerInputs]] = {name: [] for name in names}

        def watch(name: str) -> Any:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                inputs = LayerInputs(
                    args[0], kwargs.get("key_mask"), kwargs.get("is_causal", False)
                )
                seen[name].append(inputs)

            return self.task.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)

        hooks = [watch(name) for name in names]
        try:
            for batch in self.batches(num_batches):
                self.task(batch)
        finally:
            for handle in hooks:
                handle.remove()
        return {name: _join(parts) for name, parts in seen.items()}

    @torch.no_grad()
    def model_errors(self, layers: dict[str, MGKAttention], num_batches: int) -> ModelErrors:
        """Compare the outputs of the task with the old and the new layers."""
        converted = copy.deepcopy(self.task)
        for name, layer in layers.items():
            converted.set_submodule(name, copy.deepcopy(layer).eval())
        difference = size = 0.0
        same = rows = 0
        for batch in self.batches(num_batches):
            real = batch["sample_ids"] >= 0
            before, after = (task(batch)[real].double() for task in (self.task, converted))
            difference += float((after - before).square().sum())
            size += float(before.square().sum())
            same += int((before.argmax(-1) == after.argmax(-1)).sum())
            rows += before[..., 0].numel()
        return ModelErrors((difference / size) ** 0.5, same / max(1, rows), rows)


def build_run(config: dict[str, Any], state: dict[str, Tensor]) -> Run:
    """Build task and data of a resolved configuration and load the weights.

    Raises:
        KeyError: the configuration has no model or data.
        ValueError: a class cannot be built, or the data is not there.
        RuntimeError: the weights do not fit the model.
    """
    for part in ("model", "data"):
        if not isinstance(config.get(part), dict):
            raise KeyError(f"the configuration has no {part}")
    seed = config.get("seed_everything", 0)
    data_config = copy.deepcopy(config["data"])
    data_config.setdefault("init_args", {}).setdefault("seed", seed)
    data = _instantiate(pl.LightningDataModule, data_config)
    data.prepare_data()
    data.setup("validate")
    model_config = copy.deepcopy(config["model"])
    arguments = model_config.setdefault("init_args", {})
    for name in _LINKED:
        arguments.setdefault(name, getattr(data, name))
    arguments.setdefault("seed", seed)
    task = _instantiate(pl.LightningModule, model_config)
    task.load_state_dict(state)
    attention = arguments.get("attention", {}).get("init_args", {})
    return Run(task.eval(), data, arguments.get("head_dim"), attention.get("dropout", 0.0))


def _instantiate(base: type, config: dict[str, Any]) -> Any:
    """Build a class from {class_path, init_args}."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(base, "it")
    try:
        parsed = parser.parse_object({"it": config})
        # Renamed in jsonargparse 4.49; older releases have the old name only.
        make = getattr(parser, "instantiate", None) or parser.instantiate_classes
        return make(parsed).it
    except Exception as error:
        name = config.get("class_path", "without a class_path")
        raise ValueError(f"{name}: {str(error).strip().splitlines()[-1]}") from error


def _join(parts: list[LayerInputs]) -> LayerInputs:
    """Put the inputs of several batches together, padded to the longest."""
    length = max(part.x.shape[1] for part in parts)
    xs, masks = [], []
    for part in parts:
        missing = length - part.x.shape[1]
        xs.append(nn.functional.pad(part.x, (0, 0, 0, missing)))
        masks.append(nn.functional.pad(part.real, (0, missing)))
    return LayerInputs(torch.cat(xs), torch.cat(masks), parts[0].is_causal)
