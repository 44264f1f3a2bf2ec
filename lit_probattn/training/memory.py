"""One-line out-of-memory reports: the batch, its length, and settings to lower."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lit_probattn.attention import Attention

_TEXTS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")
_STAGES = {"sanity_check": "validation", "validate": "validation", "predict": "prediction"}


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception reports a failed allocation, on the host or on a GPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _TEXTS)


def out_of_memory_line(error: BaseException) -> str:
    """Return a line about a failed allocation: the advice if there is any, else the error."""
    notes = [note for note in getattr(error, "__notes__", []) if note.startswith("out of memory")]
    if notes:
        return notes[0]
    text = " ".join(str(error).split())[:200]
    return f"out of memory: {text}; lower data.init_args.batch_size or the sizes of the model"


class MemoryAdvice(Callback):
    """Adds a note to an out-of-memory error: the running operation, and settings to lower."""

    def __init__(self) -> None:
        self._batch: Any = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, *numbers: int
    ) -> None:
        """Store the batch."""
        self._batch = batch

    on_validation_batch_start: Any = on_train_batch_start
    on_test_batch_start: Any = on_train_batch_start
    on_predict_batch_start: Any = on_train_batch_start

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Add the note."""
        if is_out_of_memory(exception):
            exception.add_note(describe(trainer, pl_module, self._batch))


def describe(trainer: pl.Trainer, task: pl.LightningModule, batch: Any) -> str:
    """Return one line: what ran out of memory, and settings to lower.

    `batch` is the last one; None before the first.
    """
    place = f"out of memory on {trainer.strategy.root_device}"
    if not isinstance(batch, dict) or not isinstance(batch.get("sample_ids"), Tensor):
        count = sum(parameter.numel() for parameter in task.parameters())
        return f"{place} before the first batch: lower the model's {count:,} parameters"
    rows, inputs = len(batch["sample_ids"]), batch.get("inputs")
    sizes = "" if inputs is None else f" of size {' x '.join(map(str, inputs.shape[1:]))}"
    bounds = batch.get("cu_seqlens")  # packed: one row, and the longest sample is a part of it
    if bounds is not None and inputs is not None:
        sizes = f" packed into {inputs.shape[1]} tokens"
        inputs = inputs[:, : int(bounds.diff().max())]
    stage = str(getattr(trainer.state.stage, "value", trainer.state.stage))
    data: Any = getattr(trainer, "datamodule", None)
    if trainer.training:
        stage = f"training at step {trainer.global_step}"
        setting, _ = getattr(data, "batch_setting", ("batch_size", None))
        twice = 2 * trainer.accumulate_grad_batches
        advice = (
            f"set --trainer.accumulate_grad_batches {twice} or lower --data.init_args.{setting}"
        )
    else:
        stage = _STAGES.get(stage, stage)
        setting, _ = getattr(data, "eval_batch_setting", ("eval_batch_size", None))
        advice = f"lower --data.init_args.{setting}, with the same results"
    if rows == 1:
        advice = "lower the sequence length or the sizes of the model"
    ask = "" if inputs is None else _ask(task, rows, inputs)
    return f"{place} in {stage}: a micro-batch of {rows} samples{sizes}; {advice}{ask}"


def _ask(task: nn.Module, rows: int, inputs: Tensor) -> str:
    """Return the command that ranks variants by memory at the sizes of the first layer.

    Empty if `ask` has no such sizes: its softmax heads have size E = C / H, and other variants have
    heads of that size, as many or half as many.
    """
    layer = next((module for module in task.modules() if isinstance(module, Attention)), None)
    if layer is None or inputs.ndim > 3:  # image patches are not predicted here
        return ""
    heads, rest = divmod(layer.embed_dim, layer.head_dim)
    if rest or heads not in (layer.num_heads, 2 * layer.num_heads):
        return ""
    sizes = f"--embed_dim {layer.embed_dim} --num_heads {heads}"
    return (
        "; memory of every variant at these sizes: "
        f"lit-probattn ask {sizes} --seq_len {inputs.shape[1]} --batch {rows}"
    )
