"""Time and memory of a cell before it runs.

Training steps of one and of two samples at full length run on this machine, with the attention
backends of the whole batch. Memory is a line through their peaks in the CPU's allocator, with
parameters, gradients and the optimiser's two averages. Time is either measured or modelled, and the
result says which. `measured`: a line through the medians of those steps, times the steps, with the
busyness of the moment. `flops`: three times the multiply-adds of a forward pass, by a given speed.
An evaluated sample counts as a third of a trained one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lit_probattn.compare.built import (
    build_data,
    build_task,
    counts,
    make_inputs,
    set_backends,
    split_sizes,
    training_step,
)
from lit_probattn.compare.cells import Cell
from profiling.measure.memory import cpu_peak_bytes
from profiling.measure.timing import summarise, time_sides

_ROUNDS, _MAX_SECONDS = 2, 20.0
# Batches whose steps a line is drawn through.
_FEW = (1, 2)


@dataclass(frozen=True)
class Prediction:
    """What a cell will take.

    Args:
        hours: training, validation and test, on one device.
        basis: how the time was found.
        peak_bytes: memory of a training step.
        num_parameters: parameters.
        macs: multiply-adds of one sample's forward pass.
        steps: optimiser steps.
        batch_size: samples of a step.
        seq_len: padded length.
    """

    hours: float
    basis: str
    peak_bytes: int
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
    steps = _MeasuredSteps(cell, batch)
    peak = steps.peak_bytes()  # first: it warms up
    if tflops is None:
        fixed, per_sample = steps.seconds()
        basis = f"measured: {fixed:.3f} s + {per_sample:.3f} s per sample and step"
    else:
        fixed, per_sample = 0.0, 3 * 2 * counted["macs"] / (tflops * 1e12)
        basis = f"FLOP model at {tflops:g} TFLOP/s"
    training = cell.max_steps * (fixed + batch * per_sample)
    evaluation = _evaluated_samples(cell, split_sizes(data)) * per_sample / 3
    return Prediction(
        hours=(training + evaluation) / 3600,
        basis=basis,
        peak_bytes=peak,
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
        """Return seconds of a step without samples and of every sample, neither below 0.

        The steps have run before.
        """
        times = time_sides(
            self.steps,
            device=torch.device("cpu"),
            warmup=0,
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
