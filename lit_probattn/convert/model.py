"""Convert the attention layers of a whole model and measure the effect on the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lit_probattn.attention import Attention, SoftmaxAttention
from lit_probattn.base.errors import ConfigError, prefixed
from lit_probattn.convert.files import find_layers, restore_layer
from lit_probattn.convert.fish import convert_to_fish
from lit_probattn.convert.layer import LayerErrors, LayerInputs, Mixture, convert_layer
from lit_probattn.tasks.base import real_rows

Batches = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Target:
    """Options of the layers to convert to.

    Args:
        mixture: options of MGK or sMGK. None selects FiSH.
        num_global_heads: for FiSH. None uses half the heads.
        value_head_dim: size of new value heads. None uses the old size.
    """

    mixture: Mixture | None = None
    num_global_heads: int | None = None
    value_head_dim: int | None = None

    def convert(
        self, old: SoftmaxAttention, inputs: LayerInputs | None
    ) -> tuple[Attention, LayerErrors]:
        """Convert a layer."""
        sizes = {"value_head_dim": self.value_head_dim}
        if self.mixture is not None:
            return convert_layer(old, self.mixture, inputs=inputs, **sizes)
        heads = self.num_global_heads
        return convert_to_fish(old, num_global_heads=heads, inputs=inputs, **sizes)


@dataclass(frozen=True)
class Converted:
    """New layers by name, and the conversion errors of each."""

    layers: dict[str, Attention]
    errors: dict[str, LayerErrors]

    def lines(self) -> list[str]:
        """Return a line per layer."""
        return [f"{name}: {error.line()}" for name, error in self.errors.items()]


def convert_layers(
    state: dict[str, Tensor],
    head_dim: int,
    inputs: Mapping[str, LayerInputs],
    target: Target,
) -> Converted:
    """Convert every attention layer of a state dict.

    Args:
        head_dim: size of the old heads.
        inputs: inputs of layers by name; layers without an entry are converted from the weights.

    Raises:
        ConfigError: a layer cannot be converted.
    """
    found = Converted({}, {})
    for name in find_layers(state):
        old = restore_layer(state, name, head_dim)
        seen = inputs.get(name)
        with prefixed(name, ValueError):
            found.layers[name], found.errors[name] = target.convert(old, seen)
    return found


# ---- inputs of layers --------------------------------------------------------------------------


def _outputs(task: Any, batch: Any) -> Any:
    """Return a task's predictions for a batch, or its loss if it has none."""
    if type(task).forward is pl.LightningModule.forward:
        return task.batch_loss(batch)
    return task(batch)


