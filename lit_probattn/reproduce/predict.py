"""Time and memory of a cell before it runs.

Both are either measured or modelled, and the result says which. `measured`: training steps of one
and of two samples at full length on this machine, with the attention backends of the whole batch; a
line through their medians, times the steps, with the busyness of the moment; and a line through
their peaks in the CPU's allocator. `flops`: three times the multiply-adds of a forward pass, by a
given speed; memory by fake tensors on the paths of a CPU. An evaluated sample counts as a third of
a trained one. Memory includes parameters, gradients and the optimiser's two averages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lit_probattn.reproduce.built import (
    build_data,
    build_task,
    counts,
    make_inputs,
    set_backends,
    split_sizes,
    training_step,
)
from lit_probattn.reproduce.cells import Cell
from lit_probattn.tasks import LanguageModeling
from profiling.memory import cpu_peak_bytes, predicted_bytes
from profiling.timing import summarise, time_sides

_ROUNDS, _MAX_SECONDS = 3, 20.0
# Batches whose steps a line is drawn through.
_FEW = (1, 2)
# Score elements up to which fake steps are quick.
_DIRECT_SCORES = 1 << 22


@dataclass(frozen=True)
class Prediction:
    """What a cell will take.

    Args:
        hours: training, validation and test, on one device.
        basis: how the time was found.
        peak_bytes: memory of a training step, None if it could not be predicted.
        memory_note: what the memory leaves out, or why there is none.
        num_parameters: parameters.
        macs: multiply-adds of one sample's forward pass.
        steps: optimiser steps.
        batch_size: samples of a step.
        seq_len: padded length.
    """

    hours: float
    basis: str
    peak_bytes: int | None
    memory_note: str
    num_parameters: int
    macs: int
    steps: int
    batch_size: int
    seq_len: int


def predict(cell: Cell, tflops: float | None = None) -> Prediction:
    """Predict a cell.

    Args:
        cell: the cell.
        tflops: speed for the FLOP model; None measures steps.
    """
    data, counted = build_data(cell), counts(cell)
    batch = int(cell.config["data"]["init_args"]["batch_size"])
    peak: int | None
    if tflops is None:
        steps = _MeasuredSteps(cell, batch)
        fixed, per_sample = steps.seconds()
        peak, note = steps.peak_bytes(), ""
        basis = f"measured: {fixed:.3f} s + {per_sample:.3f} s per sample and step"
    else:
        fixed, per_sample = 0.0, 3 * 2 * counted["macs"] / (tflops * 1e12)
        peak, note = _fake_memory(cell, batch)
        basis = f"FLOP model at {tflops:g} TFLOP/s"
    training = cell.max_steps * (fixed + batch * per_sample)
    evaluation = _evaluated_samples(cell, split_sizes(data)) * per_sample / 3
    return Prediction(
        hours=(training + evaluation) / 3600,
        basis=basis,
        peak_bytes=peak,
        memory_note=note,
        num_parameters=counted["parameters"],
        macs=counted["macs"],
        steps=cell.max_steps,
        batch_size=batch,
        seq_len=data.max_seq_len,
    )


def _evaluated_samples(cell: Cell, sizes: dict[str, int]) -> int:
    """Samples of all validations and of the test; what is not known counts as none."""
    interval = int(cell.config["trainer"].get("val_check_interval") or cell.max_steps)
    return (cell.max_steps // interval) * sizes.get("val", 0) + sizes.get("test", 0)


class _MeasuredSteps:
    """Training steps of few samples, on the paths of the whole batch."""

    def __init__(self, cell: Cell, batch: int) -> None:
        data = build_data(cell)
        torch.manual_seed(cell.seed)
        self.task, self.batch = build_task(cell, data).train(), batch
        set_backends(self.task.model, batch, data.max_seq_len)
        self.steps = {
            str(n): training_step(self.task, *make_inputs(self.task, data, n)) for n in _FEW
        }

    def seconds(self) -> tuple[float, float]:
        """Return seconds of a step without samples and of every sample, neither below 0."""
        times = time_sides(
            self.steps,
            device=torch.device("cpu"),
            warmup=1,
            repeats=_ROUNDS,
            max_seconds=_MAX_SECONDS,
        )
        one, two = (summarise(times[str(n)]).median_s for n in _FEW)
        per_sample = two - one if two > one else two / 2
        return max(one - per_sample, 0.0), per_sample

    def peak_bytes(self) -> int:
        """Return the peak of a step of the whole batch, by a line through those of few."""
        one, two = (cpu_peak_bytes(step) for step in self.steps.values())
        weights = sum(p.numel() * p.element_size() for p in self.task.model.parameters())
        return one + (two - one) * (self.batch - _FEW[0]) + 3 * weights


def _fake_memory(cell: Cell, batch: int) -> tuple[int | None, str]:
    """Return the peak of a step, by a line through two small batches if the whole is too long."""
    length, model = build_data(cell).max_seq_len, cell.config["model"]["init_args"]
    scores = length**2 * int(model["attention"]["init_args"].get("num_heads", 1))
    few = max(1, _DIRECT_SCORES // scores // 2)
    try:
        if 2 * few >= batch:
            peak, parameters, note = _fake_step(cell, batch, batch)
        else:
            (first, parameters, note), (second, _, _) = (
                _fake_step(cell, n, batch) for n in (few, 2 * few)
            )
            peak = first + round((second - first) / few * (batch - few))
    except Exception as error:  # an operation that fake tensors cannot follow
        return None, f"not predicted: {' '.join(str(error).split())[:120]}"
    return peak + 8 * parameters, note


def _allocate(model: nn.Module) -> None:
    """Put parameters and buffers of a model on the CPU, without values; shared ones stay shared."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, old in held.items():
                if old is None:
                    continue
                if id(old) not in made:
                    new = torch.empty(old.shape, dtype=old.dtype, device="cpu")
                    wanted = old.requires_grad
                    made[id(old)] = nn.Parameter(new, wanted) if held is module._parameters else new
                held[name] = made[id(old)]


def _fake_step(cell: Cell, samples: int, batch: int) -> tuple[int, int, str]:
    """Peak bytes of a step of a few samples on the paths of the whole batch, and parameters."""
    data = build_data(cell)
    found: dict[str, Any] = {}

    # A task copies its metrics when it is made, which fake tensors refuse: meta tensors first.
    with torch.device("meta"):
        task = build_task(cell, data).train()
    model = task.model
    set_backends(model, batch, data.max_seq_len)

    def build() -> tuple[Callable[[], None], list[Any]]:
        _allocate(model)
        inputs = make_inputs(task, data, samples)
        text = isinstance(task, LanguageModeling)
        found["note"] = "without the output layer" if text else ""
        found["parameters"] = sum(p.numel() for p in model.parameters())
        return training_step(task, *inputs, output=not text), [model, *inputs]

    above, resident = predicted_bytes(build)
    return above + resident, found["parameters"], found["note"]
