"""Peak memory of a step predicted on fake tensors, and advice when memory runs out."""

from __future__ import annotations

import contextlib
import copy
import gc
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lit_probattn.attention import Attention, recorded_choices
from lit_probattn.attention.backends import GPU_BACKENDS
from lit_probattn.base.memory import predicted_bytes
from lit_probattn.base.torch_internals import with_child

_TEXTS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")

# Exact forms that need less than N x N memory, or trade memory for speed.
_BACKENDS = ("blockwise", "sdpa")

_GIB = 1 << 30


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that an allocation failed, on the host or on a GPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _TEXTS)


def told_out_of_memory(error: BaseException) -> str:
    """Return a line about an allocation that failed: the advice if any, else the plain fact."""
    notes = [note for note in getattr(error, "__notes__", []) if note.startswith("out of memory")]
    if notes:
        return notes[0]
    text = " ".join(str(error).split())[:200]
    return f"out of memory: {text}; lower data.init_args.batch_size or the sizes of the model"


@dataclass(frozen=True)
class Step:
    """The step that failed."""

    task: Any  # the LightningModule
    batch: dict[str, Any]  # its last
    train: bool  # whether gradients were computed
    precision: str  # of the trainer

    @property
    def num_rows(self) -> int:
        """Samples of the micro-batch."""
        return len(self.batch["sample_ids"])


class MemoryAdvice(Callback):
    """Adds a note to an out-of-memory error: what was running, and what to lower."""

    def __init__(self) -> None:
        self._batch: Any = None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, *numbers: int
    ) -> None:
        """Remember the batch."""
        self._batch = batch

    on_validation_batch_start: Any = on_train_batch_start
    on_test_batch_start: Any = on_train_batch_start
    on_predict_batch_start: Any = on_train_batch_start

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        """Add the note."""
        if not is_out_of_memory(exception):
            return
        error: BaseException | None = exception
        while error is not None:
            traceback.clear_frames(error.__traceback__)  # the activations are in there
            error = error.__context__
        pl_module.zero_grad(set_to_none=True)
        gc.collect()
        exception.add_note(describe(trainer, pl_module, self._batch))


def describe(trainer: pl.Trainer, task: pl.LightningModule, batch: Any) -> str:
    """Return one line: what ran out of memory, what it needs, and what to lower.

    `batch` is the last one; None if there was none yet.
    """
    place = f"out of memory on {trainer.strategy.root_device}"
    count = sum(parameter.numel() for parameter in task.parameters())
    if not isinstance(batch, dict) or not isinstance(batch.get("sample_ids"), Tensor):
        return (
            f"{place} before the first batch: weights, gradients and AdamW's state of {count:,} "
            f"parameters take {_size(16 * count)}{_free(trainer)}; make the model smaller"
        )
    step = Step(task, batch, bool(trainer.training), str(trainer.precision))
    stage = f"training at step {trainer.global_step}" if step.train else _stage(trainer)
    backends = _backends_in_use(task)
    needed = predicted_step_bytes(step, step.num_rows, None)
    need = "" if needed is None else f", predicted to need {_size(needed)}"
    advice = "; ".join(_advice(trainer, step, needed, backends))
    return (
        f"{place} in {stage}: {_shape(trainer, step)}, attention backend "
        f"{', '.join(backends) or 'not chosen yet'}{need}{_free(trainer)}. Lower it: {advice}"
    )


