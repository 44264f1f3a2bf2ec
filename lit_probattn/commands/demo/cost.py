"""Costs of both models: parameters, operations, time per step, memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from datamodules.expressions import MAX_LEN
from lit_probattn.attention import Attention, AttentionFactory
from lit_probattn.base.memory import predicted_bytes
from lit_probattn.commands.demo.training import BATCH, VARIANTS, Side, make_model
from lit_probattn.measure.timing import time_sides
from lit_probattn.models.classifiers import Classifier

LONG = 1024  # tokens; at this length attention maps dominate the cost, not projections
_ROUNDS = 5


@dataclass(frozen=True)
class Quantity:
    """One quantity of both models.

    Args:
        name: name with unit.
        values: values of the models, in order.
        ratio: ratio of the last model to the first.
        digits: number of decimals.
        how: counted, predicted, or measured.
    """

    name: str
    values: tuple[float, ...]
    ratio: float
    digits: int
    how: str


def quantities(sides: Sequence[Side]) -> list[Quantity]:
    """Count, predict and time both models, at the demo's size and with `LONG` tokens."""
    models = [side.model for side in sides]
    found = [
        _exact("parameters, whole model", [_parameters(model) for model in models], "counted"),
        _exact(
            "parameters, attention layers",
            [sum(layer.count_parameters() for layer in _layers(model)) for model in models],
            "counted",
        ),
    ]
    for length in (MAX_LEN, LONG):
        macs = [sum(layer.cost(length).macs for layer in _layers(model)) for model in models]
        name = f"multiply-adds of attention, {length:,} tokens, thousands"
        found.append(_exact(name, [number / 1e3 for number in macs], "counted", 0))
    if sides[0].seconds:
        name = f"training step here, {BATCH} expressions, ms"
        found.append(_timed(name, [side.seconds for side in sides]))
    steps = {name: _step(attention)[0] for name, attention in VARIANTS.items()}
    seconds = time_sides(steps, device=torch.device("cpu"), warmup=1, repeats=_ROUNDS)
    name = f"training step, one text of {LONG:,} tokens, ms"
    found.append(_timed(name, list(seconds.values())))
    name = f"peak memory of that step, {LONG:,} tokens, MiB"
    peaks = [_peak(attention) / 2**20 for attention in VARIANTS.values()]
    found.append(_exact(name, peaks, "predicted to the byte", 1))
    return found


def _exact(name: str, values: Sequence[float], how: str, digits: int = 0) -> Quantity:
    return Quantity(name, tuple(values), values[-1] / values[0], digits, how)


def _timed(name: str, seconds: Sequence[Sequence[float]]) -> Quantity:
    """Return medians, and the median of the ratios of each round."""
    ratios = [last / first for first, last in zip(seconds[0], seconds[-1], strict=False)]
    medians = tuple(1e3 * statistics.median(times) for times in seconds)
    return Quantity(name, medians, statistics.median(ratios), 1, "measured")


def _layers(model: Classifier) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


def _parameters(model: Classifier) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _step(attention: AttentionFactory) -> tuple[Callable[[], None], list[nn.Module]]:
    """Return a function that runs forward and backward on one long text, and its model."""
    model = make_model(attention, LONG)
    tokens, value = torch.randint(1, 16, (1, LONG)), torch.zeros(1, dtype=torch.int64)

    def step() -> None:
        F.cross_entropy(model(tokens), value).backward()
        model.zero_grad(set_to_none=True)

    return step, [model]


def _peak(attention: AttentionFactory) -> int:
    """Predict the peak memory of a step above resident memory, in bytes."""
    return predicted_bytes(partial(_step, attention))[0]