@torch.no_grad()
def layer_inputs(task: nn.Module, names: Sequence[str], batches: Batches) -> dict[str, LayerInputs]:
    """Return the inputs of the named layers of a task.

    Raises:
        ConfigError: a layer has a score bias per head, a pair mask, or attends to another sequence.
    """
    seen: dict[str, list[LayerInputs]] = {name: [] for name in names}

    def keep(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _reject_others(name, args, kwargs)
        given = kwargs.get("key_mask"), kwargs.get("is_causal", False)
        seen[name].append(LayerInputs(args[0], *given))

    with ExitStack() as hooks:
        for name in names:
            layer = task.get_submodule(name)
            hook = layer.register_forward_pre_hook(partial(keep, name), with_kwargs=True)
            hooks.enter_context(hook)
        for batch in batches:
            _outputs(task, batch)
    return {name: _join(parts) for name, parts in seen.items() if parts}


def _reject_others(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    bias = kwargs.get("bias")
    if bias is not None and bias.dim() > 2 and bias.shape[-3] > 1:
        raise ConfigError(
            f"{name}: per-head biases (relative positions) cannot be converted to fewer heads: "
            "train MGK on images from scratch"
        )
    other = [*args[1:], kwargs.get("key"), kwargs.get("memory")]
    if any(part is not None for part in other):
        raise ConfigError(
            f"{name} attends to another sequence: only self-attention models can be converted"
        )
    if bias is not None or kwargs.get("attn_mask") is not None:
        raise ConfigError(
            f"{name} has a pair mask or bias, which the fit to data does not support: pass "
            "--weights_only with --head_dim"
        )


def _join(parts: list[LayerInputs]) -> LayerInputs:
    """Concatenate the inputs of several batches, padded to the longest."""
    length = max(part.x.shape[1] for part in parts)
    pad = nn.functional.pad
    xs = [pad(part.x, (0, 0, 0, length - part.x.shape[1])) for part in parts]
    masks = [pad(part.real, (0, length - part.x.shape[1])) for part in parts]
    return LayerInputs(torch.cat(xs), torch.cat(masks), parts[0].is_causal)


# ---- effect on the model -----------------------------------------------------------------------


@dataclass(frozen=True)
class ModelErrors:
    """Effect of a conversion on the predictions of a model, over validation batches."""

    logit_error: float  # ‖new − old‖ / ‖old‖ of the model's outputs
    agreement: float  # share of rows with the same largest output
    num_rows: int

    def line(self) -> str:
        """Return a one-line summary."""
        return (
            f"model: output error {100 * self.logit_error:.1f} %, same prediction in "
            f"{100 * self.agreement:.1f} % of {self.num_rows} rows"
        )


@dataclass(frozen=True)
class ModelLosses:
    """Effect of a conversion on the loss of a model without predictions per row."""

    loss_before: float
    loss_after: float
    num_rows: int

    def line(self) -> str:
        """Return a one-line summary."""
        return (
            f"model: loss {self.loss_before:.4f} before, {self.loss_after:.4f} after, over "
            f"{self.num_rows} rows"
        )


def replace_layers(task: Any, layers: Mapping[str, Attention]) -> Any:
    """Replace layers of a task, by name, with copies of the given ones; return the task.

    The new layers keep the dropout of the old ones.
    """
    for name, layer in layers.items():
        new = copy.deepcopy(layer)
        new.dropout = task.get_submodule(name).dropout
        task.set_submodule(name, new)
    return task


@torch.no_grad()
def compare_models(
    task: Any, layers: Mapping[str, Attention], batches: Batches
) -> ModelErrors | ModelLosses:
    """Compare a task with its old and new layers on the real rows of batches."""
    converted = replace_layers(copy.deepcopy(task), layers).eval()
    rows = _real_batches(batches)
    pairs = [(_outputs(task, batch), _outputs(converted, batch)) for batch in rows]
    if not all(isinstance(part, Tensor) and part.dim() > 1 for pair in pairs for part in pair):
        return compare_losses(task, layers, batches)
    difference = size = 0.0
    same = predicted = 0
    for before, after in ((a.double(), b.double()) for a, b in pairs):
        difference += float((after - before).square().sum())
        size += float(before.square().sum())
        same += int((before.argmax(-1) == after.argmax(-1)).sum())
        predicted += before[..., 0].numel()
    return ModelErrors((difference / size) ** 0.5, same / max(1, predicted), predicted)


@torch.no_grad()
def compare_losses(task: Any, layers: Mapping[str, Attention], batches: Batches) -> ModelLosses:
    """Compare the losses of a task with its old and new layers on real rows."""
    converted = replace_layers(copy.deepcopy(task), layers).eval()
    rows = _real_batches(batches)
    count = sum(len(batch["sample_ids"]) for batch in rows)
    return ModelLosses(_mean_loss(task, rows), _mean_loss(converted, rows), count)


def _real_batches(batches: Batches) -> Batches:
    """Return batches without filler rows; those without any real row are omitted."""
    return [rows for batch in batches if len((rows := real_rows(batch))["sample_ids"])]


def _mean_loss(task: Any, rows: Batches) -> float:
    counts = [len(batch["sample_ids"]) for batch in rows]
    losses = [float(task.batch_loss(batch)) for batch in rows]
    return sum(a * b for a, b in zip(losses, counts, strict=True)) / max(1, sum(counts))