def _advice(
    trainer: pl.Trainer, step: Step, needed: int | None, backends: list[str]
) -> Iterator[str]:
    """Yield the settings that lower the memory, with what each is predicted to need."""
    smallest = next((d for d in range(2, step.num_rows + 1) if step.num_rows % d == 0), None)
    data: Any = getattr(trainer, "datamodule", None)
    if smallest is not None:
        predicted = predicted_step_bytes(step, step.num_rows // smallest, None)
        fewer = "" if predicted is None else f" ({_size(predicted)})"
        if step.train:
            accumulate = trainer.accumulate_grad_batches * smallest
            yield f"--trainer.accumulate_grad_batches {accumulate} for the same step{fewer}"
            name, value = getattr(data, "batch_setting", ("batch_size", None))
            if value is not None:
                yield f"--data.init_args.{name} {value // smallest}{fewer}"
        else:
            name, value = getattr(data, "eval_batch_setting", ("eval_batch_size", step.num_rows))
            yield f"--data.init_args.{name} {value // smallest}, with the same results{fewer}"
    for name in _BACKENDS:
        if name in backends:
            continue
        predicted = predicted_step_bytes(step, step.num_rows, name)
        if predicted is not None and (needed is None or predicted < 0.9 * needed):
            yield (
                f"--model.init_args.attention.init_args.backend {name}, with the same results "
                f"({_size(predicted)})"
            )
    if smallest is None:
        yield "the sequence length or the sizes of the model: the micro-batch has one sample"


def predicted_step_bytes(step: Step, num_rows: int, backend: str | None) -> int | None:
    """Predict the memory of the step with another micro-batch or backend, in bytes.

    Weights, activations, gradients and AdamW's state in training. None if fake tensors cannot
    follow the model.

    `backend` is for every attention layer; None keeps what each has.
    """

    def build() -> tuple[Any, Any]:
        model = _fake_copy(step.task.model)
        for layer in model.modules():
            if isinstance(layer, Attention):
                layer.backend = backend or _own_backend(layer)  # type: ignore[assignment]
        task = with_child(step.task, "model", model)  # leaves the trainer out
        task.trainer = step.task.trainer
        batch = {key: _fake_rows(value, num_rows) for key, value in step.batch.items()}
        return lambda: _run(task, batch, step), (model, *_tensors(batch))

    try:
        peak, resident = predicted_bytes(build)
    except Exception:  # only the numbers are lost
        return None
    trained = [p for p in step.task.model.parameters() if p.requires_grad]
    state = sum(2 * p.numel() * p.element_size() for p in trained) if step.train else 0
    return peak + resident + state


def _run(task: Any, batch: dict[str, Any], step: Step) -> None:
    """One forward and backward pass on fake tensors, in the trainer's precision."""
    mixed = step.precision in ("16-mixed", "bf16-mixed")
    task.model.train(step.train)
    task.__dict__["training"] = step.train
    autocast = torch.autocast("cpu", torch.bfloat16) if mixed else nullcontext()
    with autocast, torch.set_grad_enabled(step.train):
        loss = task.batch_loss(batch)
    if step.train:
        loss.backward()


def _fake_copy(model: nn.Module) -> nn.Module:
    """Copy a model with fake tensors on the CPU in place of its weights; shared ones stay shared.

    Called under FakeTensorMode.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
    return copy.deepcopy(model, memo)


def _fake_rows(value: Any, num_rows: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.zeros(num_rows, *value.shape[1:], dtype=value.dtype, device="cpu")


def _tensors(batch: dict[str, Any]) -> list[Tensor]:
    return [value for value in batch.values() if isinstance(value, Tensor)]


def _own_backend(layer: Attention) -> str:
    """Backend that a layer used, as far as fake tensors on the CPU can follow it."""
    calls = recorded_choices().items()
    chosen = [name for call, name in calls if call.startswith(f"{layer.core.name} (")]
    name = layer.backend if layer.backend != "auto" or not chosen else chosen[-1]
    return "blockwise" if name in GPU_BACKENDS else name  # a kernel keeps O(N) memory, as blocks do


def _backends_in_use(task: nn.Module) -> list[str]:
    chosen = list(dict.fromkeys(recorded_choices().values()))
    asked = {layer.backend for layer in task.modules() if isinstance(layer, Attention)} - {"auto"}
    return sorted(asked) or chosen


def _stage(trainer: pl.Trainer) -> str:
    names = {"sanity_check": "validation", "validate": "validation", "predict": "prediction"}
    stage = str(getattr(trainer.state.stage, "value", trainer.state.stage))
    return names.get(stage, stage)


def _shape(trainer: pl.Trainer, step: Step) -> str:
    inputs = step.batch.get("inputs")
    sizes = "" if inputs is None else f" of size {' x '.join(map(str, inputs.shape[1:]))}"
    text = f"a micro-batch of {step.num_rows} samples{sizes}"
    batch_size = getattr(getattr(trainer, "datamodule", None), "batch_size", None)
    if step.train and batch_size is not None:
        text += (
            f" (batch_size {batch_size}, accumulate_grad_batches "
            f"{trainer.accumulate_grad_batches}, {trainer.world_size} processes)"
        )
    return text


def _free(trainer: pl.Trainer) -> str:
    device = trainer.strategy.root_device
    if device.type == "cuda":
        return f"; the device has {_size(torch.cuda.get_device_properties(device).total_memory)}"
    free = available_bytes(device)
    return "" if free is None else f"; {_size(free)} are free now"


def _size(num_bytes: int) -> str:
    if num_bytes < _GIB // 8:
        return f"{num_bytes / (1 << 20):.1f} MiB"
    return f"{num_bytes / _GIB:.2f} GiB"


def available_bytes(device: torch.device) -> int | None:
    """Return the memory that is free now on a device, or None if that is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) if torch.cuda.is_available() else None
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
