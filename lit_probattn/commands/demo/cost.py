"""Costs of both models: parameters, operations, time per step, memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from datamodules.expressions import MAX_LEN, NUM_CLASSES
from lit_probattn.attention import Attention
from lit_probattn.commands.demo.training import BATCH, VARIANTS, Side, make_model
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
    steps = [_step(attention, LONG) for attention in VARIANTS.values()]
    name = f"training step, one text of {LONG:,} tokens, ms"
    found.append(_timed(name, _in_turns(steps)))
    name = f"peak memory of that step, {LONG:,} tokens, MiB"
    found.append(
        _exact(
            name,
            [_peak(attention) / 2**20 for attention in VARIANTS.values()],
            "predicted to the byte",
            1,
        )
    )
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


def _step(attention: Callable[..., Attention], length: int) -> Callable[[], None]:
    """Return a function that runs forward and backward on one text."""
    model = make_model(attention, length)
    tokens = torch.randint(1, 16, (1, length), generator=torch.Generator().manual_seed(0))
    value = torch.zeros(1, dtype=torch.int64) + NUM_CLASSES // 2

    def step() -> None:
        F.cross_entropy(model(tokens), value).backward()
        model.zero_grad(set_to_none=True)

    return step


def _in_turns(steps: Sequence[Callable[[], None]]) -> list[list[float]]:
    """Return the seconds of several rounds of all steps, after one warm-up round."""
    seconds: list[list[float]] = [[] for _ in steps]
    for number in range(_ROUNDS + 1):
        for step, times in zip(steps, seconds, strict=True):
            begin = time.perf_counter()
            step()
            if number:
                times.append(time.perf_counter() - begin)
    return seconds


def _peak(attention: Callable[..., Attention]) -> int:
    """Predict the peak memory of a step above resident memory, in bytes."""
    from lit_probattn.base.memory import predicted_bytes

    def build() -> tuple[Callable[[], object], list[torch.nn.Module]]:
        model = make_model(attention, LONG)
        tokens = torch.randint(1, 16, (1, LONG))
        value = torch.zeros(1, dtype=torch.int64)
        return (lambda: F.cross_entropy(model(tokens), value).backward()), [model]

    return predicted_bytes(build)[0]
