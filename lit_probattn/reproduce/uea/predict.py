"""Time and memory of a cell before it runs.

Memory is that of one training step on fake tensors, to the byte the CPU allocator's, plus the
optimiser's two averages per parameter. Time is fitted to training steps of three small models,
measured when the prediction is made, with the busyness of the machine at that moment:

    seconds of a step = overhead per block + a · multiply-adds + b · score elements

Evaluation is counted as forward passes: a third of the multiply-adds and score elements.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from lit_probattn.attention import Attention
from lit_probattn.compare.predict import set_backends
from lit_probattn.configs import attention_factory
from lit_probattn.models.series.encoder import SeriesTransformer
from lit_probattn.models.transformer import MLP
from lit_probattn.randomness import RandomKey
from lit_probattn.reproduce.uea.cells import Cell
from lit_probattn.reproduce.uea.recipes import Variant
from lit_probattn.training.memory import predicted_bytes

Shape = dict[str, Any]

# Shapes of the measured steps: the least, one of large products, one of many scores.
_SMALL: Shape = {"embed_dim": 64, "head_dim": 8, "mlp_dim": 256, "num_layers": 1}
_LARGE: Shape = {"embed_dim": 256, "head_dim": 32, "mlp_dim": 1024, "num_layers": 1}
_CALIBRATION = ((_SMALL, 4, 24), (_LARGE, 32, 48), (_SMALL, 16, 160))
_ROUNDS = 3
# Elements of score maps up to which a whole step is played through on fake tensors.
_DIRECT_SCORES = 1 << 22


@dataclass(frozen=True)
class Work:
    """What one forward pass of a batch does.

    Args:
        blocks: number of blocks, for the overhead of small operations.
        macs: multiply-adds.
        scores: elements of all score maps, B · H · N² over the blocks.
    """

    blocks: int
    macs: float
    scores: float


@dataclass(frozen=True)
class Prediction:
    """Time and memory of a cell.

    Args:
        minutes: training and validation, on this machine.
        peak_bytes: memory of a training step, model and optimiser included.
        num_parameters: parameters of the model.
    """

    minutes: float
    peak_bytes: int
    num_parameters: int


class Speed:
    """Measured speed of one variant on this machine."""

    def __init__(self, variant: Variant) -> None:
        rows, seconds = [], []
        for sizes, batch, length in _CALIBRATION:
            model = _model(variant, {**sizes, "dropout": 0.1}, 8, length, 4)
            rows.append(_row(_work(model, batch, length)))
            seconds.append(_seconds_per_step(model, batch, length, 8))
        # Relative errors count, not absolute ones; no part may be negative.
        self.parts = _non_negative(np.array(rows) / np.array(seconds)[:, None])

    def seconds(self, work: Work) -> float:
        """Seconds of one training step."""
        return float(np.array(_row(work)) @ self.parts)


def _non_negative(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return x ≥ 0, (3,), that makes rows @ x nearest to 1; tries every set of parts above 0."""
    best, best_error = np.zeros(rows.shape[1]), math.inf
    for chosen in itertools.product((False, True), repeat=rows.shape[1]):
        used = np.flatnonzero(chosen)
        if not len(used):
            continue
        parts = np.zeros(rows.shape[1])
        parts[used] = np.linalg.lstsq(rows[:, used], np.ones(len(rows)), rcond=None)[0]
        error = float(np.square(rows @ parts - 1.0).sum())
        if (parts >= 0).all() and error < best_error:
            best, best_error = parts, error
    return best


def predict(cell: Cell, speed: Speed) -> Prediction:
    """Predict a cell's time and memory."""
    sizes, length = cell.sizes, cell.sizes.max_seq_len
    peak, num_parameters = _memory(cell)
    with torch.device("meta"):
        model = _model(cell.variant, _sizes(cell), sizes.num_features, length, sizes.num_classes)
    step = speed.seconds(_work(model, cell.batch_size, length))
    evaluations = math.ceil(cell.epochs / 2) * sizes.num_val + sizes.num_test
    evaluation = step / 3 / cell.batch_size * evaluations
    return Prediction((cell.max_steps * step + evaluation) / 60, peak, num_parameters)


def _sizes(cell: Cell) -> Shape:
    return {"dropout": 0.1, **cell.recipe.model}


def _model(
    variant: Variant, sizes: Shape, num_features: int, length: int, num_classes: int
) -> SeriesTransformer:
    entry = variant.entry()
    return SeriesTransformer(
        attention_factory(entry["class_path"], entry["init_args"]),
        num_features=num_features,
        num_classes=num_classes,
        max_seq_len=length,
        **sizes,
    )


def _work(model: SeriesTransformer, batch: int, length: int) -> Work:
    """Count one forward pass by the layers' own formulas."""
    macs = scores = 0
    for block in model.blocks:
        layer, mlp = cast(Attention, block.attention), cast(MLP, block.mlp)
        macs += layer.cost(length).macs
        macs += length * (mlp.fc1.weight.numel() + mlp.fc2.weight.numel())
        scores += layer.num_heads * length**2
    macs += length * model.embedding.features.weight.numel() + model.head.output.weight.numel()
    return Work(len(model.blocks), float(batch * macs), float(batch * scores))


def _row(work: Work) -> list[float]:
    return [work.blocks, work.macs, work.scores]


def _step(
    model: SeriesTransformer, inputs: Tensor, target: Tensor, key_mask: Tensor
) -> Callable[[], None]:
    key = RandomKey(0, 0, torch.arange(len(inputs)))

    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(inputs, key_mask=key_mask, rng=key), target).backward()

    return step


def _inputs(batch: int, length: int, num_features: int) -> tuple[Tensor, Tensor, Tensor]:
    mask = torch.ones(batch, length, dtype=torch.bool)
    return torch.randn(batch, length, num_features), torch.zeros(batch, dtype=torch.int64), mask


def _seconds_per_step(
    model: SeriesTransformer, batch: int, length: int, num_features: int
) -> float:
    """Median seconds of a training step, optimiser included."""
    optimizer = torch.optim.RAdam(model.parameters())
    step = _step(model, *_inputs(batch, length, num_features))
    times = []
    for _ in range(_ROUNDS + 1):
        begin = time.perf_counter()
        step()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    return float(np.median(times[1:]))


def _memory(cell: Cell) -> tuple[int, int]:
    """Bytes of a training step with everything resident, and the number of parameters.

    Long series in large batches would take minutes even as fake tensors: then two smaller batches
    are predicted, with the backends of the large one, and a line is drawn through them.
    """
    batch = cell.batch_size
    scores = cell.sizes.max_seq_len**2 * _num_heads(cell)
    if batch * scores <= _DIRECT_SCORES:
        peak, num_parameters = _fake_step(cell, batch)
    else:
        few = max(1, _DIRECT_SCORES // scores // 2)
        (first, num_parameters), (second, _) = (_fake_step(cell, n) for n in (few, 2 * few))
        peak = first + round((second - first) / few * (batch - few))
    return peak + 8 * num_parameters, num_parameters


def _num_heads(cell: Cell) -> int:
    return int(cell.variant.entry()["init_args"]["num_heads"])


def _fake_step(cell: Cell, batch: int) -> tuple[int, int]:
    """Peak bytes of one step of `batch` samples, and the number of parameters."""
    sizes, length, num_parameters = cell.sizes, cell.sizes.max_seq_len, 0

    def build() -> tuple[Callable[[], None], list[Any]]:
        nonlocal num_parameters
        model = _model(cell.variant, _sizes(cell), sizes.num_features, length, sizes.num_classes)
        set_backends(model, cell.batch_size, length)
        inputs = _inputs(batch, length, sizes.num_features)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        return _step(model, *inputs), [model, *inputs]

    above, resident = predicted_bytes(build)
    return above + resident, num_parameters
